"""The product's compiled kernels written a second time, in NumPy: their independent definition.

The functions and their results are the same as in `algorithms.kernels` and those of
`algorithms.correction.correct_tokens`. There is no loop over tokens: recurrences are scans by
doubling (`discounted_suffix`), sums are by segment.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from agenticrun_workers.algorithms import correction, kernels
from agenticrun_workers.algorithms.correction import (
    CLIPPED,
    DIFF,
    DIFF_KEPT,
    GAP,
    KEPT,
    LOG_LIMIT,
    RATIO,
    RATIO_KEPT,
    TOKENS,
    PackedTokens,
)
from agenticrun_workers.algorithms.kernels import Discounts, TokenRewards, Values
from agenticrun_workers.algorithms.kl import K3_LIMIT
from agenticrun_workers.algorithms.segments import Booleans, Floats, Integers, discounted_suffix

Kernel = Callable[..., None]


class Responses(NamedTuple):
    """The M response tokens of trajectories [first, last)."""

    at_M: Integers
    """Their positions."""
    trajectory_M: Integers
    turns_M: Integers
    last_M: Booleans
    """True for the last response token of its trajectory."""
    closes_M: Booleans
    """True for the last response token of its turn."""


def responses(first: int, last: int, cu_N1: Integers, turns_L: NDArray[np.int32]) -> Responses:
    at_M = np.flatnonzero(turns_L[cu_N1[first] : cu_N1[last]] >= 0) + cu_N1[first]
    trajectory_M = np.searchsorted(cu_N1, at_M, "right") - 1
    turns_M = turns_L[at_M].astype(np.int64)
    last_M = np.append(trajectory_M[1:] != trajectory_M[:-1], True)[: len(at_M)]
    closes_M = last_M | np.append(turns_M[1:] != turns_M[:-1], True)[: len(at_M)]
    return Responses(at_M, trajectory_M, turns_M, last_M, closes_M)


def token_kl(old: NDArray[Any], ref: NDArray[Any], code: int) -> Floats:
    d = old.astype(np.float64) - ref.astype(np.float64)
    match code:
        case 1:
            return d
        case 2:
            return 0.5 * d * d
        case 3:
            with np.errstate(over="ignore"):
                return np.minimum(np.exp(-d) + d - 1.0, K3_LIMIT)
        case _:
            return np.abs(d)


def unclipped_rewards(rewards: TokenRewards, tokens: Responses) -> Floats:
    rewards_M = (
        np.where(tokens.closes_M, rewards.per_turn_K[tokens.turns_M], 0.0)
        if len(tokens.at_M)
        else np.zeros(0)
    )
    if rewards.kl_code:
        kl_M = token_kl(
            rewards.old_logprobs_L[tokens.at_M],
            rewards.ref_logprobs_L[tokens.at_M],
            rewards.kl_code,
        )
        rewards_M = rewards_M - rewards.kl_coef * kl_M
    return rewards_M


def response_mask(
    first: int,
    last: int,
    cu_N1: Integers,
    turns_L: NDArray[np.int32],
    trains_N: Booleans,
    mask_L: Booleans,
) -> None:
    lo, hi = cu_N1[first], cu_N1[last]
    mask_L[lo:hi] = (turns_L[lo:hi] >= 0) & np.repeat(
        trains_N[first:last], np.diff(cu_N1[first : last + 1])
    )


def spread(
    first: int,
    last: int,
    cu_N1: Integers,
    turns_L: NDArray[np.int32],
    mask_L: Booleans,
    per_turn_K: Floats,
    out_L: Any,
    totals_N4: Floats,
) -> None:
    tokens = responses(first, last, cu_N1, turns_L)
    keep_M = mask_L[tokens.at_M]
    values_M = keep_M * per_turn_K[tokens.turns_M]
    out_L[cu_N1[first] : cu_N1[last]] = 0.0
    out_L[tokens.at_M] = values_M
    _add_columns(totals_N4, tokens.trajectory_M, (keep_M, values_M))


def reward_sums(
    first: int,
    last: int,
    cu_N1: Integers,
    mask_L: Booleans,
    rewards: TokenRewards,
    center: float,
    sums_N4: Floats,
) -> None:
    tokens = responses(first, last, cu_N1, rewards.turns_L)
    rewards_M = unclipped_rewards(rewards, tokens)
    clipped_M = np.clip(rewards_M, -rewards.bound, rewards.bound)
    keep_M = mask_L[tokens.at_M]
    columns = (
        np.ones(len(rewards_M)),
        clipped_M - center,
        (clipped_M - center) ** 2,
        clipped_M != rewards_M,
    )
    _add_columns(sums_N4, tokens.trajectory_M[keep_M], [column[keep_M] for column in columns])


@np.errstate(invalid="ignore")  # what is not finite is reported by the totals
def discount(
    first: int,
    last: int,
    cu_N1: Integers,
    mask_L: Booleans,
    rewards: TokenRewards,
    critic: Values,
    discounts: Discounts,
    advantages_L: Any,
    returns_L: Any,
    totals_N4: Floats,
) -> None:
    tokens = responses(first, last, cu_N1, rewards.turns_L)
    rewards_M = np.clip(unclipped_rewards(rewards, tokens), -rewards.bound, rewards.bound)
    rewards_M = (rewards_M - rewards.shift) * rewards.scale
    has_values = len(critic.values_L) > 0
    values_M = (
        critic.values_L[tokens.at_M].astype(np.float64)
        if has_values
        else np.zeros(len(tokens.at_M))
    )
    next_value_M = np.where(
        tokens.last_M,
        critic.bootstrap_N[tokens.trajectory_M],
        np.append(values_M[1:], 0.0)[: len(values_M)],
    )
    discounted_M = tokens.closes_M | (not discounts.turn_level)
    gamma_M = np.where(discounted_M, discounts.gamma, 1.0)
    decay_M = np.where(tokens.last_M, 0.0, gamma_M * np.where(discounted_M, discounts.lambd, 1.0))
    longest = int(np.bincount(tokens.trajectory_M).max(initial=0))
    advantages_M = discounted_suffix(
        rewards_M + gamma_M * next_value_M - values_M, decay_M, longest
    )
    advantages_L[cu_N1[first] : cu_N1[last]] = 0.0
    advantages_L[tokens.at_M] = np.where(mask_L[tokens.at_M], advantages_M, 0.0)
    if has_values:
        returns_L[cu_N1[first] : cu_N1[last]] = 0.0
        returns_L[tokens.at_M] = advantages_M + values_M
    keep_M = mask_L[tokens.at_M]
    columns = (keep_M, keep_M * advantages_M, keep_M * values_M, advantages_M * 0.0)
    _add_columns(totals_N4, tokens.trajectory_M, columns)


def deviations(
    first: int,
    last: int,
    cu_N1: Integers,
    mask_L: Booleans,
    values_L: Any,
    center: float,
    sums_N2: Floats,
) -> None:
    at_M = np.flatnonzero(mask_L[cu_N1[first] : cu_N1[last]]) + cu_N1[first]
    deviation_M = values_L[at_M].astype(np.float64) - center
    _add_columns(sums_N2, np.searchsorted(cu_N1, at_M, "right") - 1, (deviation_M, deviation_M**2))


def rescale(
    first: int,
    last: int,
    cu_N1: Integers,
    mask_L: Booleans,
    values_L: Any,
    shift: float,
    scale: float,
    bound: float,
    clipped_N: Integers,
) -> None:
    at_M = np.flatnonzero(mask_L[cu_N1[first] : cu_N1[last]]) + cu_N1[first]
    values_M = (values_L[at_M].astype(np.float64) - shift) * scale
    values_L[at_M] = np.clip(values_M, -bound, bound)
    beyond_M = np.abs(values_M) > bound
    clipped_N[first:last] = np.bincount(
        np.searchsorted(cu_N1, at_M[beyond_M], "right") - 1, minlength=len(clipped_N)
    )[first:last]


def turn_kl(
    first: int,
    last: int,
    cu_N1: Integers,
    turns_L: NDArray[np.int32],
    old_L: Any,
    ref_L: Any,
    code: int,
    kl_K: Floats,
    kl_N2: Floats,
) -> None:
    tokens = responses(first, last, cu_N1, turns_L)
    kl_M = token_kl(old_L[tokens.at_M], ref_L[tokens.at_M], code)
    kl_K += np.bincount(tokens.turns_M, kl_M, minlength=len(kl_K))
    _add_columns(kl_N2, tokens.trajectory_M, (kl_M, np.ones(len(kl_M))))


def all_finite(
    first: int,
    last: int,
    cu_N1: Integers,
    turns_L: NDArray[np.int32],
    values_L: Any,
    finite_N: Booleans,
) -> None:
    tokens = responses(first, last, cu_N1, turns_L)
    finite_N[first:last] = True
    finite_N[tokens.trajectory_M[~np.isfinite(values_L[tokens.at_M])]] = False


def correct_tokens(
    first: int,
    last: int,
    cu_N1: Integers,
    cu_seqlens_S1: Integers,
    trains_N: Booleans,
    packed: PackedTokens,
    tally_NM: Floats,
) -> None:
    bounds = packed.bounds
    lo, hi = cu_N1[first], cu_N1[last]
    tokens = responses(first, last, cu_N1, packed.turns_L)
    old_M, engine_M = (
        packed.old_L[tokens.at_M].astype(np.float64),
        packed.engine_L[tokens.at_M].astype(np.float64),
    )
    log_M, diff_M = old_M - engine_M, np.exp(old_M) - np.exp(engine_M)
    sequence_M = np.searchsorted(cu_seqlens_S1, tokens.at_M, "right") - 1
    segment_M = np.cumsum(
        np.append(False, (np.diff(sequence_M) != 0) | (np.diff(tokens.turns_M) != 0))[: len(log_M)]
    )
    levels = (
        (log_M, diff_M),
        (_mean_by(segment_M, log_M), _mean_by(segment_M, diff_M)),
        (_mean_by(sequence_M, log_M), _mean_by(sequence_M, diff_M)),
        (_sum_by(sequence_M, log_M), _sum_by(sequence_M, diff_M)),
    )
    kept_M = trains_N[tokens.trajectory_M]
    columns: dict[int, NDArray[Any]] = {
        TOKENS: np.ones(len(log_M)),
        GAP: np.abs(log_M),
        CLIPPED: np.zeros(len(log_M)),
    }
    for level, (level_log_M, level_diff_M) in enumerate(levels):
        ratio_M = np.exp(np.clip(level_log_M, -LOG_LIMIT, LOG_LIMIT))
        ratio_kept_M = (bounds.ratio_low[level] <= ratio_M) & (ratio_M <= bounds.ratio_high[level])
        diff_kept_M = (bounds.diff_low[level] <= level_diff_M) & (
            level_diff_M <= bounds.diff_high[level]
        )
        columns |= {
            RATIO + level: ratio_M,
            DIFF + level: level_diff_M,
            RATIO_KEPT + level: ratio_kept_M,
            DIFF_KEPT + level: diff_kept_M,
        }
        kept_M = kept_M & ratio_kept_M & diff_kept_M
        if bounds.weight_level == level:
            weight_M = np.minimum(ratio_M, bounds.weight_high)
            columns[CLIPPED] = weight_M != ratio_M
            packed.weights_L[lo:hi] = 0.0
            packed.weights_L[tokens.at_M] = weight_M
    packed.mask_L[lo:hi] = False
    packed.mask_L[tokens.at_M] = kept_M
    columns[KEPT] = kept_M
    _add_columns(tally_NM, tokens.trajectory_M, [columns[i] for i in range(len(columns))])


def _sum_by(segment_M: Integers, values_M: Floats) -> Floats:
    return (
        np.bincount(segment_M, values_M).astype(np.float64)[segment_M]
        if len(values_M)
        else values_M
    )


def _mean_by(segment_M: Integers, values_M: Floats) -> Floats:
    return _sum_by(segment_M, values_M) / _sum_by(segment_M, np.ones(len(values_M)))


def _add_columns(sums_NM: Floats, trajectory_M: Integers, columns: Sequence[NDArray[Any]]) -> None:
    for number, column in enumerate(columns):
        sums_NM[:, number] += np.bincount(trajectory_M, column, minlength=len(sums_NM))


KERNELS = (
    response_mask,
    spread,
    reward_sums,
    discount,
    deviations,
    rescale,
    turn_kl,
    all_finite,
    correct_tokens,
)


def use_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the product call the functions of this file, all trajectories in one call."""
    for kernel in KERNELS:
        _replace(monkeypatch, kernel.__name__, kernel)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def compare_with_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each call of a kernel by the product compare it with the function of this file."""

    def compared(kernel: Kernel, product: Kernel) -> Kernel:
        def call(*arguments: Any) -> None:
            copies = pickle.loads(pickle.dumps(arguments))
            kernel(*copies)
            product(*arguments)
            for number, (found, expected) in enumerate(zip(arguments, copies, strict=True)):
                for ours, theirs in zip(_arrays(found), _arrays(expected), strict=True):
                    assert _close(ours, theirs), (kernel.__name__, number, ours, theirs)

        return call

    for kernel in KERNELS:
        _replace(monkeypatch, kernel.__name__, compared(kernel, _product(kernel.__name__)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _arrays(argument: Any) -> list[Any]:
    """Return an argument's arrays: itself, or those of its fields."""
    fields = argument if isinstance(argument, tuple) else (argument,)
    return [field for field in fields if isinstance(field, np.ndarray)]


def _close(found: NDArray[Any], expected: NDArray[Any]) -> bool:
    """Return True if finite numbers are equal but for rounding.

    It takes a tenth of the time of `np.testing.assert_allclose`, and is called for each array.
    """
    if found.dtype.kind != "f":
        return bool((found == expected).all())
    with np.errstate(invalid="ignore"):
        near = np.abs(found - expected) <= 1e-9 + 1e-6 * np.abs(expected)
    return bool((near | ~np.isfinite(expected)).all())


def _home(name: str) -> ModuleType:
    return correction if name == correct_tokens.__name__ else kernels


def _product(name: str) -> Kernel:
    found: Kernel = getattr(_home(name), name)
    return found


def _replace(monkeypatch: pytest.MonkeyPatch, name: str, kernel: Kernel) -> None:
    monkeypatch.setattr(_home(name), name, kernel)
