"""The token passes, compiled by numba: one trajectory after the other, each read once. `plain` has the same functions in NumPy.

Every function works on the trajectories [first, last) of its range and writes only there, so that ranges can run in threads.
Positions that are not response tokens (turn -1) do not exist for any of them; their outputs are 0 (False).
"""

from __future__ import annotations

from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.algorithms.compiled import compiled
from agenticrun_workers.algorithms.correction_kernel import correct
from agenticrun_workers.algorithms.kl import K3_LIMIT
from agenticrun_workers.algorithms.layout import Discounts, TokenRewards, Values
from agenticrun_workers.algorithms.segments import Booleans, Floats, Integers


@compiled
def token_kl(old: float, ref: float, code: int) -> float:
    """KL of one token by `KL_CODES`."""
    d = np.float64(old) - np.float64(ref)
    if code == 1:
        return d
    if code == 2:
        return 0.5 * d * d
    if code == 3:
        return min(exp(-d) + d - 1.0, K3_LIMIT)
    return abs(d)


@compiled
def unclipped_reward(t: int, turn: int, closes: bool, rewards: TokenRewards) -> float:
    reward = rewards.per_turn_K[turn] if closes else 0.0
    if rewards.kl_code != 0:
        reward -= rewards.kl_coef * token_kl(rewards.old_logprobs_L[t], rewards.ref_logprobs_L[t], rewards.kl_code)
    return reward


@compiled
def response_mask(first: int, last: int, cu_N1: Integers, turns_L: NDArray[np.int32], trains_N: Booleans, mask_L: Booleans) -> None:
    """Response tokens of trajectories that train."""
    for n in range(first, last):
        for t in range(cu_N1[n], cu_N1[n + 1]):
            mask_L[t] = trains_N[n] and turns_L[t] >= 0


@compiled
def spread(first: int, last: int, cu_N1: Integers, turns_L: NDArray[np.int32], mask_L: Booleans, per_turn_K: Floats, out_L: Any) -> None:
    """The value of its turn on every masked token."""
    for t in range(cu_N1[first], cu_N1[last]):
        out_L[t] = per_turn_K[turns_L[t]] if mask_L[t] else 0.0


@compiled
def reward_sums(first: int, last: int, cu_N1: Integers, mask_L: Booleans, rewards: TokenRewards, center: float, sums_N4: Floats) -> None:
    """Per trajectory over masked tokens: number, sum of (r - center), sum of its square, tokens that the clip changed."""
    turns_L = rewards.turns_L
    for n in range(first, last):
        following = -1
        for t in range(cu_N1[n + 1] - 1, cu_N1[n] - 1, -1):
            turn = turns_L[t]
            if turn < 0:
                continue
            reward = unclipped_reward(t, turn, turn != following, rewards)
            following = turn
            if mask_L[t]:
                clipped = min(max(reward, -rewards.bound), rewards.bound)
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
    totals_N3: Floats,
) -> None:
    """Generalised advantages over the response tokens of each trajectory, 0 where masked out; `token_advantages` has the formula.

    Without values (an empty array) V = 0. `returns_L` is filled where there are values. The totals are the sums of returns and
    of values over masked tokens, and a 0 that is NaN where any advantage was not finite.
    """
    turns_L = rewards.turns_L
    values_L = critic.values_L
    has_values = len(values_L) > 0
    for n in range(first, last):
        following = -1
        next_value = critic.bootstrap_N[n]
        next_advantage = 0.0
        for t in range(cu_N1[n + 1] - 1, cu_N1[n] - 1, -1):
            turn = turns_L[t]
            if turn < 0:
                advantages_L[t] = 0.0
                if has_values:
                    returns_L[t] = 0.0
                continue
            closes = turn != following
            following = turn
            reward = unclipped_reward(t, turn, closes, rewards)
            reward = (min(max(reward, -rewards.bound), rewards.bound) - rewards.shift) * rewards.scale
            discounted = closes or not discounts.turn_level
            gamma = discounts.gamma if discounted else 1.0
            lambd = discounts.lambd if discounted else 1.0
            value = np.float64(values_L[t]) if has_values else 0.0
            next_advantage = reward + gamma * next_value - value + gamma * lambd * next_advantage
            next_value = value
            advantages_L[t] = next_advantage if mask_L[t] else 0.0
            if has_values:
                returns_L[t] = next_advantage + value
            totals_N3[n, 2] += next_advantage * 0.0
            if mask_L[t]:
                totals_N3[n, 0] += next_advantage + value
                totals_N3[n, 1] += value


@compiled
def sums(first: int, last: int, cu_N1: Integers, mask_L: Booleans, values_L: Any, center: float, sums_N3: Floats) -> None:
    """Per trajectory over masked tokens: number, sum of (x - center), sum of its square."""
    for n in range(first, last):
        count = 0
        total = 0.0
        squares = 0.0
        for t in range(cu_N1[n], cu_N1[n + 1]):
            deviation = np.float64(values_L[t]) - center if mask_L[t] else 0.0
            count += mask_L[t]
            total += deviation
            squares += deviation * deviation
        sums_N3[n, 0] = count
        sums_N3[n, 1] = total
        sums_N3[n, 2] = squares


@compiled
def rescale(
    first: int, last: int, cu_N1: Integers, mask_L: Booleans, values_L: Any, shift: float, scale: float, bound: float, clipped_N: Integers
) -> None:
    """x <- clip((x - shift) * scale) on masked tokens, in place; the number that the clip changed."""
    for n in range(first, last):
        clipped = 0
        for t in range(cu_N1[n], cu_N1[n + 1]):
            if mask_L[t]:
                value = (np.float64(values_L[t]) - shift) * scale
                clipped += abs(value) > bound
                values_L[t] = min(max(value, -bound), bound)
        clipped_N[n] = clipped


@compiled
def turn_kl(
    first: int, last: int, cu_N1: Integers, turns_L: NDArray[np.int32], old_L: Any, ref_L: Any, code: int, kl_K: Floats, kl_N2: Floats
) -> None:
    """Summed KL of each turn's tokens; and per trajectory, with their number."""
    for n in range(first, last):
        for t in range(cu_N1[n], cu_N1[n + 1]):
            if turns_L[t] >= 0:
                kl = token_kl(old_L[t], ref_L[t], code)
                kl_K[turns_L[t]] += kl
                kl_N2[n, 0] += kl
                kl_N2[n, 1] += 1.0


@compiled
def all_finite(first: int, last: int, cu_N1: Integers, turns_L: NDArray[np.int32], values_L: Any, finite_N: Booleans) -> None:
    """Whether the values at response tokens are finite, per trajectory."""
    for n in range(first, last):
        probe = 0.0
        for t in range(cu_N1[n], cu_N1[n + 1]):
            if turns_L[t] >= 0:
                probe += np.float64(values_L[t]) * 0.0
        finite_N[n] = probe == 0.0


__all__ = ["all_finite", "correct", "discount", "rescale", "response_mask", "reward_sums", "spread", "sums", "turn_kl"]
