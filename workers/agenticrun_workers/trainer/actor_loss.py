"""The policy's losses on one micro-batch, the same for every trainer."""

from __future__ import annotations

import torch
from torch import Tensor

from agenticrun_workers.algorithms.aggregation import StepTotals, token_coefficients
from agenticrun_workers.algorithms.losses import LossTokens, kl_loss, policy_loss
from agenticrun_workers.trainer.actor_metrics import ActorMetrics
from agenticrun_workers.trainer.micro_batch import MicroBatch
from agenticrun_workers.trainer.over_ranks import Reduce
from agenticrun_workers.trainer.strategy import LossSpec, Sample

OPTIONAL = ("old_logprobs_T", "engine_logprobs_T", "is_weights_T")
"""Arrays that the loss reads if the samples have them: all samples of a step, or none."""


class ActorLoss:
    """One optimizer step's loss, in parts whose gradients add up. Making it is collective.

    Args:
        samples: this rank's.
        totals: the step's denominators over all ranks.
        most: element-wise maximum over the data-parallel ranks: a rank without samples computes what the others do.
        metrics: gets the sums of each part.
    """

    def __init__(
        self,
        samples: list[Sample],
        spec: LossSpec,
        totals: StepTotals,
        most: Reduce,
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
        """One micro-batch's part, a scalar."""
        spec, samples, dtype = self._spec, self._samples, logprobs_N.dtype
        tokens = self._tokens(batch, logprobs_N)
        weight_N = batch.pick(samples, "weight_T", dtype)
        coefficients_N = token_coefficients(
            weight_N, batch.sequence_N, self._totals, spec.aggregation, spec.aggregation_norm
        )
        policy = policy_loss(spec.variant, spec.ratio, tokens)
        pg = (coefficients_N * policy.loss_N).sum()
        kl = logprobs_N.new_zeros(())
        if spec.kl_coef:
            ref_N = batch.pick(samples, "ref_logprobs_T", dtype)
            kl = (coefficients_N * kl_loss(logprobs_N, ref_N, spec.kl_kind, spec.kl_limit)).sum()
        total: Tensor = pg + spec.kl_coef * kl
        if spec.entropy_coef:
            total = total - spec.entropy_coef * (coefficients_N * entropies_N).sum()
        self._metrics.add(
            (pg, kl, total),
            policy,
            weight_N,
            entropies_N,
            tokens,
            on_policy="old_logprobs_T" not in self._given,
        )
        return total

    def _tokens(self, batch: MicroBatch, logprobs_N: Tensor) -> LossTokens:
        """What the loss reads of a micro-batch."""
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
    """One warm-up step's weighted cross-entropy, in parts whose gradients add up. `total` is the sum of the parts so far."""

    def __init__(self, samples: list[Sample], totals: StepTotals) -> None:
        self._samples = samples
        self._totals = totals
        self.total = 0.0

    def __call__(self, batch: MicroBatch, logprobs_N: Tensor, _: Tensor) -> Tensor:
        """One micro-batch's part, a scalar."""
        weight_N = batch.pick(self._samples, "weight_T", logprobs_N.dtype)
        loss = -(
            token_coefficients(weight_N, batch.sequence_N, self._totals, "token-mean") * logprobs_N
        ).sum()
        self.total += loss.item()
        return loss
