"""From the environment's rewards to the credited ones: penalties, clip and placement."""

from __future__ import annotations

import numpy as np

from agenticrun_workers.algorithms.segments import Booleans, Floats, Integers, owners


def zero_rewards(rewards_K: Floats, cu_turns_N1: Integers, zeroed_N: Booleans) -> Floats:
    """Return the environment's rewards, 0 in the marked trajectories.

    Penalties are added later, so they remain.
    """
    return np.where(zeroed_N[owners(cu_turns_N1)], 0.0, rewards_K)


def format_penalties(invalid_K: Booleans, penalty_N: Floats, cu_turns_N1: Integers) -> Floats:
    """Return the penalty of each turn, [K]; 0 for a turn with a valid action."""
    return np.where(invalid_K, penalty_N[owners(cu_turns_N1)], 0.0)


def overlong_penalty(lengths_N: Integers, limit: float, buffer: float, penalty: float) -> Floats:
    """Return the soft overlong punishment [N] (Yu et al. 2025, DAPO, arXiv 2503.14476, eq. 13).

    It is 0 up to limit - buffer, falls linearly to -penalty at the limit, and stays -penalty beyond
    it.

    Args:
        lengths_N: response tokens of each trajectory.
        limit: length in tokens.
        buffer: tokens before the limit in which the penalty grows; above 0.
        penalty: largest deduction.
    """
    share_N: Floats = np.clip((limit - buffer - lengths_N) / buffer, -1.0, 0.0)
    return penalty * share_N


def clip(values: Floats, bound: float | None) -> Floats:
    """Limit values to [-bound, bound]; None leaves them unchanged."""
    return values if bound is None else np.clip(values, -bound, bound)


def carriers(response_tokens_K: Integers, cu_turns_N1: Integers) -> Integers:
    """Return the turn with the tokens that carry each turn's reward, int64 [K].

    This is the turn itself, unless its response is empty. Then it is the nearest earlier turn with
    tokens, else the nearest later one, so that no reward is lost. In a trajectory without response
    tokens each turn keeps its own reward.
    """
    turn_K = np.arange(len(response_tokens_K))
    owner_K = owners(cu_turns_N1)
    spoke_K = response_tokens_K > 0
    # The nearest turn before with tokens, carried forward by a running maximum.
    earlier_K = np.maximum.accumulate(np.where(spoke_K, turn_K, -1))
    later_K = np.minimum.accumulate(np.where(spoke_K, turn_K, len(turn_K))[::-1])[::-1]
    has_later_K = later_K < cu_turns_N1[1:][owner_K]
    return np.where(
        earlier_K >= cu_turns_N1[:-1][owner_K], earlier_K, np.where(has_later_K, later_K, turn_K)
    )


def last_turns(cu_turns_N1: Integers) -> tuple[Integers, Booleans]:
    """Return the last turn of each trajectory that has turns, and a mask of these, bool [N]."""
    has_turns_N = np.diff(cu_turns_N1) > 0
    return cu_turns_N1[1:][has_turns_N] - 1, has_turns_N


def on_last_turn(values_N: Floats, cu_turns_N1: Integers) -> Floats:
    """Place each trajectory's value on its last turn, 0 on the others, [K]."""
    values_K = np.zeros(int(cu_turns_N1[-1]))
    turns, has_turns_N = last_turns(cu_turns_N1)
    values_K[turns] = values_N[has_turns_N]
    return values_K
