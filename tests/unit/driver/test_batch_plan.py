"""The batch plan: every trajectory trains once per epoch, on one rank, and ranks stay in step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_api import Pipeline
from agenticrun_workers.driver.batch_plan import balance, plan_batch
from agenticrun_workers.driver.step import select_groups
from agenticrun_workers.rollout.controller import Group
from agenticrun_workers.trainer.batch import RankPlan, optimizer_steps_per_batch
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


@pytest.mark.parametrize(
    ("keep", "chunk", "sizes"),
    [(0.25, 2, [2]), (0.5, 2, [2, 2]), (0.75, 4, [4, 2]), (0.25, 8, [2]), (1.0, 4, [4, 4])],
)
def test_a_variance_filter_leaves_fewer_mini_batches_and_no_empty_one(
    keep: float, chunk: int, sizes: list[int]
) -> None:
    config = pipeline(
        algorithm={"varianceFilter": {"keep": keep}, "ppoEpochs": 2},
        actorTrain={"training": {"miniBatchSize": chunk}},
    )
    jobs = plan(config, select_groups(config, groups(2, 2, 2, 2)), ranks=2)
    steps = zip(*(job.mini_batches for job in jobs), strict=True)
    assert [sum(map(len, parts)) for parts in steps] == sizes * 2
    assert optimizer_steps_per_batch(config) == 2 * len(sizes)


def test_a_group_that_lost_a_member_trains_with_the_rest() -> None:
    jobs = plan(pipeline(), groups(2, 1, 2, 2), ranks=2)
    assert sum(len(job.items) for job in jobs) == 7


def test_mini_batches_are_drawn_anew_each_step_and_the_same_after_a_resume() -> None:
    config = pipeline(actorTrain={"training": {"miniBatchSize": 2}})

    def order(version: int) -> tuple[int, ...]:
        """Return the groups in the order of their mini-batches."""
        [job] = plan(config, groups(2, 2, 2, 2), 1, version)
        return tuple(job.items[chosen[0]][0].group for chosen in job.mini_batches)

    orders = [order(version) for version in (1, 2, 3, 4)]
    assert len(set(orders)) > 1
    assert order(3) == orders[2]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 6))
def test_a_rank_has_more_tokens_than_another_only_by_its_shortest_trajectory(
    lengths: list[int], ranks: int
) -> None:
    results = [result(number, tokens=tokens) for number, tokens in enumerate(lengths)]
    shares = [[r.tokens for r in share] for share in balance(results, ranks)]
    lightest = min(sum(share) for share in shares)
    assert all(sum(share) - min(share) <= lightest for share in shares if share)
    assert sum(sum(share) for share in shares) == sum(lengths)


def long_tailed(number: int, seed: int) -> tuple[Group, ...]:
    """Return groups of 8 whose trajectories have log-normal lengths: median 1000, sigma 0.5."""
    lengths = np.random.default_rng(seed).lognormal(np.log(1000), 0.5, (number, 8)).round()
    return tuple(
        Group(
            group,
            "A",
            tuple(result(group, member, tokens=int(n)) for member, n in enumerate(row)),
        )
        for group, row in enumerate(lengths)
    )


def long_tailed_plan(
    batch: tuple[Group, ...], ranks: int, mini_batches: int, epochs: int = 1
) -> list[RankPlan]:
    size = 8 * len(batch)
    config = pipeline(
        rolloutBatchSize=size,
        trainEnvs={"groups": len(batch), "groupSize": 8, "tags": ["A"]},
        algorithm={"ppoEpochs": epochs},
        actorTrain={"training": {"miniBatchSize": size // mini_batches}},
    )
    return plan(config, batch, ranks)


def loads_of(jobs: list[RankPlan], batch: tuple[Group, ...]) -> np.ndarray:
    """Return the tokens of each rank in each mini-batch, [ranks, mini-batches]."""
    tokens = {result.key: result.tokens for group in batch for result in group.results}
    return np.array(
        [
            [sum(tokens[job.items[i][0]] for i in chosen) for chosen in job.mini_batches]
            for job in jobs
        ]
    )


@pytest.mark.parametrize(
    ("ranks", "mini_batches", "limit"), [(8, 4, 1.1), (32, 8, 1.15), (64, 8, 1.25)]
)
def test_in_each_mini_batch_the_slowest_rank_has_little_more_than_the_mean(
    ranks: int, mini_batches: int, limit: float
) -> None:
    batch = long_tailed(256, seed=ranks)
    loads = loads_of(long_tailed_plan(batch, ranks, mini_batches), batch)
    assert (loads.max(0) / loads.mean(0)).mean() <= limit


@pytest.mark.parametrize(
    ("ranks", "mini_batches", "limit"), [(8, 4, 1.1), (32, 8, 1.15), (64, 8, 1.25)]
)
def test_with_few_trajectories_per_rank_the_longest_one_is_the_limit(
    ranks: int, mini_batches: int, limit: float
) -> None:
    """64 ranks have one trajectory each in a mini-batch: none can be faster than the longest."""
    batch = long_tailed(64, seed=ranks)
    jobs = long_tailed_plan(batch, ranks, mini_batches)
    loads = loads_of(jobs, batch)
    longest = [
        max(r.tokens for group in batch for r in group.results if r.key in keys)
        for keys in (
            {job.items[i][0] for job in jobs for i in job.mini_batches[step]}
            for step in range(mini_batches)
        )
    ]
    assert (loads.max(0) / np.maximum(loads.mean(0), longest)).mean() <= limit


def test_ranks_have_even_shares_of_the_whole_batch_too() -> None:
    batch = long_tailed(256, seed=1)
    loads = loads_of(long_tailed_plan(batch, 64, 8), batch).sum(1)
    assert loads.max() / loads.mean() <= 1.05


def test_every_epoch_has_the_same_mini_batches_in_another_order() -> None:
    batch = long_tailed(64, seed=2)
    jobs = long_tailed_plan(batch, 4, 8, epochs=3)
    for job in jobs:
        epochs = [job.mini_batches[8 * epoch :][:8] for epoch in range(3)]
        assert len(set(epochs)) == 3
        assert len({frozenset(epoch) for epoch in epochs}) == 1
