"""Trajectories as training samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.training.strategy import Sample
from agenticrun_workers.types import Trajectory


def policy_sample(trajectory: Trajectory, advantages_T: NDArray[np.float64]) -> Sample:
    """A sample for `train_step`: weight 1 on the tokens that the policy sampled, all 0 if it may not be trained on."""
    trains = trajectory.response_mask_T if trajectory.stop_reason.trainable else np.zeros(trajectory.num_tokens)
    return Sample(trajectory.tokens_T, trains.astype(np.float32), advantages_T.astype(np.float32), trajectory.logprobs_T)


def supervised_sample(trajectory: Trajectory, observation_weight: float = 0.0) -> Sample:
    """A sample for `supervised_step`: weight 1 on the answers, which teaches how an answer looks.

    `observation_weight` is the weight of what the environment says after the first answer, which teaches to foresee what
    actions do. The first prompt weighs nothing: no action led to it.
    """
    weight_T = np.where(trajectory.response_mask_T, 1.0, observation_weight).astype(np.float32)
    if trajectory.turns:
        weight_T[: len(trajectory.turns[0].prompt_T)] = 0.0
    zeros_T = np.zeros(trajectory.num_tokens, np.float32)
    return Sample(trajectory.tokens_T, weight_T, zeros_T, zeros_T)
