"""Estimators that compare trajectories or steps with each other.

They give one value per trajectory or turn and need no critic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.algorithms.normalization import Over, centers, normalization, set_sizes
from agenticrun_workers.algorithms.segments import (
    Booleans,
    Floats,
    Integers,
    codes,
    discounted_suffix,
    last_of_each,
    owners,
    segment_sums,
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One value per score, and a mask of the scores that had nothing to be compared with."""

    values_N: Floats
    degenerate_N: Booleans


def grpo(
    scores_N: Floats,
    groups_N: Integers,
    mean: Over = "group",
    std: Over = "group",
    sizes_N: Floats | None = None,
) -> Compared:
    """Return (s_i - mean) / std (Shao et al. 2024, arXiv 2402.03300).

    Args:
        scores_N: float64 [N].
        groups_N: number of each score's group, from 0.
        mean: set of the mean: the group, the batch, or none (0).
        std: set of the standard deviation: the group, the batch, or none (1).
        sizes_N: see `normalization`; here and below.
    """
    normalized = normalization(scores_N, groups_N, mean, std, sizes_N)
    return Compared(normalized.apply(scores_N), normalized.degenerate_N)


def dr_grpo(scores_N: Floats, groups_N: Integers, sizes_N: Floats | None = None) -> Compared:
    """Return s_i - mean of the group (Liu et al. 2025, arXiv 2503.20783).

    Its loss aggregation is seq-mean-token-sum-norm.
    """
    return grpo(scores_N, groups_N, "group", "none", sizes_N)


def rloo(scores_N: Floats, groups_N: Integers, sizes_N: Floats | None = None) -> Compared:
    """Return s_i - mean of the OTHER scores of the group (Ahmadian et al. 2024, arXiv 2402.14740).

    This equals (s_i - mean) n / (n - 1). In a group of one there are no others, and the value is 0.
    """
    if not len(scores_N):
        return Compared(scores_N, np.zeros(0, np.bool_))
    size_N = set_sizes(groups_N)
    centred_N = scores_N - centers(scores_N, groups_N, sizes_N)
    return Compared(
        # A lone score has nothing to be compared with: 0, and not the whole score.
        np.where(size_N < 2, 0.0, centred_N * size_N / np.maximum(size_N - 1, 1)),
        size_N < 2,
    )


def step_returns(rewards_K: Floats, cu_turns_N1: Integers, gamma: float) -> Floats:
    """Return R_k = r_k + gamma R_{k+1} inside each trajectory, turns in order, float64 [K]."""
    # 0 at the last turn, so that returns do not flow into the next trajectory.
    decay_K = np.where(last_of_each(cu_turns_N1), 0.0, gamma)
    return discounted_suffix(rewards_K, decay_K, int(np.diff(cu_turns_N1).max(initial=0)))


def state_sets(groups_K: Integers, states_K: NDArray[Any]) -> Integers:
    """Number the turns so that equal states of one trajectory group have equal numbers, int64 [K].

    Turns of two groups never have the same number.

    Args:
        groups_K: trajectory group of each turn.
        states_K: raw 32-byte digests of the observations, as `S32`, `V32` or uint8 [K, 32].
    """
    if not len(groups_K):
        return np.zeros(0, np.int64)
    digests = np.ascontiguousarray(states_K).view(np.uint8).reshape(len(groups_K), -1)
    # As bytes, so that equal pairs of group and state are equal keys; big-endian, so that keys sort
    # by group.
    keys = np.concatenate([groups_K.astype(">i8").view(np.uint8).reshape(-1, 8), digests], axis=1)
    return codes(np.ascontiguousarray(keys).view(f"S{keys.shape[1]}").ravel())


@dataclass(frozen=True, slots=True)
class StepCredit:
    """Result of `gigpo`: the credit of each turn, and its two parts."""

    values_K: Floats
    episode_N: Floats
    step_K: Floats
    degenerate_N: Booleans
    degenerate_K: Booleans


def gigpo(
    rewards_K: Floats,
    cu_turns_N1: Integers,
    groups_N: Integers,
    states_K: NDArray[Any],
    *,
    gamma: float,
    episode_weight: float,
    step_weight: float,
    mean: Over = "group",
    std: Over = "group",
    sizes_K: Floats | None = None,
) -> StepCredit:
    """Return w_E A_E + w_S A_S for every turn (Feng et al. 2025, arXiv 2505.10978).

    A_E compares the trajectory's score s = sum_k r_k with those of its group; each trajectory
    counts once. A_S compares the step return R_k (`step_returns`) with those of the turns of the
    same group that saw the same state; for a state that was seen once it is 0. Both are normalised
    by `mean` and `std`, where `group` means the trajectory group for A_E and the turns with an
    equal state for A_S.
    """
    sizes_K = np.abs(rewards_K) if sizes_K is None else sizes_K
    episode = grpo(
        segment_sums(rewards_K, cu_turns_N1),
        groups_N,
        mean,
        std,
        segment_sums(sizes_K, cu_turns_N1),
    )
    owner_K = owners(cu_turns_N1)
    step = grpo(
        step_returns(rewards_K, cu_turns_N1, gamma),
        state_sets(groups_N[owner_K], states_K),
        mean,
        std,
        step_returns(sizes_K, cu_turns_N1, gamma),
    )
    values_K = episode_weight * episode.values_N[owner_K] + step_weight * step.values_N
    return StepCredit(
        values_K, episode.values_N, step.values_N, episode.degenerate_N, step.degenerate_N
    )
