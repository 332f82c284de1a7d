"""Mean 0 and standard deviation 1 over the masked tokens of ALL ranks, in two phases: (n, sum), then the squares about the mean.

x' = (x - mean) / std        std unbiased (n - 1); with n < 2 or std <= 1e-6 only centred
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.algorithms import backend
from agenticrun_workers.algorithms.normalization import MIN_SPREAD
from agenticrun_workers.algorithms.segments import Booleans, Floats, Integers

Reduce = Callable[[Floats], Floats]
"""Element-wise sum of a float64 array over the ranks; a collective, so every rank calls it equally often."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Number, mean and sum of squared deviations of some values."""

    count: float
    mean: float
    m2: float

    @property
    def std(self) -> float:
        """Unbiased; 0 for fewer than two values."""
        return float(np.sqrt(self.m2 / (self.count - 1))) if self.count > 1 else 0.0

    @property
    def scale(self) -> float:
        """What whitening multiplies centred values by."""
        return 1.0 / self.std if self.std > MIN_SPREAD else 1.0


def moments(sums_about: Callable[[float], Floats], reduce: Reduce) -> Moments:
    """Moments over the ranks of what `sums_about(center)` sums: [number, sum of x - center, sum of its square] of this rank."""
    count, total = reduce(sums_about(0.0)[:2])
    mean = float(total / count) if count else 0.0
    _, rest, squares = reduce(sums_about(mean))
    # The rounding of the mean, corrected (Chan, Golub, LeVeque 1983).
    return Moments(float(count), mean, float(max(squares - rest * rest / count, 0.0)) if count else 0.0)


def token_moments(values_L: NDArray[Any], mask_L: Booleans, cu_N1: Integers, reduce: Reduce) -> Moments:
    """Moments of masked tokens over the ranks."""

    def sums_about(center: float) -> Floats:
        sums_N3 = np.zeros((len(cu_N1) - 1, 3))
        backend.run("sums", cu_N1, mask_L, values_L, center, sums_N3)
        return sums_N3.sum(axis=0)

    return moments(sums_about, reduce)


def whiten(values_L: NDArray[Any], mask_L: Booleans, cu_N1: Integers, reduce: Reduce) -> None:
    """Whitens masked tokens in place; the others are left alone."""
    over_ranks = token_moments(values_L, mask_L, cu_N1, reduce)
    rescale(values_L, mask_L, cu_N1, over_ranks.mean, over_ranks.scale)


def rescale(
    values_L: NDArray[Any], mask_L: Booleans, cu_N1: Integers, shift: float = 0.0, scale: float = 1.0, bound: float | None = None
) -> int:
    """x <- clip((x - shift) * scale) on masked tokens, in place. Returns the number of tokens that the clip changed."""
    clipped_N = np.zeros(len(cu_N1) - 1, np.int64)
    backend.run("rescale", cu_N1, mask_L, values_L, shift, scale, np.inf if bound is None else bound, clipped_N)
    return int(clipped_N.sum())
