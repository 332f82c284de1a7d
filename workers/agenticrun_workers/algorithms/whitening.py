"""Mean 0 and standard deviation 1 over the masked tokens of ALL ranks.

    x' = (x - mean) / std        std unbiased (n - 1); with n < 2 or std <= 1e-6 only centred

Computed in two phases: (n, sum) first, then the squares about the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.algorithms import backend
from agenticrun_workers.algorithms.normalization import MIN_SPREAD
from agenticrun_workers.algorithms.segments import Booleans, Floats, Integers, column_sums

Reduce = Callable[[Floats], Floats]
"""Element-wise sum of a float64 array over the ranks.

It is a collective, so every rank calls it equally often.
"""


@dataclass(frozen=True, slots=True)
class Moments:
    """Number, mean and sum of squared deviations of some values."""

    count: float
    mean: float
    m2: float

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two values."""
        return float(np.sqrt(self.m2 / (self.count - 1))) if self.count > 1 else 0.0

    @property
    def scale(self) -> float:
        """Factor by which whitening multiplies centred values."""
        return 1.0 / self.std if self.std > MIN_SPREAD else 1.0


def moments(
    count: float, total: float, deviations: Callable[[float], Floats], reduce: Reduce
) -> Moments:
    """Return the moments of values over all ranks.

    Args:
        count, total: number and sum of this rank's values.
        deviations: maps a center to [sum of x - center, sum of its square] of this rank's values.
        reduce: sum over the ranks.
    """
    count, total = reduce(np.array([count, total], np.float64))
    if not count:
        reduce(np.zeros(2))
        return Moments(0.0, 0.0, 0.0)
    center = float(total / count)
    rest, squares = reduce(deviations(center))
    # Correct both for the rounding error in the sum about the mean (Chan, Golub, LeVeque 1983).
    return Moments(
        float(count), center + float(rest / count), float(max(squares - rest * rest / count, 0.0))
    )


def token_moments(
    count: float,
    total: float,
    values_L: NDArray[Any],
    mask_L: Booleans,
    cu_N1: Integers,
    reduce: Reduce,
) -> Moments:
    """Return the moments of masked tokens over all ranks.

    Args:
        count, total: number and sum of the masked tokens of this rank.
        values_L: of this rank's tokens.
        mask_L: of this rank's tokens.
        cu_N1: offsets of this rank's trajectories.
        reduce: sum over the ranks.
    """

    def deviations(center: float) -> Floats:
        sums_N2 = np.zeros((len(cu_N1) - 1, 2))
        backend.run("deviations", cu_N1, mask_L, values_L, center, sums_N2)
        return column_sums(sums_N2)

    return moments(count, total, deviations, reduce)


def rescale(
    values_L: NDArray[Any],
    mask_L: Booleans,
    cu_N1: Integers,
    shift: float = 0.0,
    scale: float = 1.0,
    bound: float | None = None,
) -> int:
    """Set x to clip((x - shift) * scale) on masked tokens, in place.

    Returns:
        the number of tokens that the clip changed.
    """
    clipped_N = np.zeros(len(cu_N1) - 1, np.int64)
    backend.run(
        "rescale",
        cu_N1,
        mask_L,
        values_L,
        shift,
        scale,
        np.inf if bound is None else bound,
        clipped_N,
    )
    return int(clipped_N.sum())
