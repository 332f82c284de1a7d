"""Learning-rate schedules and samples from trajectories."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from agenticrun_workers.errors import ScheduleEnded
from agenticrun_workers.trainer.optimizer import OptimizerSpec, StepCounts
from agenticrun_workers.trainer.samples import policy_samples, supervised_samples
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


def rates(counts: StepCounts, number: int) -> list[float]:
    """Return the rates of the next optimizer steps, and take these."""
    found = []
    for _ in range(number):
        found.append(counts.rate)
        counts.record_step(1.0, scheduled=True, first_broken=None)
    return found


@pytest.mark.parametrize("steps_left", [3, 8, 20])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_stretched_schedule_goes_on_from_its_rate_and_ends_at_zero(
    schedule: Literal["linear", "cosine"], steps_left: int
) -> None:
    counts = StepCounts(OptimizerSpec(1.0, schedule, warmup_steps=2, total_steps=10))
    rates(counts, 5)
    before = counts.rate
    counts.stretch(steps_left)
    assert counts.rate == before
    rest = rates(counts, steps_left)
    assert rest == sorted(rest, reverse=True)
    assert rest[-1] > 0
    assert counts.rate == 0


def test_a_linear_schedule_is_stretched_twice() -> None:
    counts = StepCounts(OptimizerSpec(1.0, "linear", total_steps=4))
    assert rates(counts, 2) == [1.0, 0.75]
    counts.stretch(4)
    assert rates(counts, 2) == [0.5, 0.375]
    counts.stretch(1)
    assert rates(counts, 2) == [0.25, 0.0]


def test_a_schedule_that_is_stretched_while_it_rises_falls_from_its_peak() -> None:
    counts = StepCounts(OptimizerSpec(1.0, "linear", warmup_steps=2, total_steps=4))
    assert rates(counts, 1) == [0.5]
    counts.stretch(5)
    assert rates(counts, 6) == [1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_a_schedule_that_has_ended_cannot_be_stretched() -> None:
    counts = StepCounts(OptimizerSpec(1.0, "cosine", total_steps=2))
    rates(counts, 2)
    counts.stretch(0)
    with pytest.raises(ScheduleEnded, match="cosine"):
        counts.stretch(1)


def test_a_schedule_falls_on_from_its_rate_and_before_the_fall_from_its_peak() -> None:
    counts = StepCounts(OptimizerSpec(1.0, "linear", warmup_steps=2, total_steps=4))
    found = [counts.falls_from]
    for _ in range(4):
        rates(counts, 1)
        found.append(counts.falls_from)
    assert found == [1.0, 1.0, 1.0, 0.5, 0.0]


def test_a_constant_rate_is_never_stretched() -> None:
    counts = StepCounts(OptimizerSpec(1.0, total_steps=2))
    rates(counts, 2)
    counts.stretch(1)
    assert counts.rate == 1.0


def test_a_checkpoint_holds_the_schedule() -> None:
    spec = OptimizerSpec(1.0, "cosine", warmup_steps=1, total_steps=10)
    counts, resumed = (StepCounts(spec) for _ in range(2))
    rates(counts, 4)
    counts.stretch(17)
    rates(counts, 4)
    resumed.restore(counts.counts())
    assert rates(resumed, 13) == rates(counts, 13)


def trajectory(*, stepwise: bool = False) -> Trajectory:
    def turn(prompt: int, response: int) -> Turn:
        ones = np.full(response, -0.5, np.float32)
        return Turn(
            np.zeros(prompt, np.int32),
            np.ones(response, np.int32),
            ones,
            np.zeros(response, np.int32),
            0.25,
        )

    return Trajectory(
        EpisodeKey(Stream.TRAIN, 0, 0),
        "t",
        (turn(2, 2), turn(1, 1)),
        StopReason.COMPLETED,
        stepwise=stepwise,
    )


def test_a_policy_sample_weighs_sampled_tokens_and_keeps_the_engine_s_log_probs() -> None:
    [sample] = policy_samples(trajectory())
    assert sample.weight_T.tolist() == [0, 0, 1, 1, 0, 1]
    assert sample.engine_logprobs_T is not None
    assert sample.engine_logprobs_T.tolist() == [0, 0, -0.5, -0.5, 0, -0.5]
    assert sample.old_logprobs_T is None
    assert sample.turns_T.tolist() == [-1, -1, 0, 0, -1, 1]
    assert sample.score == 0.5


def test_a_step_wise_trajectory_is_one_sample_per_turn() -> None:
    first, second = policy_samples(trajectory(stepwise=True))
    assert first.tokens_T.tolist() == [0, 0, 1, 1]
    assert second.tokens_T.tolist() == [0, 1]
    assert second.turns_T.tolist() == [-1, 1]
    assert first.score == second.score == 0.5


def test_a_supervised_sample_weighs_answers_only() -> None:
    [sample] = supervised_samples(trajectory())
    assert sample.weight_T.tolist() == [0, 0, 1, 1, 0, 1]


def test_a_supervised_sample_can_also_weigh_what_the_environment_says_after_an_answer() -> None:
    [sample] = supervised_samples(trajectory(), 0.5)
    assert sample.weight_T.tolist() == [0, 0, 1, 1, 0.5, 1]


def test_the_prompts_of_a_step_wise_agent_weigh_nothing() -> None:
    first, second = supervised_samples(trajectory(stepwise=True), 0.5)
    assert first.weight_T.tolist() == [0, 0, 1, 1]
    assert second.weight_T.tolist() == [0, 1]


def test_a_trajectory_without_turns_is_an_empty_sample() -> None:
    empty = Trajectory(EpisodeKey(Stream.TRAIN, 0, 0), "t", (), StopReason.ENV_ERROR)
    assert [len(sample.tokens_T) for sample in policy_samples(empty)] == [0]
