"""Correction of the mismatch between log-probs of the trainer and of the inference engine.

Both are of the same weights and tokens. With q = log pi_old - log pi_engine of a response token,
each token has four ratios, and four differences of probabilities:

    token      exp(q)                                  p_old - p_engine
    segment    exp(mean of q over its turn)            mean over its turn
    geometric  exp(mean of q over its sequence)        mean over its sequence
    sequence   exp(SUM of q over its sequence)         sum over its sequence

The weight is min(ratio, upper bound) at one level (truncated importance sampling; Yao et al. 2025,
"Your efficient RL framework secretly brings you off-policy RL training"). Filters remove tokens
with a ratio or difference out of bounds from the mask, and with it from loss, denominators and
whitening. Means run over all response tokens, including tokens that another filter removes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.algorithms.compiled import compiled, compiled_in_lanes, run
from agenticrun_workers.algorithms.kernels import NOTHING
from agenticrun_workers.algorithms.segments import Booleans, Floats, Integers

Level = Literal["token", "segment", "geometric", "sequence"]
LEVELS = ("token", "segment", "geometric", "sequence")
TOKEN, SEGMENT, GEOMETRIC, SEQUENCE = range(len(LEVELS))

# Columns of the tallies that the correction keeps per trajectory, over its response tokens.
TOKENS = 0
GAP = 1
"""Sum of |log ratio|."""
CLIPPED = 2
"""Tokens whose weight was limited."""
KEPT = 3
"""Tokens that no filter removed."""
RATIO = 4
"""Sum of the ratio; the first of one column per level."""
DIFF = 8
"""Sum of the difference of probabilities; the first of one column per level."""
RATIO_KEPT = 12
"""Tokens with a ratio within its bounds; the first of one column per level."""
DIFF_KEPT = 16
COLUMNS = 20

LOG_LIMIT = 20.0
"""Log ratios are clipped to [-20, 20] before exp (exp(20) is 5e8).

Without the limit the sum over a long sequence would overflow.
"""

BLOCK = 256
"""Tokens per block of exponentials; a block fits the first-level cache."""
LOG2_E = 1.4426950408889634
RATIO_FLOOR, RATIO_CEILING = exp(-LOG_LIMIT), exp(LOG_LIMIT)
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Multiplication of each token's loss by its ratio, at most `upper_bound`; None: no bound."""

    level: Level = "token"
    upper_bound: float | None = 1.2


@dataclass(frozen=True, slots=True)
class FilterSpec:
    """Bounds outside which a token is removed from the loss; None: no bound."""

    level: Level = "token"
    ratio_low: float | None = None
    ratio_high: float | None = None
    diff_low: float | None = None
    diff_high: float | None = None


@dataclass(frozen=True, slots=True)
class CorrectionSpec:
    weight: WeightSpec | None = None
    filters: tuple[FilterSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Correction:
    """Result of the correction for the tokens of a rank."""

    mask_L: Booleans
    """Response tokens of trained trajectories that no filter removed."""
    weights_L: NDArray[np.float32] | None
    """Weight of each token, 0 outside responses; None if the correction has no weight."""
    tally_NM: Floats
    """Sums per trajectory; `correction_metrics` reads them."""

    @property
    def finite(self) -> bool:
        """True if all log-probs were finite."""
        return bool(np.isfinite(self.tally_NM[:, GAP]).all())


def correct(
    spec: CorrectionSpec,
    cu_trajectories_N1: Integers,
    cu_seqlens_S1: Integers,
    turns_L: NDArray[np.int32],
    trains_N: Booleans,
    old_logprobs_L: NDArray[Any],
    engine_logprobs_L: NDArray[Any],
) -> Correction:
    """Return mask and weights of packed tokens; for the arrays see `Tokens`."""
    mask_L = np.empty(len(turns_L), np.bool_)
    weights_L = np.empty(len(turns_L), np.float32) if spec.weight else None
    tally_NM = np.zeros((len(trains_N), COLUMNS))
    tokens = PackedTokens(
        turns_L,
        old_logprobs_L,
        engine_logprobs_L,
        mask_L,
        NOTHING.copy() if weights_L is None else weights_L,
        _bounds(spec),
    )
    run(correct_tokens, cu_trajectories_N1, cu_seqlens_S1, trains_N, tokens, tally_NM)
    return Correction(mask_L, weights_L, tally_NM)


def correction_metrics(spec: CorrectionSpec, tally_M: Floats) -> dict[str, float]:
    """Return metrics under ROLL's names: means over response tokens.

    Args:
        spec: of the correction.
        tally_M: tallies summed over trajectories and ranks.
    """
    tokens = max(tally_M[TOKENS], 1.0)
    metrics = {
        "actor/train_infer_logprob_gap": tally_M[GAP] / tokens,
        "actor/train_infer_final_mask_mean": tally_M[KEPT] / tokens,
    }
    if spec.weight:
        metrics["actor/is_weight_clipfrac"] = tally_M[CLIPPED] / tokens
    filtered = {f.level for f in spec.filters}
    for number, level in enumerate(LEVELS):
        metrics[f"actor/train_infer_ratio_{level}_mean"] = tally_M[RATIO + number] / tokens
        metrics[f"actor/train_infer_diff_{level}_mean"] = tally_M[DIFF + number] / tokens
        if level in filtered:
            metrics[f"actor/train_infer_{level}_ratio_mask_mean"] = (
                tally_M[RATIO_KEPT + number] / tokens
            )
            metrics[f"actor/train_infer_{level}_diff_mask_mean"] = (
                tally_M[DIFF_KEPT + number] / tokens
            )
    return {name: float(value) for name, value in metrics.items()}


def _bounds(spec: CorrectionSpec) -> Bounds:
    """Return the filters as one row of bounds per level.

    A token must pass all filters of a level.
    """
    low, high = (np.full((2, len(LEVELS)), end) for end in (-np.inf, np.inf))
    for chosen in spec.filters:
        row = LEVELS.index(chosen.level)
        for kind, (least, most) in enumerate(
            ((chosen.ratio_low, chosen.ratio_high), (chosen.diff_low, chosen.diff_high))
        ):
            low[kind, row] = max(low[kind, row], -np.inf if least is None else least)
            high[kind, row] = min(high[kind, row], np.inf if most is None else most)
    upper = (
        np.inf
        if spec.weight is None or spec.weight.upper_bound is None
        else spec.weight.upper_bound
    )
    return Bounds(
        low[0],
        high[0],
        low[1],
        high[1],
        LEVELS.index(spec.weight.level) if spec.weight else -1,
        upper,
    )


class Bounds(NamedTuple):
    """Bounds of the train-inference correction; rows are LEVELS."""

    ratio_low: Floats
    ratio_high: Floats
    diff_low: Floats
    diff_high: Floats
    weight_level: int
    """Index into LEVELS; -1 for no weights."""
    weight_high: float


@compiled
def fast_exp(x: float) -> float:
    """Return exp(x), accurate to 1e-14: 2^n times the series of the rest.

    It calls no function, so loops over it are vectorised.
    """
    # Outside of these bounds the result would overflow or become subnormal.
    x = min(max(x, -708.0), 709.0)
    n = np.floor(x * LOG2_E + 0.5)
    # ln 2 in two parts, so that the subtraction loses no digits.
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    high = 1 / 5040 + r * (1 / 40320 + r * (1 / 362880 + r * (1 / 3628800 + r * (1 / 39916800))))
    series = 1.0 + r * (
        1.0 + r * (1 / 2 + r * (1 / 6 + r * (1 / 24 + r * (1 / 120 + r * (1 / 720 + r * high)))))
    )
    # 2^n by its exponent bits: a multiplication instead of a call, which would end vectorisation.
    return series * np.int64((np.int64(n) + 1023) << 52).view(np.float64)  # type: ignore[no-any-return]


@compiled
def bounded_exp(log_ratio: float) -> float:
    return fast_exp(min(max(log_ratio, -LOG_LIMIT), LOG_LIMIT))


class PackedTokens(NamedTuple):
    """The packed tokens and the bounds, which every level reads, and its results."""

    turns_L: NDArray[np.int32]
    old_L: NDArray[Any]
    engine_L: NDArray[Any]
    mask_L: Booleans
    weights_L: Any
    bounds: Bounds


@compiled_in_lanes
def token_level(
    start: int, stop: int, trains: bool, tokens: PackedTokens, blocks: Floats, tally: Floats
) -> tuple[float, float]:
    """Apply the token level to the response tokens in [start, stop), at most BLOCK.

    Returns:
        sums of their log ratios and of their differences of probabilities.
    """
    old_L, engine_L, bounds = tokens.old_L, tokens.engine_L, tokens.bounds
    mask_L, weights_L = tokens.mask_L, tokens.weights_L
    # Exponentials first, into blocks: this loop has no branch and is vectorised.
    for i in range(stop - start):
        old, engine = np.float64(old_L[start + i]), np.float64(engine_L[start + i])
        blocks[0, i] = old - engine
        blocks[1, i] = min(max(fast_exp(old - engine), RATIO_FLOOR), RATIO_CEILING)
        blocks[2, i] = fast_exp(old) - fast_exp(engine)
    ratio_low, ratio_high = bounds.ratio_low[TOKEN], bounds.ratio_high[TOKEN]
    diff_low, diff_high = bounds.diff_low[TOKEN], bounds.diff_high[TOKEN]
    log_sum, gap, ratio_sum, diff_sum, ratios_kept, diffs_kept = 0.0, 0.0, 0.0, 0.0, 0, 0
    for i in range(stop - start):
        log_ratio, ratio, diff = blocks[0, i], blocks[1, i], blocks[2, i]
        # `&`, not `and`, because a branch would end vectorisation.
        ratio_kept = (ratio >= ratio_low) & (ratio <= ratio_high)
        diff_kept = (diff >= diff_low) & (diff <= diff_high)
        mask_L[start + i] = trains & ratio_kept & diff_kept
        ratios_kept += ratio_kept
        diffs_kept += diff_kept
        log_sum += log_ratio
        gap += abs(log_ratio)
        ratio_sum += ratio
        diff_sum += diff
    tally[GAP] += gap
    tally[RATIO] += ratio_sum
    tally[DIFF] += diff_sum
    tally[RATIO_KEPT] += ratios_kept
    tally[DIFF_KEPT] += diffs_kept
    if bounds.weight_level == TOKEN:
        upper, clipped = bounds.weight_high, 0
        for i in range(stop - start):
            clipped += blocks[1, i] > upper
            weights_L[start + i] = min(blocks[1, i], upper)
        tally[CLIPPED] += clipped
    return log_sum, diff_sum


@compiled
def settle(
    level: int,
    start: int,
    stop: int,
    count: int,
    log_ratio: float,
    diff: float,
    tokens: PackedTokens,
    tally: Floats,
) -> None:
    """Apply one level to the `count` response tokens in [start, stop), which share both values."""
    bounds, ratio = tokens.bounds, bounded_exp(log_ratio)
    ratio_kept = bounds.ratio_low[level] <= ratio <= bounds.ratio_high[level]
    diff_kept = bounds.diff_low[level] <= diff <= bounds.diff_high[level]
    tally[RATIO + level] += count * ratio
    tally[DIFF + level] += count * diff
    tally[RATIO_KEPT + level] += count * ratio_kept
    tally[DIFF_KEPT + level] += count * diff_kept
    if not (ratio_kept and diff_kept):
        for t in range(start, stop):
            tokens.mask_L[t] = False
    if bounds.weight_level == level:
        weight = min(ratio, bounds.weight_high)
        tally[CLIPPED] += count * (weight != ratio)
        for t in range(start, stop):
            tokens.weights_L[t] = weight if tokens.turns_L[t] >= 0 else 0.0


@compiled
def correct_turn(
    start: int, end: int, trains: bool, tokens: PackedTokens, blocks: Floats, tally: Floats
) -> tuple[int, int, float, float]:
    """Apply the token level and the segment level to the first turn in [start, end).

    Returns:
        where the next turn begins, or `end`; the number of the turn's response tokens; the sums of
        their log ratios and of their differences of probabilities.
    """
    turns_L = tokens.turns_L
    turn, count, log_sum, diff_sum = -1, 0, 0.0, 0.0
    t = start
    # A turn ends where the next one begins: the observations in between are handled with the first.
    while t < end and (turn < 0 or turns_L[t] < 0 or turns_L[t] == turn):
        if turns_L[t] < 0:
            tokens.mask_L[t] = False
            if tokens.bounds.weight_level >= 0:
                tokens.weights_L[t] = 0.0
            t += 1
            continue
        turn, stop = turns_L[t], t + 1
        # In blocks that fit the first-level cache.
        while stop < end and stop - t < BLOCK and turns_L[stop] == turn:
            stop += 1
        logs, diffs = token_level(t, stop, trains, tokens, blocks, tally)
        count, log_sum, diff_sum = count + stop - t, log_sum + logs, diff_sum + diffs
        t = stop
    if count:
        settle(SEGMENT, start, t, count, log_sum / count, diff_sum / count, tokens, tally)
    return t, count, log_sum, diff_sum


@compiled
def correct_sequence(
    start: int, end: int, trains: bool, tokens: PackedTokens, blocks: Floats, tally: Floats
) -> None:
    """Apply all levels to the sequence in [start, end)."""
    count, log_sum, diff_sum = 0, 0.0, 0.0
    t = start
    while t < end:
        t, responses, logs, diffs = correct_turn(t, end, trains, tokens, blocks, tally)
        count, log_sum, diff_sum = count + responses, log_sum + logs, diff_sum + diffs
    if count:
        # After the turns: these levels need the sums of the whole sequence.
        settle(GEOMETRIC, start, end, count, log_sum / count, diff_sum / count, tokens, tally)
        settle(SEQUENCE, start, end, count, log_sum, diff_sum, tokens, tally)
    tally[TOKENS] += count
    tally[KEPT] += tokens.mask_L[start:end].sum()


@compiled
def correct_tokens(
    first: int,
    last: int,
    cu_N1: Integers,
    cu_seqlens_S1: Integers,
    trains_N: Booleans,
    tokens: PackedTokens,
    tally_NM: Floats,
) -> None:
    """Fill the mask, the weights (0 outside responses) and the tallies."""
    blocks = np.empty((3, BLOCK))
    for n in range(first, last):
        end = cu_N1[n]
        # Threads begin in the middle of the batch.
        sequence = np.searchsorted(cu_seqlens_S1, end, "right")
        while end < cu_N1[n + 1]:
            start, end = end, cu_seqlens_S1[sequence]
            sequence += 1
            correct_sequence(start, end, trains_N[n], tokens, blocks, tally_NM[n])
