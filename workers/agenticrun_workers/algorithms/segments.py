"""Ragged arrays: concatenated segments, with offsets `cu` of where each one begins.

Segment n of a flat array is `[cu[n], cu[n + 1])`; `cu` has one entry more than there are segments.
Segments may be empty. No function here loops over segments or values in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


def offsets(lengths_N: Sequence[int]) -> Integers:
    """Return `cu` of segments of these lengths, [N + 1]."""
    return np.concatenate([[0], np.cumsum(lengths_N, dtype=np.int64)]).astype(np.int64)


def joined(segments: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """Return the flat array of any number of segments, [L]."""
    return np.concatenate([np.zeros(0, dtype), *segments]).astype(dtype, copy=False)


def owners(cu_N1: Integers) -> Integers:
    """Return the segment of each value, int64 [cu[-1]]."""
    return np.repeat(np.arange(len(cu_N1) - 1), np.diff(cu_N1))


def segment_sums(values_L: NDArray[Any], cu_N1: Integers) -> Floats:
    """Return the sum of each segment, 0 for an empty one, float64 [N]."""
    return np.bincount(owners(cu_N1), values_L, minlength=len(cu_N1) - 1).astype(np.float64)


def column_sums(sums_NM: Floats) -> Floats:
    """Return sums over segments, [M]."""
    return np.asarray(sums_NM.sum(axis=0), np.float64)


def take_segments(cu_N1: Integers, chosen: Integers) -> tuple[Integers, Integers]:
    """Return the offsets of the chosen segments alone, and their positions in the flat array."""
    lengths = np.diff(cu_N1)[chosen]
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    positions = np.arange(cu[-1]) + np.repeat(cu_N1[:-1][chosen] - cu[:-1], lengths)
    return cu, positions


def discounted_suffix(values_L: NDArray[Any], decay_L: NDArray[Any], longest: int) -> Floats:
    """Return x_t = values_t + decay_t * x_{t+1}, float64 [L].

    It takes log2(longest) passes over the array. After a pass of stride s, x_t holds the terms of
    [t, t + 2s) and decay_t the product that reaches t + 2s (Hillis and Steele 1986, "Data parallel
    algorithms").

    Args:
        values_L: the terms.
        decay_L: 0 at the last value of every segment, so that segments stay apart.
        longest: length of the longest segment.
    """
    x_L = np.array(values_L, np.float64)
    reach_L = np.array(decay_L, np.float64)
    stride = 1
    while stride < longest:
        x_L[:-stride] += reach_L[:-stride] * x_L[stride:]
        reach_L[:-stride] *= reach_L[stride:].copy()
        stride *= 2
    return x_L


def last_of_each(cu_N1: Integers) -> Booleans:
    """Mark the last value of every segment, bool [cu[-1]]."""
    last_L = np.zeros(int(cu_N1[-1]), np.bool_)
    last_L[cu_N1[1:][np.diff(cu_N1) > 0] - 1] = True
    return last_L


def codes(keys: NDArray[Any]) -> Integers:
    """Number the keys from 0; equal keys get equal numbers, int64 [L]."""
    return np.unique(keys, return_inverse=True)[1].astype(np.int64)
