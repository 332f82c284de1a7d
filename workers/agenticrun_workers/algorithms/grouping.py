"""Centre and scale trajectory scores by the batch or by groups."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Over = Literal["batch", "group", "none"]

MIN_STD = 1e-6
"""Below this a set counts as having no spread."""


@dataclass(frozen=True, slots=True)
class Normalized:
    """Normalised scores and what could not be normalised."""

    values_N: Array
    degenerate_N: NDArray[np.bool_]
    """Members whose set has fewer than two members or no spread."""


def group_index(groups_N: Sequence[Hashable]) -> NDArray[np.int64]:
    """Groups numbered from 0 in order of appearance, int64 [N]."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in groups_N], np.int64)


def group_means(scores_N: Array, index_N: NDArray[np.int64]) -> Array:
    """The mean of each member's own group, float64 [N]."""
    return (np.bincount(index_N, scores_N) / np.bincount(index_N))[index_N]


def group_stds(scores_N: Array, index_N: NDArray[np.int64]) -> Array:
    """The unbiased standard deviation of each member's own group, 0 for a group of one, float64 [N]."""
    squares = np.bincount(index_N, (scores_N - group_means(scores_N, index_N)) ** 2)
    return np.sqrt(squares / np.maximum(np.bincount(index_N) - 1, 1))[index_N]


def normalize(scores_N: Array, groups_N: Sequence[Hashable], mean: Over, std: Over) -> Normalized:
    """(score - mean) / std, each taken over the batch, over the member's group, or not at all.

    A set with fewer than two members or no spread is not divided by: its members keep the centred score (which is 0 up to
    rounding) where the mean is taken over the same set, and become 0 where it is not.
    """
    scores_N = np.asarray(scores_N, np.float64)
    index_by = {"batch": np.zeros(len(scores_N), np.int64), "group": group_index(groups_N)}
    centred_N = scores_N - group_means(scores_N, index_by[mean]) if mean != "none" else scores_N
    if std == "none" or not len(scores_N):
        return Normalized(centred_N, np.zeros(len(scores_N), np.bool_))
    stds_N = group_stds(scores_N, index_by[std])
    degenerate_N = stds_N <= MIN_STD
    fallback_N = centred_N if mean == std else np.zeros_like(centred_N)
    values_N = np.where(degenerate_N, fallback_N, centred_N / np.where(degenerate_N, 1.0, stds_N))
    return Normalized(values_N, degenerate_N)
