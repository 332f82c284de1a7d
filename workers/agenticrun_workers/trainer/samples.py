"""Training samples: one per trajectory, or one per turn of a step-wise agent.

Without torch, which the driver does not import: it exchanges values of samples with the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agenticrun_workers.types import BoolArray, FloatArray, IntArray, Trajectory


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence to train on. All arrays have [T] tokens and are never padded.

    Position t holds the value of predicting token t. The first token is never predicted. Optional
    arrays are read only where `weight_T` is above 0.
    """

    tokens_T: IntArray
    weight_T: FloatArray
    """The loss mask: 1 on tokens that count; 0 on prompts, observations and filtered tokens."""
    advantages_T: FloatArray
    turns_T: IntArray
    """Number of the turn on response tokens, not falling; -1 elsewhere."""
    old_logprobs_T: FloatArray | None = None
    """Recomputed by the trainer when the batch starts, or recorded by the engine. Without them the
    loss uses the current ones, detached (ratio 1)."""
    ref_logprobs_T: FloatArray | None = None
    engine_logprobs_T: FloatArray | None = None
    """Recorded while sampling."""
    current_T: BoolArray | None = None
    """True on tokens that were sampled with the weights before this optimizer step. On them the
    loss measures the gap between trainer and engine; None: it does not."""
    is_weights_T: FloatArray | None = None
    """Factor of each token's loss (train-inference correction)."""
    returns_T: FloatArray | None = None
    """The critic's target."""
    old_values_T: FloatArray | None = None
    """The critic's values when the batch started, for its clip."""
    score: float = 0.0
    """Score of the whole trajectory; TOPR reads its sign."""

    @staticmethod
    def of_text(tokens_T: IntArray) -> Sample:
        """Return a sample of text that no policy sampled: only the value at its end is read."""
        nothing_T = np.zeros(len(tokens_T), np.float32)
        return Sample(tokens_T, nothing_T, nothing_T, np.full(len(tokens_T), -1, np.int32))

    def with_ending(self, ending_T: IntArray) -> Sample:
        """Append text: only the value at its end is read."""
        ending = Sample.of_text(ending_T)
        return Sample(
            tokens_T=np.concatenate([self.tokens_T, ending.tokens_T]),
            weight_T=np.concatenate([self.weight_T, ending.weight_T]),
            advantages_T=np.concatenate([self.advantages_T, ending.advantages_T]),
            turns_T=np.concatenate([self.turns_T, ending.turns_T]),
        )


def policy_samples(trajectory: Trajectory) -> list[Sample]:
    """Return samples with weight 1 on every token that the policy sampled.

    They can be scored; `train_step` needs their advantages as well.
    """
    return _samples(trajectory, trajectory.response_mask_T.astype(np.float32))


def supervised_samples(trajectory: Trajectory, observation_weight: float = 0.0) -> list[Sample]:
    """Return samples for `supervised_step`, with weight 1 on the answers.

    Args:
        trajectory: a demonstration.
        observation_weight: weight of the environment's tokens after the first answer, which teaches
            the effect of actions. The first prompt has weight 0: no action led to it. A step-wise
            agent's prompts have weight 0 too: they repeat earlier turns.
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
