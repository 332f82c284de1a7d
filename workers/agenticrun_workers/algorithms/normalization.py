"""Normalisation of scores over the batch or sets of it, and whitening of tokens over all ranks.

    x' = (x - mean) / std        mean and std each over the batch, over x's own set, or not at all

The standard deviation is unbiased (n - 1). A set with n < 2, or whose deviation is no more than the
rounding of float32 (`ROUNDING` of its largest score), has no spread to divide by. Its mean is each
score itself, so that nothing is left of the rounding. Its scores become 0, and are counted.

Whitening does the same to the masked tokens of ALL ranks, which are only centred if they have no
spread.

Both take two phases: (n, sum) first, then the squares about the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.algorithms import kernels
from agenticrun_workers.algorithms.compiled import run
from agenticrun_workers.algorithms.segments import Booleans, Floats, Integers, column_sums

Over = Literal["batch", "group", "none"]
RunningOver = Literal["batch", "group", "running", "none"]
Grouping = Literal["batch", "group", "tag", "state"]

ROUNDING = 4.0 * float(np.finfo(np.float32).eps)
"""At or below this share of the largest score, a standard deviation is rounding: rewards and
log-probs are float32. It is relative, because a reward of 100 is rounded to 8e-6, and rewards of
1e-7 may differ."""

Reduce = Callable[[Floats], Floats]
"""Element-wise sum of a float64 array over the ranks.

It is a collective, so every rank calls it equally often.
"""


@dataclass(frozen=True, slots=True)
class Normalization:
    """x' = (x - shift) * scale, one shift and scale per score."""

    shift_N: Floats
    scale_N: Floats
    degenerate_N: Booleans
    """True for scores of a set without spread, if a standard deviation was asked for."""

    def apply(self, scores_N: Floats) -> Floats:
        return (scores_N - self.shift_N) * self.scale_N


def normalization(
    scores_N: Floats, sets_N: Integers, mean: Over, std: Over, sizes_N: Floats | None = None
) -> Normalization:
    """Return shift and scale that normalise these scores.

    Args:
        scores_N: float64 [N], valid ones only.
        sets_N: number of each score's set, from 0; the meaning of `group`. All 0 if the set is the
            whole batch.
        mean: set of the mean.
        std: set of the standard deviation.
        sizes_N: sum of the absolute values that were added to each score, which sets its rounding;
            None: of the score alone.
    """
    if not len(scores_N):
        return Normalization(np.zeros(0), np.ones(0), np.zeros(0, np.bool_))
    over = {"batch": np.zeros_like(sets_N), "group": sets_N}
    shift_N = np.zeros(len(scores_N)) if mean == "none" else centers(scores_N, over[mean], sizes_N)
    if std == "none":
        return Normalization(shift_N, np.ones(len(scores_N)), np.zeros(len(scores_N), np.bool_))
    std_N = set_stds(scores_N, over[std])
    # A deviation of pure rounding would blow noise up to size 1.
    degenerate_N = ~spread(scores_N, over[std], sizes_N)
    same_set = mean != "none" and np.array_equal(over[mean], over[std])
    scale_N = np.where(
        degenerate_N, 1.0 if same_set else 0.0, 1.0 / np.where(degenerate_N, 1.0, std_N)
    )
    return Normalization(shift_N, scale_N, degenerate_N)


def spread(scores_N: Floats, sets_N: Integers, sizes_N: Floats | None = None) -> Booleans:
    """Return True for scores of a set that differ by more than rounding, [N]; see `normalization`.

    A set of one has no spread.
    """
    # Relative to the largest score of the set, because float32 rounds relative to size.
    largest = np.zeros(int(sets_N.max(initial=-1)) + 1)
    np.maximum.at(largest, sets_N, np.abs(scores_N) if sizes_N is None else sizes_N)
    differs_N: Booleans = set_stds(scores_N, sets_N) > ROUNDING * largest[sets_N]
    return differs_N


def centers(scores_N: Floats, sets_N: Integers, sizes_N: Floats | None = None) -> Floats:
    """Return the mean of each score's own set, [N]; the score itself if the set has no spread."""
    return np.where(spread(scores_N, sets_N, sizes_N), set_means(scores_N, sets_N), scores_N)


def set_means(scores_N: Floats, sets_N: Integers) -> Floats:
    """Return the mean of each score's own set, [N]."""
    return (np.bincount(sets_N, scores_N) / np.maximum(np.bincount(sets_N), 1))[sets_N]


def set_stds(scores_N: Floats, sets_N: Integers) -> Floats:
    """Return the unbiased standard deviation of each score's own set, [N]; 0 for a set of one.

    It is computed in two phases: the mean first, then the squares about it.
    """
    # About the mean: the sum of squares minus the square of the sum cancels digits.
    squares = np.bincount(sets_N, (scores_N - set_means(scores_N, sets_N)) ** 2)
    return np.sqrt(squares / np.maximum(np.bincount(sets_N) - 1, 1))[sets_N]


def set_sizes(sets_N: Integers) -> Integers:
    """Return the size of each score's own set, [N]."""
    return np.bincount(sets_N)[sets_N]


def zero_variance_share(scores_N: Floats, sets_N: Integers, sizes_N: Floats | None = None) -> float:
    """Return the share of sets whose scores are equal up to rounding; 0 without sets.

    With a baseline per set, such a set contributes no gradient.
    """
    if not len(scores_N):
        return 0.0
    first = np.unique(sets_N, return_index=True)[1]
    return float(np.mean(~spread(scores_N, sets_N, sizes_N)[first]))


@dataclass(frozen=True, slots=True)
class Moments:
    """Number, mean and sum of squared deviations of some values."""

    count: float
    mean: float
    m2: float

    @classmethod
    def of(cls, values: Floats) -> Moments:
        """Return the moments of values, the same in any order."""
        if not len(values):
            return cls(0.0, 0.0, 0.0)
        # Exact sums, so that the order of arrival cannot change a bit.
        mean = math.fsum(values) / len(values)
        return cls(float(len(values)), mean, math.fsum((values - mean) ** 2))

    def merged(self, other: Moments) -> Moments:
        """Return the moments of all values of both (Chan, Golub, LeVeque 1983)."""
        count = self.count + other.count
        if not count:
            return self
        apart = other.mean - self.mean
        return Moments(
            count,
            self.mean + apart * other.count / count,
            self.m2 + other.m2 + apart * apart * self.count * other.count / count,
        )

    def spreads(self, size: float = 0.0) -> bool:
        """Return True if the values differ by more than rounding; `size` as in `scale`."""
        return self.std > ROUNDING * max(abs(self.mean), size)

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two values."""
        return float(np.sqrt(self.m2 / (self.count - 1))) if self.count > 1 else 0.0

    def scale(self, size: float = 0.0) -> float:
        """Return the factor by which whitening multiplies centred values.

        Args:
            size: of what was subtracted to get the values, so that only rounding may be left of
                them.
        """
        return 1.0 / self.std if self.spreads(size) else 1.0


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
        # The number of reductions does not depend on the values.
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
        run(kernels.deviations, cu_N1, mask_L, values_L, center, sums_N2)
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
    run(
        kernels.rescale,
        cu_N1,
        mask_L,
        values_L,
        shift,
        scale,
        np.inf if bound is None else bound,
        clipped_N,
    )
    return int(clipped_N.sum())
