"""KL to the reference policy as a part of the reward, and the controller of its coefficient.

Per sampled token, d = log pi_old - log pi_ref (Schulman 2020, "Approximating KL divergence"):

    k1   d                     unbiased, may be negative
    k2   d^2 / 2
    k3   exp(-d) + d - 1       unbiased, never negative; at most 10, so that one strange token does not own the batch (as ROLL)
    abs  |d|

Nothing here carries a gradient. `full` needs whole distributions, which are never kept: it does not exist here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from agenticrun_workers.algorithms.segments import Floats, Integers, segment_sums

KlKind = Literal["k1", "k2", "k3", "abs"]

KL_CODES: dict[KlKind | None, int] = {None: 0, "k1": 1, "k2": 2, "k3": 3, "abs": 4}
"""How kernels know the kinds; 0 is no KL."""

K3_LIMIT = 10.0


def mean_kl(kl_K: Floats, response_tokens_K: Integers, cu_turns_N1: Integers) -> float:
    """Mean over trajectories with response tokens of their KL per token: what the controller compares with its target."""
    tokens_N = segment_sums(response_tokens_K, cu_turns_N1)
    spoke_N = tokens_N > 0
    return (
        float(np.mean(segment_sums(kl_K, cu_turns_N1)[spoke_N] / tokens_N[spoke_N]))
        if spoke_N.any()
        else 0.0
    )


@dataclass(frozen=True, slots=True)
class KlController:
    """coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon) (Ziegler et al. 2019, arXiv 1909.08593); fixed without a target.

    A value: `updated` returns the next one, and `coef` is all that a checkpoint has to keep.
    """

    coef: float
    target: float | None = None
    horizon: float = 10_000.0

    def updated(self, kl: float, samples: int) -> KlController:
        """The controller after a batch of n samples with this mean KL."""
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return KlController(
            self.coef * (1.0 + error * samples / self.horizon), self.target, self.horizon
        )
