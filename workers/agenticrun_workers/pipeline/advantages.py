"""From the scalars of a batch to the advantages of its response tokens. Runs in the driver."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from agenticrun_api import Pipeline
from agenticrun_workers.algorithms.batch_advantages import AdvantageSpec, batch_advantages
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.types import FloatArray


@dataclass(frozen=True)
class BatchAdvantages:
    """Advantages of a batch, in its order."""

    per_trajectory: list[FloatArray]
    """float32 [response tokens] each."""
    zero_variance_share: float
    degenerate: int


def compute_advantages(pipeline: Pipeline, results: list[EpisodeResult]) -> BatchAdvantages:
    """Advantages of these trajectories, all of which are trainable.

    Every formula needs only scores and numbers of response tokens, so no tokens travel to the driver.
    """
    normalization = pipeline.reward_normalization
    grouping = normalization.grouping if normalization else "group"
    sets: dict[str, list[Hashable]] = {
        "group": [r.key.group for r in results],
        "tag": [r.tag for r in results],
        "batch": [""] * len(results),
    }
    advantages = batch_advantages(
        advantage_spec(pipeline),
        scores_N=[result.score for result in results],
        groups_N=sets["group"],
        masks=[np.ones(result.response_tokens) for result in results],
        trainable_N=[True] * len(results),
        norm_groups_N=sets[grouping],
    )
    per_trajectory = [values_T.astype(np.float32) for values_T in advantages.per_token]
    return BatchAdvantages(per_trajectory, advantages.zero_variance_share, advantages.degenerate)


def advantage_spec(pipeline: Pipeline) -> AdvantageSpec:
    algorithm, normalization = pipeline.algorithm, pipeline.reward_normalization
    return AdvantageSpec(
        estimator=algorithm.name,
        grpo_std=algorithm.norm_std_type,
        gamma=algorithm.gamma,
        norm_mean=normalization.norm_mean_type if normalization else "none",
        norm_std=normalization.norm_std_type if normalization else "none",
        whiten=algorithm.whiten_advantages,
        reward_clip=algorithm.reward_clip,
        advantage_clip=algorithm.advantage_clip,
    )
