"""KL to the reference policy as a part of the reward, and the controller of its coefficient.

Per sampled token, d = log pi_old - log pi_ref (Schulman 2020, "Approximating KL divergence"):

    k1   d                     unbiased, may be negative
    k2   d^2 / 2
    k3   exp(-d) + d - 1       unbiased, never negative; at most 10, as in ROLL
    abs  |d|

The limit of k3 keeps one strange token from dominating the batch. Nothing here carries a gradient.
`full` is not available: it needs whole distributions, which are never kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from agenticrun_workers.algorithms.segments import Floats, Integers, segment_sums

KlKind = Literal["k1", "k2", "k3", "abs"]

KL_CODES: dict[KlKind | None, int] = {None: 0, "k1": 1, "k2": 2, "k3": 3, "abs": 4}
"""Codes of the kinds in kernels; 0 is no KL."""

K3_LIMIT = 10.0


def mean_kl(kl_K: Floats, response_tokens_K: Integers, cu_turns_N1: Integers) -> float:
    """Return the mean KL per token of each trajectory, averaged over trajectories with a response.

    The controller compares this value with its target.
    """
    tokens_N = segment_sums(response_tokens_K, cu_turns_N1)
    spoke_N = tokens_N > 0
    return (
        float(np.mean(segment_sums(kl_K, cu_turns_N1)[spoke_N] / tokens_N[spoke_N]))
        if spoke_N.any()
        else 0.0
    )


@dataclass(frozen=True, slots=True)
class KlController:
    """Controller of the KL coefficient (Ziegler et al. 2019, arXiv 1909.08593).

        coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)

    Without a target the coefficient is fixed. The controller is a value: `updated` returns the next
    one. A checkpoint only has to store `coef`.
    """

    coef: float
    target: float | None = None
    horizon: float = 10_000.0

    def updated(self, kl: float, samples: int) -> KlController:
        """Return the controller after a batch of n samples with this mean KL."""
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return KlController(
            self.coef * (1.0 + error * samples / self.horizon), self.target, self.horizon
        )
