"""Learning-rate schedules and samples from trajectories."""

from __future__ import annotations

import numpy as np
import pytest

from agenticrun_workers.training import OptimizerSpec
from agenticrun_workers.training.samples import policy_sample, supervised_sample
from agenticrun_workers.types import EpisodeKey, StopReason, Stream, Trajectory, Turn


def test_warm_up_rises_linearly_to_the_rate() -> None:
    spec = OptimizerSpec(1.0, warmup_steps=4)
    assert [spec.rate(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_from_the_end_of_warm_up_to_zero() -> None:
    spec = OptimizerSpec(1.0, "linear", warmup_steps=2, total_steps=6)
    assert [spec.rate(step) for step in range(2, 8)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_cosine_is_half_way_down_in_the_middle() -> None:
    spec = OptimizerSpec(2.0, "cosine", total_steps=10)
    assert [spec.rate(step) for step in (0, 5, 10, 11)] == pytest.approx([2.0, 1.0, 0.0, 0.0])


def test_a_falling_schedule_needs_its_end() -> None:
    with pytest.raises(ValueError, match="needs total_steps"):
        OptimizerSpec(1.0, "linear")


def trajectory(reason: StopReason = StopReason.COMPLETED) -> Trajectory:
    def turn(prompt: int, response: int) -> Turn:
        ones = np.full(response, -0.5, np.float32)
        return Turn(np.zeros(prompt, np.int32), np.ones(response, np.int32), ones, np.zeros(response, np.int32), 0.0)

    return Trajectory(EpisodeKey(Stream.TRAIN, 0, 0), "t", (turn(2, 2), turn(1, 1)), reason)


def test_a_policy_sample_weighs_sampled_tokens_and_keeps_the_engine_s_log_probs() -> None:
    sample = policy_sample(trajectory(), np.arange(6.0))
    assert sample.weight_T.tolist() == [0, 0, 1, 1, 0, 1]
    assert sample.old_logprobs_T.tolist() == [0, 0, -0.5, -0.5, 0, -0.5]
    assert sample.advantages_T.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("reason", [StopReason.ENV_ERROR, StopReason.TIMEOUT, StopReason.ABORTED])
def test_a_trajectory_that_may_not_be_trained_on_weighs_nothing(reason: StopReason) -> None:
    assert not policy_sample(trajectory(reason), np.zeros(6)).weight_T.any()


def test_a_supervised_sample_weighs_answers_only() -> None:
    assert supervised_sample(trajectory()).weight_T.tolist() == [0, 0, 1, 1, 0, 1]


def test_a_supervised_sample_can_also_weigh_what_the_environment_says_after_an_answer() -> None:
    assert supervised_sample(trajectory(), 0.5).weight_T.tolist() == [0, 0, 1, 1, 0.5, 1]
