"""Centring and scaling of scores by the batch or by sets of it.

    x' = (x - mean) / std        mean and std each over the batch, over x's own set, or not at all

The standard deviation is unbiased (n - 1). A set with n < 2 or std <= 1e-6 has no spread to divide
by. Its scores stay centred if the mean was over that same set, else they become 0; either way they
are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from agenticrun_workers.algorithms.segments import Booleans, Floats, Integers

Over = Literal["batch", "group", "none"]
Grouping = Literal["batch", "group", "tag", "state"]

MIN_SPREAD = 1e-6
"""At or below this standard deviation a set has no spread."""


@dataclass(frozen=True, slots=True)
class Normalization:
    """x' = (x - shift) * scale, one shift and scale per score."""

    shift_N: Floats
    scale_N: Floats
    degenerate_N: Booleans
    """True for scores of a set without spread, if a standard deviation was asked for."""

    def apply(self, scores_N: Floats) -> Floats:
        return (scores_N - self.shift_N) * self.scale_N


def normalization(scores_N: Floats, sets_N: Integers, mean: Over, std: Over) -> Normalization:
    """Return shift and scale that normalise these scores.

    Args:
        scores_N: float64 [N], valid ones only.
        sets_N: number of each score's set, from 0; the meaning of `group`. All 0 if the set is the
            whole batch.
        mean: set of the mean.
        std: set of the standard deviation.
    """
    batch_N = np.zeros_like(sets_N)
    over = {"batch": batch_N, "group": sets_N}
    shift_N = np.zeros(len(scores_N)) if mean == "none" else set_means(scores_N, over[mean])
    if std == "none" or not len(scores_N):
        return Normalization(shift_N, np.ones(len(scores_N)), np.zeros(len(scores_N), np.bool_))
    std_N = set_stds(scores_N, over[std])
    degenerate_N = std_N <= MIN_SPREAD
    same_set = mean != "none" and np.array_equal(over[mean], over[std])
    scale_N = np.where(
        degenerate_N, 1.0 if same_set else 0.0, 1.0 / np.where(degenerate_N, 1.0, std_N)
    )
    return Normalization(shift_N, scale_N, degenerate_N)


def set_means(scores_N: Floats, sets_N: Integers) -> Floats:
    """Return the mean of each score's own set, [N]."""
    return (np.bincount(sets_N, scores_N) / np.maximum(np.bincount(sets_N), 1))[sets_N]


def set_stds(scores_N: Floats, sets_N: Integers) -> Floats:
    """Return the unbiased standard deviation of each score's own set, [N]; 0 for a set of one.

    It is computed in two phases: the mean first, then the squares about it.
    """
    squares = np.bincount(sets_N, (scores_N - set_means(scores_N, sets_N)) ** 2)
    return np.sqrt(squares / np.maximum(np.bincount(sets_N) - 1, 1))[sets_N]


def set_sizes(sets_N: Integers) -> Integers:
    """Return the size of each score's own set, [N]."""
    return np.bincount(sets_N)[sets_N]


def zero_variance_share(scores_N: Floats, sets_N: Integers) -> float:
    """Return the share of sets with equal scores only; 0 without sets.

    With a baseline per set, such a set contributes no gradient.
    """
    if not len(scores_N):
        return 0.0
    lowest, highest = np.full(sets_N.max() + 1, np.inf), np.full(sets_N.max() + 1, -np.inf)
    np.minimum.at(lowest, sets_N, scores_N)
    np.maximum.at(highest, sets_N, scores_N)
    return float(np.mean((lowest == highest)[np.isfinite(lowest)]))
