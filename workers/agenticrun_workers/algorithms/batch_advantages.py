"""From finished trajectories' scores to one advantage per token: the order of operations of a step, in one place.

Reward clip -> estimator with its own baseline (or normalisation) -> placement on tokens -> returns -> whitening -> advantage
clip. Trajectories that are not to be trained on stay outside every statistic and get advantage 0 and mask 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from agenticrun_workers.algorithms.advantages import clip, dr_grpo, grpo, place_reward, reward_to_go, rloo, whiten
from agenticrun_workers.algorithms.grouping import Array, Normalized, Over, group_index, normalize


@dataclass(frozen=True, slots=True)
class AdvantageSpec:
    """Which estimator, with its numbers. `norm_mean` and `norm_std` are read by reinforce only, `grpo_std` by grpo only."""

    estimator: Literal["grpo", "rloo", "dr_grpo", "reinforce"] = "grpo"
    grpo_std: Over = "group"
    gamma: float = 1.0
    norm_mean: Over = "none"
    norm_std: Over = "none"
    whiten: bool = False
    reward_clip: float | None = None
    advantage_clip: float | None = None


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of a batch and what a group could not contribute."""

    per_token: list[Array]
    """float64 [T] per trajectory, 0 where its mask is 0."""
    zero_variance_share: float
    """Share of the groups whose trainable scores are all equal: they train nothing under a group baseline."""
    degenerate: int
    """Trajectories that could not be divided by a standard deviation (or, for rloo, compared with others)."""


def batch_advantages(
    spec: AdvantageSpec,
    scores_N: Sequence[float],
    groups_N: Sequence[Hashable],
    masks: Sequence[Array],
    trainable_N: Sequence[bool],
    norm_groups_N: Sequence[Hashable] | None = None,
) -> Advantages:
    """Advantages of every token of a batch.

    Args:
        scores_N: sum of each trajectory's rewards.
        groups_N: the group of each trajectory.
        masks: response mask of each trajectory, [T].
        trainable_N: whether it counts at all (`StopReason.trainable`).
        norm_groups_N: for reinforce, the sets that `group` means in its normalisation (default: `groups_N`).
    """
    chosen = [i for i, trains in enumerate(trainable_N) if trains]
    scores = clip(np.asarray(scores_N, np.float64)[chosen], spec.reward_clip)
    groups = [groups_N[i] for i in chosen]
    norm_groups = groups if norm_groups_N is None else [norm_groups_N[i] for i in chosen]
    estimate = _estimate(spec, scores, groups, norm_groups)
    per_token = [np.zeros(len(mask)) for mask in masks]
    for number, i in enumerate(chosen):
        mask_T = np.asarray(masks[i], np.float64)
        value = float(estimate.values_N[number])
        if spec.estimator == "reinforce":
            per_token[i] = reward_to_go(place_reward(value, mask_T), mask_T, spec.gamma)
        else:
            per_token[i] = value * mask_T
    if spec.whiten:
        counted = [np.asarray(m) if t else np.zeros(len(m)) for m, t in zip(masks, trainable_N, strict=True)]
        per_token = whiten(per_token, counted)
    per_token = [clip(a, spec.advantage_clip) for a in per_token]
    return Advantages(per_token, _zero_variance_share(scores, groups), int(estimate.degenerate_N.sum()))


def _estimate(spec: AdvantageSpec, scores: Array, groups: list[Hashable], norm_groups: list[Hashable]) -> Normalized:
    match spec.estimator:
        case "grpo":
            return grpo(scores, groups, spec.grpo_std)
        case "rloo":
            return rloo(scores, groups)
        case "dr_grpo":
            return dr_grpo(scores, groups)
        case "reinforce":
            return normalize(scores, norm_groups, spec.norm_mean, spec.norm_std)


def _zero_variance_share(scores: Array, groups: list[Hashable]) -> float:
    index = group_index(groups)
    if not len(index):
        return 0.0
    lowest, highest = np.full(index.max() + 1, np.inf), np.full(index.max() + 1, -np.inf)
    np.minimum.at(lowest, index, scores)
    np.maximum.at(highest, index, scores)
    return float(np.mean(lowest == highest))
