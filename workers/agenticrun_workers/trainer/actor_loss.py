"""The policy's loss on one micro-batch, and its metrics: the same for every strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agenticrun_workers.algorithms.losses import (
    Aggregation,
    KlKind,
    LossTokens,
    PolicyLoss,
    Ppo,
    RatioLevel,
    StepTotals,
    Variant,
    kl_loss,
    policy_loss,
    token_coefficients,
)
from agenticrun_workers.trainer.micro_batch import MicroBatch
from agenticrun_workers.trainer.ranks import Ranks
from agenticrun_workers.trainer.samples import Sample

OPTIONAL = (
    "old_logprobs_T",
    "ref_logprobs_T",
    "engine_logprobs_T",
    "is_weights_T",
    "current_T",
)
"""Arrays that the loss reads if the samples have them: all samples of a step, or none."""
SUMS = (
    "pg_loss",
    "kl_loss",
    "total_loss",
    "entropy",
    "clipfrac",
    "approxkl",
    "policykl",
    "ratio_mean",
)
HIDDEN = ("ratio_square", "gap", "gap_share")


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The loss of `train_step`: aggregated policy loss + kl_coef KL - entropy_coef entropy.

    Raises:
        ValueError: a ratio level other than token for a variant without ratios.
    """

    variant: Variant = field(default_factory=Ppo)
    ratio: RatioLevel = "token"
    aggregation: Aggregation = "token-mean"
    aggregation_norm: float = 1.0
    """The constant C of seq-mean-token-sum-norm."""
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: KlKind = "k3"
    kl_limit: float | None = 10.0
    """A token's k3 is clamped to it, without gradient above it."""
    temperature: float = 1.0
    """Temperature of sampling: log-probs and entropies are those of logits / temperature."""

    def __post_init__(self) -> None:
        if self.ratio != "token" and not self.variant.reads_ratio:
            raise ValueError(
                f"the loss {type(self.variant).__name__} has no ratio "
                f"that could be of level {self.ratio}"
            )


class ActorLoss:
    """One optimizer step's loss, in parts that add up. Collective to construct.

    Args:
        samples: this rank's.
        spec: of the loss.
        totals: the step's denominators over all ranks.
        most: element-wise maximum over all ranks, so that a rank without samples computes the same
            loss as the others.
        metrics: gets the sums of each part.
    """

    def __init__(
        self,
        samples: list[Sample],
        spec: LossSpec,
        totals: StepTotals,
        most: Callable[[list[float]], list[float]],
        metrics: ActorMetrics,
    ) -> None:
        self._samples = samples
        self._spec = spec
        self._totals = totals
        self._metrics = metrics
        flags = [
            float(any(getattr(sample, name) is not None for sample in samples)) for name in OPTIONAL
        ]
        self._given = frozenset(
            name for name, flag in zip(OPTIONAL, most(flags), strict=True) if flag
        )

    def __call__(self, batch: MicroBatch, logprobs_N: Tensor, entropies_N: Tensor) -> Tensor:
        """Return one micro-batch's part, a scalar."""
        spec, samples, dtype = self._spec, self._samples, logprobs_N.dtype
        tokens = self._tokens(batch, logprobs_N)
        weight_N = batch.pick(samples, "weight_T", dtype)
        coefficients_N = token_coefficients(
            weight_N, batch.sequence_N, self._totals, spec.aggregation, spec.aggregation_norm
        )
        policy = policy_loss(spec.variant, spec.ratio, tokens)
        pg = (coefficients_N * policy.loss_N).sum()
        kl = logprobs_N.new_zeros(())
        if spec.kl_coef or "ref_logprobs_T" in self._given:
            ref_N = batch.pick(samples, "ref_logprobs_T", dtype)
            # Also a reference that only the reward reads shows how far the policy has moved.
            moved_N = logprobs_N if spec.kl_coef else logprobs_N.detach()
            kl = (coefficients_N * kl_loss(moved_N, ref_N, spec.kl_kind, spec.kl_limit)).sum()
        total: Tensor = pg + spec.kl_coef * kl
        if spec.entropy_coef:
            total = total - spec.entropy_coef * (coefficients_N * entropies_N).sum()
        self._metrics.add(
            (pg, kl, total),
            policy,
            weight_N,
            entropies_N,
            tokens,
            batch.pick(samples, "current_T", dtype) if "current_T" in self._given else None,
        )
        return total

    def _tokens(self, batch: MicroBatch, logprobs_N: Tensor) -> LossTokens:
        """Return the inputs of the loss for a micro-batch."""
        samples, dtype = self._samples, logprobs_N.dtype

        def optional(name: str) -> Tensor | None:
            return batch.pick(samples, name, dtype) if name in self._given else None

        old_N = optional("old_logprobs_T")
        scores_S = torch.tensor(
            [samples[i].score for i in batch.samples], dtype=dtype, device=logprobs_N.device
        )
        return LossTokens(
            logprobs_N=logprobs_N,
            old_logprobs_N=logprobs_N.detach() if old_N is None else old_N,
            advantages_N=batch.pick(samples, "advantages_T", dtype),
            sequence_N=batch.sequence_N,
            turn_N=batch.pick(samples, "turns_T", torch.int64),
            score_N=scores_S[batch.sequence_N],
            engine_logprobs_N=optional("engine_logprobs_T"),
            is_weights_N=optional("is_weights_T"),
        )


class SupervisedLoss:
    """One warm-up step's weighted cross-entropy, in parts that add up to `total`."""

    def __init__(self, samples: list[Sample], totals: StepTotals) -> None:
        self._samples = samples
        self._totals = totals
        self.total = 0.0

    def __call__(self, batch: MicroBatch, logprobs_N: Tensor, _: Tensor) -> Tensor:
        """Return one micro-batch's part, a scalar."""
        weight_N = batch.pick(self._samples, "weight_T", logprobs_N.dtype)
        loss = -(
            token_coefficients(weight_N, batch.sequence_N, self._totals, "token-mean") * logprobs_N
        ).sum()
        self.total += loss.item()
        return loss


class ActorMetrics:
    """The actor's metrics of one optimizer step, summed over micro-batches and ranks.

    Losses have the step's aggregation; everything else is a mean over the weighted tokens.
    approxkl and policykl estimate KL(old || current) as the mean of (lp - old)^2 / 2 and of
    old - lp. ess is the effective sample size of the ratios, (sum r)^2 / (n sum r^2), as a share of
    the tokens. engine/logprob_gap is the mean of |lp - engine| over tokens of the same weights.
    """

    def __init__(self, totals: StepTotals, device: torch.device) -> None:
        self._totals = totals
        self._sums = torch.zeros(len(SUMS) + len(HIDDEN), dtype=torch.float64, device=device)
        self._extremes = torch.full((2,), -torch.inf, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        losses: tuple[Tensor, Tensor, Tensor],
        policy: PolicyLoss,
        weight_N: Tensor,
        entropy_N: Tensor,
        tokens: LossTokens,
        current_N: Tensor | None,
    ) -> None:
        """Add a micro-batch.

        Args:
            losses: policy loss, KL and total, scalars.
            policy: loss and ratio of each token.
            weight_N: the loss mask.
            entropy_N: of each token's distribution.
            tokens: inputs of the loss.
            current_N: 1 on tokens that these weights sampled, else 0; None: the gap to the engine
                is not measured.
        """
        share_N = weight_N.double() / self._totals.weight
        ratio_N = policy.ratio_N.double()
        change_N = (tokens.logprobs_N - tokens.old_logprobs_N).double()
        per_token = [
            entropy_N,
            policy.clipped_N,
            change_N.square() / 2,
            -change_N,
            ratio_N,
            ratio_N.square(),
        ]
        engine_N = tokens.engine_logprobs_N
        if current_N is None or engine_N is None:
            per_token += [torch.zeros_like(ratio_N), torch.zeros_like(ratio_N)]
        else:
            per_token += [current_N * (tokens.logprobs_N - engine_N).abs(), current_N]
        self._sums += torch.stack(
            [
                *(loss.double() for loss in losses),
                *((share_N * values_N.double()).sum() for values_N in per_token),
            ]
        )
        if len(ratio_N):
            self._extremes = torch.maximum(
                self._extremes, torch.stack([ratio_N.max(), -ratio_N.min()])
            )

    def result(self, ranks: Ranks) -> dict[str, float]:
        """Return the metrics, equal on every rank. Collective."""
        sums = dict(zip((*SUMS, *HIDDEN), ranks.sum_scores(self._sums.tolist()), strict=True))
        square, gap, gap_share = (sums.pop(name) for name in HIDDEN)
        largest, smallest = ranks.max(self._extremes.tolist())
        extras = {
            "ratio_max": largest,
            "ratio_min": -smallest,
            "ess": sums["ratio_mean"] ** 2 / square if square else 0.0,
        }
        metrics = {f"actor/{name}": value for name, value in (sums | extras).items()}
        return metrics | ({"engine/logprob_gap": gap / gap_share} if gap_share else {})
