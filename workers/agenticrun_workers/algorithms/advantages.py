"""Advantage estimators without a critic. One trajectory is one sample; arrays are ragged, one entry per trajectory or token."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from agenticrun_workers.algorithms.grouping import Array, Normalized, Over, group_index, group_means, normalize


def grpo(scores_N: Array, groups_N: Sequence[Hashable], std: Over = "group") -> Normalized:
    """(score - mean of its group) / std of its group (Shao et al. 2024, arXiv 2402.03300), of the batch, or undivided."""
    return normalize(scores_N, groups_N, "group", std)


def dr_grpo(scores_N: Array, groups_N: Sequence[Hashable]) -> Normalized:
    """score - mean of its group (Liu et al. 2025, arXiv 2503.20783); use it with seq-mean-token-sum-norm."""
    return normalize(scores_N, groups_N, "group", "none")


def rloo(scores_N: Array, groups_N: Sequence[Hashable]) -> Normalized:
    """score - mean of the OTHER members of its group (Ahmadian et al. 2024, arXiv 2402.14740); 0 for a group of one."""
    scores_N = np.asarray(scores_N, np.float64)
    index_N = group_index(groups_N)
    sizes_N = np.bincount(index_N)[index_N] if len(index_N) else np.zeros(0)
    alone_N = sizes_N < 2
    centred_N = scores_N - group_means(scores_N, index_N) if len(index_N) else scores_N
    return Normalized(np.where(alone_N, 0.0, centred_N * sizes_N / np.maximum(sizes_N - 1, 1)), alone_N)


def reward_to_go(rewards_T: Array, mask_T: Array, gamma: float) -> Array:
    """Discounted reward-to-go over response tokens: R_t = r_t + gamma R_next, float64 [T], 0 outside the mask.

    The next token is the next RESPONSE token of the trajectory: prompts and observations do not exist for it.
    """
    returns_T = np.zeros(len(rewards_T))
    following = 0.0
    for t in np.flatnonzero(mask_T)[::-1]:
        following = returns_T[t] = rewards_T[t] + gamma * following
    return returns_T


def place_reward(score: float, mask_T: Array) -> Array:
    """The trajectory's reward on its last response token, float64 [T]; all 0 without response tokens."""
    rewards_T = np.zeros(len(mask_T))
    positions = np.flatnonzero(mask_T)
    if len(positions):
        rewards_T[positions[-1]] = score
    return rewards_T


def whiten(advantages: Sequence[Array], masks: Sequence[Array]) -> list[Array]:
    """Mean 0 and unbiased standard deviation 1 over all masked tokens of the batch; 0 outside the masks.

    Fewer than two tokens, or tokens without spread, are centred only.
    """
    picked = [a[np.asarray(m, np.bool_)] for a, m in zip(advantages, masks, strict=True)]
    values = np.concatenate(picked) if picked else np.zeros(0)
    if not len(values):
        return [np.zeros(len(a)) for a in advantages]
    std = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    scale = std if std > 1e-6 else 1.0
    return [np.where(np.asarray(m, np.bool_), (a - values.mean()) / scale, 0.0) for a, m in zip(advantages, masks, strict=True)]


def clip(values: Array, bound: float | None) -> Array:
    """Values limited to [-bound, bound]; None leaves them as they are. For scores and for advantages."""
    return values if bound is None else np.clip(values, -bound, bound)
