"""Tags, seeds and results: the small values of rollout."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_api import Pipeline
from agenticrun_workers.agents import Episode
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.rollout.groups import EpisodeResult, GroupPlan, tag_cycle, zero_variance
from agenticrun_workers.seeds import derive, env_seed, sampling_seed
from agenticrun_workers.serialization import pack, unpack
from agenticrun_workers.types import EpisodeKey, StopReason, Stream, Trajectory, Turn
from rollout_fakes import result


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9), min_size=1).filter(
        lambda shares: sum(shares.values()) > 0
    )
)
def test_a_cycle_has_each_tag_as_often_as_its_share(shares: dict[str, int]) -> None:
    assert Counter(tag_cycle(shares)) == Counter(
        {tag: share for tag, share in shares.items() if share}
    )


def test_tags_are_spread_evenly_over_the_cycle() -> None:
    assert tag_cycle({"a": 4, "b": 2}) == ("a", "b", "a", "a", "b", "a")


def test_members_of_a_group_play_one_level_and_sample_differently() -> None:
    keys = [EpisodeKey(Stream.TRAIN, 3, member) for member in range(50)]
    played = [Episode.seeded(7, key, "A") for key in keys]
    assert len({e.env_seed for e in played}) == 1
    assert len({e.sampling_seed for e in played}) == 50


def test_streams_groups_seeds_and_rerolls_never_share_a_seed() -> None:
    seeds = [
        env_seed(s, stream, group) for s in range(3) for stream in Stream for group in range(50)
    ]
    key = EpisodeKey(Stream.TRAIN, 0, 0)
    seeds += [sampling_seed(s, key, attempt) for s in range(3) for attempt in range(3)]
    assert len(set(seeds)) == len(seeds)


def test_seeds_are_the_same_on_every_machine_and_in_every_release() -> None:
    assert derive(42, "env", "train", 0) == derive(42, "env", "train", 0)
    assert env_seed(42, Stream.VALIDATION, 5) == 1855723891
    assert sampling_seed(42, EpisodeKey(Stream.TRAIN, 1, 2)) == 3706233373380521565


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.sampled_from(Stream))
def test_levels_have_seeds_of_31_bits_and_those_of_validation_are_its_own(
    seed: int, group: int, stream: Stream
) -> None:
    level = env_seed(seed, stream, group)
    assert 0 <= level < 2**31
    assert (level >= 2**30) == (stream is Stream.VALIDATION)


def test_untrainable_are_errors_and_episodes_without_a_finite_response() -> None:
    assert result(0).trainable
    assert result(0, stop=StopReason.MAX_TURNS).trainable
    assert not result(0, stop=StopReason.TIMEOUT).trainable
    assert not result(0, tokens=0).trainable


@pytest.mark.parametrize(
    ("reward", "logprob"),
    [
        (math.nan, -1.0),
        (math.inf, -1.0),
        (1e39, -1.0),
        (10**400, -1.0),
        ("1", -1.0),
        (1.0, -math.inf),
        (1.0, math.nan),
    ],
)
def test_numbers_that_are_not_finite_count_as_an_error_of_the_environment(
    reward: float, logprob: float
) -> None:
    one = np.ones(1, np.int32)
    turn = Turn(one, one, np.array([logprob], np.float32), one, reward)
    told = EpisodeResult.of(
        Trajectory(EpisodeKey(Stream.TRAIN, 0, 0), "A", (turn,), StopReason.COMPLETED)
    )
    assert (told.stop_reason, told.trainable) == (StopReason.ENV_ERROR, False)
    assert "not a finite number" in told.error
    assert told.score in (0.0, reward)


def test_rewards_whose_sum_float32_cannot_hold_are_an_error() -> None:
    one = np.ones(1, np.int32)
    turn = Turn(one, one, np.zeros(1, np.float32), one, 2e38)
    key = EpisodeKey(Stream.TRAIN, 0, 0)
    told = EpisodeResult.of(Trajectory(key, "A", (turn, turn), StopReason.COMPLETED))
    assert (told.stop_reason, told.score) == (StopReason.ENV_ERROR, 0.0)
    assert "4e+38, which is too large" in told.error


def test_a_metric_that_is_not_finite_is_an_error_of_an_agent() -> None:
    one = np.ones(1, np.int32)
    turn = Turn(one, one, np.zeros(1, np.float32), one, 1.0)
    key = EpisodeKey(Stream.TRAIN, 0, 0)
    told = EpisodeResult.of(
        Trajectory(key, "A", (turn,), StopReason.COMPLETED, {"good": 1.0, "speed": math.inf})
    )
    assert (told.stop_reason, told.metrics) == (StopReason.ENV_ERROR, {})
    assert told.error == "a metric is not a finite number: speed = inf"


@pytest.mark.parametrize("score", [1e-7, 1.3, 100.0])
def test_the_filter_refuses_scores_that_differ_by_rounding(score: float) -> None:
    rounded = float(np.float32(score))
    assert zero_variance([rounded, rounded, float(np.nextafter(np.float32(score), 1e9))])
    assert not zero_variance([rounded, rounded, 1.01 * rounded])
    assert zero_variance([score])


def pipeline(**train_envs: Any) -> Pipeline:
    envs = [{"tag": "A", "type": "frozen_lake"}]
    document = {"maxSteps": 1, "rolloutBatchSize": 8, "evalSteps": 0, "envs": envs}
    return Pipeline.model_validate(
        document | {"trainEnvs": {"groups": 2, "groupSize": 2, "tags": ["A"]} | train_envs}
    )


def test_a_plan_is_what_train_envs_say() -> None:
    plan = GroupPlan.of(
        pipeline(groupSizeRedundancy=3, maxRerolls=7, groupFilter={"maxRejected": 5}),
        transcripts=2,
        frames=True,
    )
    assert (plan.group_size, plan.redundancy, plan.max_rerolls, plan.transcripts, plan.frames) == (
        2,
        3,
        7,
        2,
        True,
    )
    assert plan.filter is not None
    assert (
        plan.filter.max_rejected,
        plan.filter.refuses([1.0, 1.0]),
        plan.filter.refuses([1.0, 0.0]),
    ) == (5, True, False)
    assert GroupPlan.of(pipeline()).filter is None


def test_a_filter_of_one_s_own_is_a_function_of_the_scores() -> None:
    plan = GroupPlan.of(pipeline(groupFilter={"type": "statistics:mean"}))
    assert plan.filter is not None
    assert plan.filter.refuses([1.0, 3.0]) == 2.0


@pytest.mark.parametrize("name", ["nonsense", "no.such.module:f", "statistics:no_such_function"])
def test_a_filter_that_is_not_there_is_refused_with_its_field(name: str) -> None:
    with pytest.raises(InvalidConfig, match=r"spec\.pipeline\.trainEnvs\.groupFilter\.type"):
        GroupPlan.of(pipeline(groupFilter={"type": name}))


def test_results_survive_the_wire() -> None:
    sent = result(1, 2, score=0.5)
    (received,) = unpack(pack([sent]))
    for field in fields(sent):
        np.testing.assert_equal(getattr(received, field.name), getattr(sent, field.name))


def test_a_trajectory_travels_in_little_more_than_its_arrays_and_the_driver_gets_no_tokens() -> (
    None
):
    """`benchmarks/rollout.py` measures the same for a whole step."""

    def turn(tokens: int) -> Turn:
        prompt_T, response_T = np.arange(tokens, dtype=np.int32), np.ones(tokens, np.int32)
        logprobs_T, versions_T = -np.ones(tokens, np.float32), np.full(tokens, 3, np.int32)
        return Turn(
            prompt_T, response_T, logprobs_T, versions_T, 1.0, state=bytes(32), engine="engine-1"
        )

    played = Trajectory(
        EpisodeKey(Stream.TRAIN, 1, 2),
        "Lake",
        tuple(turn(512) for _ in range(8)),
        StopReason.COMPLETED,
    )
    arrays = 8 * 512 * 4 * 4
    assert len(pack([played])) < 1.2 * arrays
    assert len(pack([EpisodeResult.of(played)])) < 1000


def test_a_trajectory_of_500_tokens_travels_in_less_than_4800_bytes() -> None:
    """A token of a prompt takes 4 bytes; a sampled one 12, with its log-prob and its version."""
    rng, prompt, response = np.random.default_rng(0), 70, 30

    def turn() -> Turn:
        return Turn(
            rng.integers(0, 150_000, prompt).astype(np.int32),
            rng.integers(0, 150_000, response).astype(np.int32),
            -rng.random(response, np.float32),
            np.full(response, 3, np.int32),
            1.0,
            state=rng.bytes(32),
            engine="engine-1",
        )

    trajectories = [
        Trajectory(
            EpisodeKey(Stream.TRAIN, 1, member),
            "Lake",
            tuple(turn() for _ in range(5)),
            StopReason.COMPLETED,
        )
        for member in range(8)
    ]
    assert sum(each.num_tokens for each in trajectories) == 8 * 500
    assert len(pack(trajectories)) / 8 < 4800
