"""The train-inference correction, compiled: one pass over the tokens, all four levels. `plain` has the same in NumPy."""

from __future__ import annotations

from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.algorithms.compiled import compiled
from agenticrun_workers.algorithms.layout import CLIPPED, DIFF, DIFF_KEPT, GAP, KEPT, LOG_LIMIT, RATIO, RATIO_KEPT, TOKENS, Bounds
from agenticrun_workers.algorithms.segments import Booleans, Floats, Integers


@compiled
def bounded_exp(log_ratio: float) -> float:
    return exp(min(max(log_ratio, -LOG_LIMIT), LOG_LIMIT))


@compiled
def settle(
    start: int, stop: int, turns_L: NDArray[np.int32], level: int, ratio: float, diff: float, tokens: float, bounds: Bounds,
    mask_L: Booleans, weights_L: Any, tally: Floats,
) -> None:  # fmt: skip
    """One level's verdict on the `tokens` response tokens in [start, stop), which share this ratio and difference."""
    ratio_kept = bounds.ratio_low[level] <= ratio <= bounds.ratio_high[level]
    diff_kept = bounds.diff_low[level] <= diff <= bounds.diff_high[level]
    tally[RATIO + level] += tokens * ratio
    tally[DIFF + level] += tokens * diff
    tally[RATIO_KEPT + level] += tokens * ratio_kept
    tally[DIFF_KEPT + level] += tokens * diff_kept
    if not (ratio_kept and diff_kept):
        for t in range(start, stop):
            mask_L[t] = False
    if bounds.weight_level == level:
        weight = min(ratio, bounds.weight_high)
        tally[CLIPPED] += tokens * (weight != ratio)
        for t in range(start, stop):
            weights_L[t] = weight if turns_L[t] >= 0 else 0.0


@compiled
def correct(
    first: int, last: int, cu_N1: Integers, cu_seqlens_S1: Integers, turns_L: NDArray[np.int32],
    trains_N: Booleans, old_L: NDArray[Any], engine_L: NDArray[Any], bounds: Bounds, mask_L: Booleans, weights_L: Any, tally_NM: Floats,
) -> None:  # fmt: skip
    """Fills the mask that the filters leave, the weights (0 outside responses) and the tallies."""
    for n in range(first, last):
        tally = tally_NM[n]
        end = cu_N1[n]
        sequence = np.searchsorted(cu_seqlens_S1, end, "right")
        while end < cu_N1[n + 1]:
            begin, end = end, cu_seqlens_S1[sequence]
            sequence += 1
            length, log_sum, diff_sum = 0, 0.0, 0.0
            turn, turn_begin, turn_length, turn_log, turn_diff = -1, begin, 0, 0.0, 0.0
            for t in range(begin, end):
                if turns_L[t] < 0:
                    mask_L[t] = False
                    if bounds.weight_level >= 0:
                        weights_L[t] = 0.0
                    continue
                if turns_L[t] != turn:
                    if turn_length > 0:
                        mean = turn_log / turn_length
                        settle(turn_begin, t, turns_L, 1, bounded_exp(mean), turn_diff / turn_length, turn_length, bounds, mask_L,
                               weights_L, tally)  # fmt: skip
                        length, log_sum, diff_sum = length + turn_length, log_sum + turn_log, diff_sum + turn_diff
                    turn, turn_begin, turn_length, turn_log, turn_diff = turns_L[t], t, 0, 0.0, 0.0
                log_ratio = np.float64(old_L[t]) - np.float64(engine_L[t])
                ratio = bounded_exp(log_ratio)
                if abs(log_ratio) <= LOG_LIMIT:
                    diff = exp(np.float64(engine_L[t])) * (ratio - 1.0)
                else:
                    diff = exp(np.float64(old_L[t])) - exp(np.float64(engine_L[t]))
                turn_length, turn_log, turn_diff = turn_length + 1, turn_log + log_ratio, turn_diff + diff
                ratio_kept = bounds.ratio_low[0] <= ratio <= bounds.ratio_high[0]
                diff_kept = bounds.diff_low[0] <= diff <= bounds.diff_high[0]
                mask_L[t] = trains_N[n] and ratio_kept and diff_kept
                tally[GAP] += abs(log_ratio)
                tally[RATIO] += ratio
                tally[DIFF] += diff
                tally[RATIO_KEPT] += ratio_kept
                tally[DIFF_KEPT] += diff_kept
                if bounds.weight_level == 0:
                    weight = min(ratio, bounds.weight_high)
                    tally[CLIPPED] += weight != ratio
                    weights_L[t] = weight
            if turn_length > 0:
                mean = turn_log / turn_length
                settle(turn_begin, end, turns_L, 1, bounded_exp(mean), turn_diff / turn_length, turn_length, bounds, mask_L, weights_L,
                       tally)  # fmt: skip
                length, log_sum, diff_sum = length + turn_length, log_sum + turn_log, diff_sum + turn_diff
            if length > 0:
                settle(begin, end, turns_L, 2, bounded_exp(log_sum / length), diff_sum / length, length, bounds, mask_L, weights_L, tally)
                settle(begin, end, turns_L, 3, bounded_exp(log_sum), diff_sum, length, bounds, mask_L, weights_L, tally)
            tally[TOKENS] += length
            for t in range(begin, end):
                tally[KEPT] += mask_L[t]
