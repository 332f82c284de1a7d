"""Trajectories as training samples: one per trajectory, or one per turn of a step-wise agent."""

from __future__ import annotations

import numpy as np

from agenticrun_workers.trainer.strategy import Sample
from agenticrun_workers.types import FloatArray, Trajectory


def policy_samples(trajectory: Trajectory) -> list[Sample]:
    """Samples for `compute_*`, and for `train_step` once advantages are known: weight 1 on every token that the policy sampled."""
    return _samples(trajectory, trajectory.response_mask_T.astype(np.float32))


def supervised_samples(trajectory: Trajectory, observation_weight: float = 0.0) -> list[Sample]:
    """Samples for `supervised_step`: weight 1 on the answers, which teaches how an answer looks.

    `observation_weight` is the weight of what the environment says after the first answer, which teaches to foresee what
    actions do. The first prompt weighs nothing: no action led to it. Nor do a step-wise agent's prompts, which repeat the past.
    """
    weight_T = np.where(
        trajectory.response_mask_T, 1.0, 0.0 if trajectory.stepwise else observation_weight
    ).astype(np.float32)
    if trajectory.turns:
        weight_T[: len(trajectory.turns[0].prompt_T)] = 0.0
    return _samples(trajectory, weight_T)


def _samples(trajectory: Trajectory, weight_T: FloatArray) -> list[Sample]:
    cuts = np.cumsum(trajectory.sample_lengths)[:-1]
    arrays = (
        trajectory.tokens_T,
        weight_T,
        np.zeros(len(weight_T), np.float32),
        trajectory.turns_T,
        trajectory.logprobs_T,
    )
    parts = zip(*(np.split(array, cuts) for array in arrays), strict=True)
    return [
        Sample(
            tokens_T,
            weight_T,
            advantages_T,
            turns_T,
            engine_logprobs_T=logprobs_T,
            score=trajectory.score,
        )
        for tokens_T, weight_T, advantages_T, turns_T, logprobs_T in parts
    ]
