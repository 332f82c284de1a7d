"""The actor's metrics of one optimizer step, summed over micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from agenticrun_workers.algorithms.aggregation import StepTotals
from agenticrun_workers.algorithms.losses import LossTokens, PolicyLoss
from agenticrun_workers.trainer.ranks import Ranks

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


class ActorMetrics:
    """Losses under the step's aggregation, everything else as mean over the weighted tokens.

    approxkl and policykl estimate KL(old || current) as the mean of (lp - old)^2 / 2 and of old - lp. ess is the effective
    sample size of the ratios, (sum r)^2 / (n sum r^2), a share of the tokens. engine/logprob_gap is the mean of |lp - engine|,
    where both are about the same weights.
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
        *,
        on_policy: bool,
    ) -> None:
        """A micro-batch: its policy, KL and total loss, and its tokens. `on_policy`: the weights are those that sampled."""
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
        engine_N = tokens.engine_logprobs_N if on_policy else None
        gap_N = (
            torch.zeros_like(ratio_N) if engine_N is None else (tokens.logprobs_N - engine_N).abs()
        )
        per_token += [gap_N, torch.full_like(ratio_N, float(engine_N is not None))]
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
        """Equal on every rank. Collective."""
        sums = dict(zip((*SUMS, *HIDDEN), ranks.sum(self._sums.tolist()), strict=True))
        square, gap, gap_share = (sums.pop(name) for name in HIDDEN)
        largest, smallest = ranks.max(self._extremes.tolist())
        extras = {
            "ratio_max": largest,
            "ratio_min": -smallest,
            "ess": sums["ratio_mean"] ** 2 / square if square else 0.0,
        }
        metrics = {f"actor/{name}": value for name, value in (sums | extras).items()}
        return metrics | ({"engine/logprob_gap": gap / gap_share} if gap_share else {})


def nothing_learned() -> dict[str, float]:
    """The metrics of a step without a weighted token: no loss, no change."""
    still = {"ratio_mean": 1.0, "ratio_max": 1.0, "ratio_min": 1.0, "ess": 1.0}
    return {
        f"actor/{name}": still.get(name, 0.0) for name in (*SUMS, "ratio_max", "ratio_min", "ess")
    }
