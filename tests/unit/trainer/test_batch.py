"""One rank's part of a batch: samples, and where the critic is read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agenticrun_workers.algorithms import CorrectionSpec, TokenSpec, WeightSpec
from agenticrun_workers.driver.metrics import gap_metrics
from agenticrun_workers.trainer.batch import RankBatch, ScoredBatch
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.types import EpisodeKey, FloatArray, StopReason, Stream, Trajectory, Turn


def turn(prompt: list[int], response: list[int], reward: float = 0.0) -> Turn:
    ones = np.ones(len(response))
    return Turn(
        np.array(prompt, np.int32),
        np.array(response, np.int32),
        (-ones).astype(np.float32),
        ones.astype(np.int32),
        reward,
    )


def cut_trajectory(*, stepwise: bool, stop: StopReason = StopReason.MAX_TURNS) -> Trajectory:
    turns = (turn([1, 2], [3]), turn([4], [5, 6], reward=1.0))
    ending = np.array([7, 8, 9], np.int32) if stop.truncated else np.zeros(0, np.int32)
    return Trajectory(
        EpisodeKey(Stream.TRAIN, 0, 0), "A", turns, stop, stepwise=stepwise, ending_T=ending
    )


OTHER = EpisodeKey(Stream.TRAIN, 0, 1)


def sum_of_tokens(samples: list[Sample]) -> list[FloatArray]:
    """A critic whose value of a text is the sum of its token ids."""
    return [
        np.cumsum([0, *s.tokens_T]).astype(np.float32) * np.append(s.turns_T >= 0, True)
        for s in samples
    ]


def valued(trajectory: Trajectory, *, bootstrap: bool) -> RankBatch:
    batch = RankBatch([trajectory], bootstrap)
    batch.compute_values(sum_of_tokens)
    return batch


def returns(batch: RankBatch) -> list[float]:
    """With gamma = lambda = 1, each token's return is the reward plus the value after the end."""
    [key] = (trajectory.key for trajectory in batch.trajectories)
    credits = {key: np.array([0.0, 1.0])}
    batch.compute_advantages(TokenSpec("gae", lambd=1.0), credits, 0.0, lambda values: values)
    found = [s.returns_T[s.turns_T >= 0] for s in batch.samples if s.returns_T is not None]
    return [float(value) for value in np.concatenate(found)]


def test_a_trajectory_without_credit_is_in_no_loss() -> None:
    trajectories = [
        cut_trajectory(stepwise=False),
        replace(cut_trajectory(stepwise=False), key=OTHER),
    ]
    batch = RankBatch(trajectories)
    credits = {trajectories[0].key: np.array([0.0, 2.0]), OTHER: None}
    batch.compute_advantages(TokenSpec("grpo"), credits, 0.0, lambda sums: sums)
    trained, left_out = batch.samples
    assert trained.weight_T.tolist() == (trained.turns_T >= 0).tolist()
    assert trained.advantages_T.tolist() == [0, 0, 0, 0, 2, 2]
    assert not left_out.weight_T.any()
    assert not left_out.advantages_T.any()
    with pytest.raises(KeyError):
        batch.compute_advantages(TokenSpec("grpo"), {OTHER: None}, 0.0, lambda sums: sums)


@pytest.mark.parametrize(("stepwise", "after"), [(False, 45.0), (True, 24.0)])
def test_a_cut_trajectory_goes_on_with_the_value_of_what_it_leaves_unanswered(
    stepwise: bool, after: float
) -> None:
    batch = valued(cut_trajectory(stepwise=stepwise), bootstrap=True)
    assert returns(batch) == pytest.approx([1.0 + after] * 3)


def test_without_bootstrap_or_after_a_terminal_step_nothing_comes_after_the_end() -> None:
    assert returns(valued(cut_trajectory(stepwise=False), bootstrap=False)) == pytest.approx(
        [1.0] * 3
    )
    done = cut_trajectory(stepwise=False, stop=StopReason.COMPLETED)
    assert returns(valued(done, bootstrap=True)) == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("stepwise", [False, True])
def test_the_ending_is_in_no_sample(stepwise: bool) -> None:
    batch = valued(cut_trajectory(stepwise=stepwise), bootstrap=True)
    assert np.concatenate([sample.tokens_T for sample in batch.samples]).tolist() == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert batch.values is not None
    assert [len(values_T1) - 1 for values_T1 in batch.values] == [
        len(sample.tokens_T) for sample in batch.samples
    ]


def test_scores_of_other_pods_arrive_as_they_were_computed_there() -> None:
    trajectories = [cut_trajectory(stepwise=True)]
    there = RankBatch(trajectories)
    there.ref_logprobs = [
        np.full(len(sample.tokens_T), -0.5, np.float32) for sample in there.samples
    ]
    here = RankBatch(trajectories)
    here.merge_scores([there.scores(), valued(trajectories[0], bootstrap=False).scores()])
    assert here.ref_logprobs is not None
    assert here.values is not None
    assert [part.tolist() for part in here.ref_logprobs] == [
        part.tolist() for part in there.ref_logprobs
    ]
    assert len(here.values) == 2


@pytest.mark.parametrize("stepwise", [False, True])
def test_the_first_step_s_samples_say_which_tokens_its_weights_sampled(stepwise: bool) -> None:
    first, second = (turn([1, 2], [3]), turn([4], [5, 6]))
    mixed = replace(second, versions_T=np.array([1, 2], np.int32))
    trajectories = [
        Trajectory(
            EpisodeKey(Stream.TRAIN, 0, member),
            "A",
            (first, mixed),
            StopReason.COMPLETED,
            stepwise=stepwise,
        )
        for member in range(2)
    ]
    batch = RankBatch(trajectories, mini_batches=[(1,), (0,)])
    now, later = batch.mini_batch_samples(version=2)
    marks = [s.current_T for s in now if s.current_T is not None]
    assert np.concatenate(marks).tolist() == [False] * 5 + [True]
    assert all(s.current_T is None for s in later)
    assert [s.current_T for step in batch.mini_batch_samples() for s in step] == [None] * len(
        batch.samples
    )


def test_the_rollouts_log_probs_are_those_that_the_engines_recorded() -> None:
    batch = RankBatch([cut_trajectory(stepwise=True)])
    assert [part.tolist() for part in batch.rollout_logprobs()] == [[0, 0, -1], [0, -1, -1]]
    assert RankBatch([]).rollout_logprobs() == []


def test_a_rank_may_get_no_trajectory() -> None:
    """There may be more ranks than trajectories, above all with a variance filter."""
    batch = RankBatch([], mini_batches=[(), ()])
    batch.old_logprobs = []
    assert batch.logprob_gaps(version=1) == {}
    assert batch.turn_kl("k1") == {}
    spec = TokenSpec("reinforce", correction=CorrectionSpec(WeightSpec()), whiten_advantages=True)
    batch.compute_advantages(spec, {}, 0.0, lambda sums: sums)
    assert batch.mini_batch_samples(version=1) == [[], []]
    assert batch.value_targets() == {}


def test_the_gap_of_each_engine_counts_tokens_that_it_sampled_with_the_weights_of_now() -> None:
    trajectory = cut_trajectory(stepwise=False)
    turns = tuple(
        replace(turn, engine=f"engine-{number}") for number, turn in enumerate(trajectory.turns)
    )
    batch = RankBatch([replace(trajectory, turns=turns)])
    batch.old_logprobs = [np.full(6, -1.25, np.float32)]
    now = batch.logprob_gaps(version=1)
    assert now == {"engine-0": pytest.approx((0.25, 1.0)), "engine-1": pytest.approx((0.5, 2.0))}
    assert batch.logprob_gaps(version=2) == {"engine-0": (0.0, 0.0), "engine-1": (0.0, 0.0)}
    parts = [batch.logprob_gaps(version=1), {"engine-1": (1.0, 2.0)}]
    summed = ScoredBatch.merge([ScoredBatch(None, gaps) for gaps in parts]).gaps
    assert gap_metrics(summed) == {
        "engine/engine-0/logprob_gap": pytest.approx(0.25),
        "engine/engine-1/logprob_gap": pytest.approx(0.375),
        "engine/logprob_gap": pytest.approx(0.35),
    }
