"""From what the environment paid to the rewards that are credited: penalties, clip and the turn that carries them."""

from __future__ import annotations

import numpy as np

from agenticrun_workers.algorithms.segments import Booleans, Floats, Integers, owners


def zero_rewards(rewards_K: Floats, cu_turns_N1: Integers, zeroed_N: Booleans) -> Floats:
    """The environment's rewards, 0 in the trajectories marked. Penalties are added later, so that they stay."""
    return np.where(zeroed_N[owners(cu_turns_N1)], 0.0, rewards_K)


def format_penalties(invalid_K: Booleans, penalty_N: Floats, cu_turns_N1: Integers) -> Floats:
    """What each turn without a valid action costs, [K]."""
    return np.where(invalid_K, penalty_N[owners(cu_turns_N1)], 0.0)


def overlong_penalty(lengths_N: Integers, limit: float, buffer: float, penalty: float) -> Floats:
    """Soft overlong punishment by length, [N] (Yu et al. 2025, DAPO, arXiv 2503.14476, eq. 13), times `penalty`.

    0 up to limit - buffer, then falling linearly to -penalty at the limit, -penalty beyond it.

    Args:
        lengths_N: response tokens of each trajectory.
        buffer: tokens before the limit in which the penalty grows; above 0.
    """
    share_N: Floats = np.clip((limit - buffer - lengths_N) / buffer, -1.0, 0.0)
    return penalty * share_N


def clip(values: Floats, bound: float | None) -> Floats:
    """Values limited to [-bound, bound]; None leaves them as they are."""
    return values if bound is None else np.clip(values, -bound, bound)


def carriers(response_tokens_K: Integers, cu_turns_N1: Integers) -> Integers:
    """The turn whose tokens carry each turn's reward, int64 [K]: itself, as a rule.

    A turn with an empty response has no token to carry its reward: the nearest earlier turn with tokens does, else the nearest
    later one, so that no reward is lost. A trajectory without response tokens keeps its own turns.
    """
    turn_K = np.arange(len(response_tokens_K))
    owner_K = owners(cu_turns_N1)
    spoke_K = response_tokens_K > 0
    earlier_K = np.maximum.accumulate(np.where(spoke_K, turn_K, -1))
    later_K = np.minimum.accumulate(np.where(spoke_K, turn_K, len(turn_K))[::-1])[::-1]
    has_later_K = later_K < cu_turns_N1[1:][owner_K]
    return np.where(
        earlier_K >= cu_turns_N1[:-1][owner_K], earlier_K, np.where(has_later_K, later_K, turn_K)
    )


def last_turns(cu_turns_N1: Integers) -> tuple[Integers, Booleans]:
    """The last turn of each trajectory that has turns, and which those are, bool [N]."""
    has_turns_N = np.diff(cu_turns_N1) > 0
    return cu_turns_N1[1:][has_turns_N] - 1, has_turns_N


def on_last_turn(values_N: Floats, cu_turns_N1: Integers) -> Floats:
    """Each trajectory's value on its last turn, 0 on the others, [K]."""
    values_K = np.zeros(int(cu_turns_N1[-1]))
    turns, has_turns_N = last_turns(cu_turns_N1)
    values_K[turns] = values_N[has_turns_N]
    return values_K
