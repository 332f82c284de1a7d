"""The batch plan: every trajectory trains once per epoch, on one rank, and ranks stay in step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agenticrun_api import Pipeline
from agenticrun_workers.driver.trainer_group import balance, plan_batch
from agenticrun_workers.rollout.groups import Group
from agenticrun_workers.trainer.batch import RankPlan
from rollout_fakes import result


def pipeline(**changes: Any) -> Pipeline:
    base: dict[str, Any] = {
        "maxSteps": 10,
        "rolloutBatchSize": 8,
        "evalSteps": 0,
        "envs": [{"tag": "A", "type": "frozen_lake"}],
        "trainEnvs": {"groups": 4, "groupSize": 2, "tags": ["A"]},
    }
    return Pipeline.model_validate(base | changes)


def groups(*members: int) -> tuple[Group, ...]:
    return tuple(
        Group(
            number,
            "A",
            tuple(
                result(number, m, tokens=20 + 7 * number + m, score=float(m % 2))
                for m in range(size)
            ),
        )
        for number, size in enumerate(members)
    )


def plan(
    config: Pipeline, batch: tuple[Group, ...], ranks: int, version: int = 1
) -> list[RankPlan]:
    return plan_batch(config, batch, ranks, version)


@given(ranks=st.integers(1, 5), epochs=st.integers(1, 3), chunk=st.sampled_from([2, 4, 8]))
def test_every_trajectory_trains_once_per_epoch_on_one_rank(
    ranks: int, epochs: int, chunk: int
) -> None:
    config = pipeline(
        algorithm={"ppoEpochs": epochs}, actorTrain={"training": {"miniBatchSize": chunk}}
    )
    jobs = plan(config, groups(2, 2, 2, 2), ranks)
    assert {len(job.mini_batches) for job in jobs} == {8 // chunk * epochs}
    trained = Counter(
        job.items[i][0] for job in jobs for mini_batch in job.mini_batches for i in mini_batch
    )
    assert set(trained.values()) == {epochs}
    assert len(trained) == 8


def test_groups_are_kept_whole_in_a_mini_batch() -> None:
    jobs = plan(
        pipeline(actorTrain={"training": {"miniBatchSize": 4}}), groups(2, 2, 2, 2), ranks=2
    )
    for step in range(2):
        members = Counter(job.items[i][0].group for job in jobs for i in job.mini_batches[step])
        assert set(members.values()) == {2}


def test_a_group_that_lost_a_member_trains_with_the_rest() -> None:
    jobs = plan(pipeline(), groups(2, 1, 2, 2), ranks=2)
    assert sum(len(job.items) for job in jobs) == 7


def test_mini_batches_are_drawn_anew_each_step_and_the_same_after_a_resume() -> None:
    config = pipeline(actorTrain={"training": {"miniBatchSize": 2}})
    orders = [
        plan(config, groups(2, 2, 2, 2), 1, version)[0].mini_batches for version in (1, 2, 3, 4)
    ]
    assert len(set(orders)) > 1
    assert plan(config, groups(2, 2, 2, 2), 1, 3)[0].mini_batches == orders[2]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 6))
def test_a_rank_has_more_tokens_than_another_only_by_its_shortest_trajectory(
    lengths: list[int], ranks: int
) -> None:
    results = [result(number, tokens=tokens) for number, tokens in enumerate(lengths)]
    shares = [[r.tokens for r in share] for share in balance(results, ranks)]
    lightest = min(sum(share) for share in shares)
    assert all(sum(share) - min(share) <= lightest for share in shares if share)
    assert sum(sum(share) for share in shares) == sum(lengths)
