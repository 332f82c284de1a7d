"""The token passes, compiled by numba: one trajectory after the other, each read once.

Every function works on the trajectories [first, last) and writes only there, so that ranges can run
in threads. All functions ignore positions that are not response tokens (turn -1); their outputs are
0 (False). The tests have the same functions in NumPy.
"""

from __future__ import annotations

from math import exp
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.algorithms.compiled import compiled
from agenticrun_workers.algorithms.kl import K3_LIMIT
from agenticrun_workers.algorithms.segments import Booleans, Floats, Integers

NOTHING = np.zeros(0, np.float32)
"""Stands for an array that is not given."""


class TokenRewards(NamedTuple):
    """Inputs of a response token's reward.

    (clip(reward of its turn if it is the turn's last - coef * KL) - shift) * scale
    """

    turns_L: NDArray[np.int32]
    per_turn_K: Floats
    old_logprobs_L: NDArray[Any]
    ref_logprobs_L: NDArray[Any]
    kl_code: int
    """One of `KL_CODES`; with 0 neither log-prob is read."""
    kl_coef: float
    bound: float
    """Bound of the clip; infinite for none."""
    shift: float = 0.0
    scale: float = 1.0


class Discounts(NamedTuple):
    """gamma and lambda between a token and the next response token."""

    gamma: float
    lambd: float
    turn_level: bool
    """Apply gamma and lambda only where a turn ends; both are 1 inside a turn."""


class Values(NamedTuple):
    """Values of the critic.

    V before each token, and V at the final observation of each trajectory (0 after a terminal
    token).
    """

    values_L: NDArray[Any]
    bootstrap_N: Floats


@compiled
def token_kl(old: float, ref: float, code: int) -> float:
    """Return the KL of one token; `KL_CODES` has the codes."""
    d = np.float64(old) - np.float64(ref)
    if code == 1:
        return d
    if code == 2:
        return 0.5 * d * d
    if code == 3:
        return min(exp(-d) + d - 1.0, K3_LIMIT)
    return abs(d)


@compiled
def response_mask(
    first: int,
    last: int,
    cu_N1: Integers,
    turns_L: NDArray[np.int32],
    trains_N: Booleans,
    mask_L: Booleans,
) -> None:
    """Mark the response tokens of trajectories that train."""
    for n in range(first, last):
        for t in range(cu_N1[n], cu_N1[n + 1]):
            mask_L[t] = trains_N[n] and turns_L[t] >= 0


@compiled
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
    """Write each turn's value on its masked tokens, 0 elsewhere.

    Totals over masked tokens: number, sum.
    """
    for n in range(first, last):
        count = 0
        total = 0.0
        for t in range(cu_N1[n], cu_N1[n + 1]):
            value = per_turn_K[turns_L[t]] if mask_L[t] else 0.0
            out_L[t] = value
            count += mask_L[t]
            total += value
        totals_N4[n, 0] = count
        totals_N4[n, 1] = total


@compiled
def reward_sums(
    first: int,
    last: int,
    cu_N1: Integers,
    mask_L: Booleans,
    rewards: TokenRewards,
    center: float,
    sums_N4: Floats,
) -> None:
    """Sum over the masked tokens of each trajectory.

    The four columns: number of tokens, sum of (r - center), sum of its square, number of tokens
    that the clip changed.
    """
    turns_L, per_turn_K, old_L, ref_L, kl_code, kl_coef, bound, _, _ = (
        rewards  # locals: a tuple's fields are counted references
    )
    for n in range(first, last):
        following = -1
        for t in range(cu_N1[n + 1] - 1, cu_N1[n] - 1, -1):
            turn = turns_L[t]
            if turn < 0:
                continue
            # Backwards: the first token that is seen of a turn is its last.
            reward = per_turn_K[turn] if turn != following else 0.0
            if kl_code != 0:
                # The KL counts at every token, the reward of the turn only at its last.
                reward -= kl_coef * token_kl(old_L[t], ref_L[t], kl_code)
            following = turn
            if mask_L[t]:
                clipped = min(max(reward, -bound), bound)
                sums_N4[n, 0] += 1.0
                sums_N4[n, 1] += clipped - center
                sums_N4[n, 2] += (clipped - center) ** 2
                sums_N4[n, 3] += clipped != reward


@compiled
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
    """Write generalised advantages of the response tokens of each trajectory, 0 where masked out.

    `token_advantages` has the formula. Without values (an empty array) V = 0. `returns_L` is filled
    if there are values. Totals: number of masked tokens, sums of their advantages and values, and a
    0 that is NaN if any advantage was not finite.
    """
    turns_L, per_turn_K, old_L, ref_L, kl_code, kl_coef, bound, shift, scale = rewards
    values_L, bootstrap_N = critic
    outer_gamma, outer_lambd, turn_level = discounts
    has_values = len(values_L) > 0
    for n in range(first, last):
        following = -1
        next_value = bootstrap_N[n]
        next_advantage = 0.0
        count = 0
        advantages_total = 0.0
        values_total = 0.0
        probe = 0.0
        for t in range(cu_N1[n + 1] - 1, cu_N1[n] - 1, -1):
            turn = turns_L[t]
            # Observations are not the policy's choice: the recurrence passes over them.
            if turn < 0:
                advantages_L[t] = 0.0
                if has_values:
                    returns_L[t] = 0.0
                continue
            closes = turn != following
            following = turn
            reward = per_turn_K[turn] if closes else 0.0
            if kl_code != 0:
                reward -= kl_coef * token_kl(old_L[t], ref_L[t], kl_code)
            reward = (min(max(reward, -bound), bound) - shift) * scale
            discounted = closes or not turn_level
            gamma = outer_gamma if discounted else 1.0
            lambd = outer_lambd if discounted else 1.0
            value = np.float64(values_L[t]) if has_values else 0.0
            next_advantage = reward + gamma * next_value - value + gamma * lambd * next_advantage
            next_value = value
            # A filtered token leaves the loss, not the recurrence: its reward must reach earlier
            # tokens.
            advantages_L[t] = next_advantage if mask_L[t] else 0.0
            if has_values:
                returns_L[t] = next_advantage + value
            # NaN or infinity times 0 is NaN, so one sum finds any of them without a branch.
            probe += next_advantage * 0.0
            if mask_L[t]:
                count += 1
                advantages_total += next_advantage
                values_total += value
        totals_N4[n, 0] = count
        totals_N4[n, 1] = advantages_total
        totals_N4[n, 2] = values_total
        totals_N4[n, 3] = probe


@compiled
def deviations(
    first: int,
    last: int,
    cu_N1: Integers,
    mask_L: Booleans,
    values_L: Any,
    center: float,
    sums_N2: Floats,
) -> None:
    """Sum (x - center) and its square over the masked tokens of each trajectory."""
    for n in range(first, last):
        total = 0.0
        squares = 0.0
        for t in range(cu_N1[n], cu_N1[n + 1]):
            deviation = np.float64(values_L[t]) - center if mask_L[t] else 0.0
            total += deviation
            squares += deviation * deviation
        sums_N2[n, 0] = total
        sums_N2[n, 1] = squares


@compiled
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
    """Set x to clip((x - shift) * scale) on masked tokens, in place.

    `clipped_N` gets the number of tokens that the clip changed.
    """
    for n in range(first, last):
        clipped = 0
        for t in range(cu_N1[n], cu_N1[n + 1]):
            if mask_L[t]:
                value = (np.float64(values_L[t]) - shift) * scale
                if abs(value) > bound:
                    clipped += 1
                values_L[t] = min(max(value, -bound), bound)
        clipped_N[n] = clipped


@compiled
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
    """Sum the KL over the tokens of each turn and of each trajectory, and count the latter."""
    for n in range(first, last):
        for t in range(cu_N1[n], cu_N1[n + 1]):
            if turns_L[t] >= 0:
                kl = token_kl(old_L[t], ref_L[t], code)
                kl_K[turns_L[t]] += kl
                kl_N2[n, 0] += kl
                kl_N2[n, 1] += 1.0


@compiled
def all_finite(
    first: int,
    last: int,
    cu_N1: Integers,
    turns_L: NDArray[np.int32],
    values_L: Any,
    finite_N: Booleans,
) -> None:
    """Mark the trajectories with finite values at all response tokens."""
    for n in range(first, last):
        probe = 0.0
        for t in range(cu_N1[n], cu_N1[n + 1]):
            if turns_L[t] >= 0:
                probe += np.float64(values_L[t]) * 0.0
        finite_N[n] = probe == 0.0
