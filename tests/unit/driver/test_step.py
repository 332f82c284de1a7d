"""Credit on the driver: results become arrays, and credits return to their trajectories."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agenticrun_api import Pipeline
from agenticrun_workers.driver.credit import CreditAssigner
from agenticrun_workers.driver.step import select_groups
from agenticrun_workers.rollout.controller import Group
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.types import StopReason
from rollout_fakes import result


def pipeline(**changes: Any) -> Pipeline:
    base: dict[str, Any] = {
        "maxSteps": 10,
        "rolloutBatchSize": 8,
        "evalSteps": 0,
        "envs": [{"tag": "A", "type": "frozen_lake", "formatPenalty": -0.5}],
        "trainEnvs": {"groups": 4, "groupSize": 2, "tags": ["A"]},
    }
    return Pipeline.model_validate(base | changes)


def two_groups() -> list[EpisodeResult]:
    return [result(group, member, score=float(member)) for group in range(2) for member in range(2)]


def test_group_estimators_give_each_turn_the_advantage_of_its_trajectory() -> None:
    assigner = CreditAssigner(pipeline(algorithm={"name": "rloo"}))
    credits, metrics = assigner.assign(two_groups(), None)
    assert {
        key: credit_K.tolist() for key, credit_K in credits.items() if credit_K is not None
    } == {r.key: pytest.approx([2.0 * r.key.member - 1.0] * r.turns) for r in two_groups()}
    assert metrics["group/zero_variance_share"] == 0.0


def test_truncated_trajectories_that_are_masked_get_no_credit() -> None:
    assigner = CreditAssigner(pipeline(algorithm={"name": "rloo", "truncated": {"mode": "mask"}}))
    [first, *others] = two_groups()
    cut = replace(first, stop_reason=StopReason.MAX_TURNS)
    credits, _ = assigner.assign([cut, *others], None)
    assert [credit_K is None for credit_K in credits.values()] == [True, False, False, False]


def test_reinforce_puts_the_score_where_the_trajectory_ends() -> None:
    credits, _ = CreditAssigner(pipeline(algorithm={"name": "reinforce"})).assign(
        [result(0, score=8.0)], None
    )
    (credit_K,) = credits.values()
    assert credit_K is not None
    assert credit_K.tolist() == [0.0] * (len(credit_K) - 1) + [8.0]


def test_the_most_uncertain_groups_keep_their_order() -> None:
    spreads = (0.0, 3.0, 1.0, 2.0)
    groups = tuple(
        Group(n, "A", (result(n, 0, score=0.0), result(n, 1, score=spread)))
        for n, spread in enumerate(spreads)
    )
    half, quarter = (
        select_groups(pipeline(algorithm={"varianceFilter": {"keep": keep}}), groups)
        for keep in (0.5, 0.25)
    )
    assert [group.number for group in half] == [1, 3]
    assert [group.number for group in quarter] == [1]


@pytest.mark.parametrize(("keep", "kept"), [(1.0, 8), (0.5, 4), (0.4, 3), (0.25, 2), (0.01, 1)])
def test_a_variance_filter_keeps_its_share_of_the_groups_and_at_least_one(
    keep: float, kept: int
) -> None:
    groups = tuple(Group(n, "A", (result(n, 0), result(n, 1, score=n))) for n in range(8))
    config = pipeline(algorithm={"varianceFilter": {"keep": keep}})
    assert [g.number for g in select_groups(config, groups)] == list(range(8 - kept, 8))


def test_the_controller_sees_the_mean_kl_per_response_token() -> None:
    config = pipeline(
        algorithm={"name": "reinforce", "rewardKl": {"coef": 0.2, "targetKl": 0.1, "horizon": 100}}
    )
    results = two_groups()
    kl = {r.key: np.full(r.turns, 0.5 * r.response_tokens / r.turns) for r in results}
    credit = CreditAssigner(config)
    metrics = credit.adapt_kl(results, kl)
    assert metrics == {"critic/kl_coef": 0.2, "critic/kl": pytest.approx(0.5)}
    assert credit.kl_coef == pytest.approx(0.2 * (1 + 0.2 * len(results) / 100))
    assert CreditAssigner(config, 0.7).kl_coef == 0.7
    assert CreditAssigner(pipeline()).kl_coef == 0.0
    assert credit.adapt_kl(results, None) == {}


def test_running_moments_continue_from_a_checkpoint_and_are_metrics() -> None:
    config = pipeline(
        algorithm={"name": "reinforce"},
        rewardNormalization={"grouping": "tag", "normMeanType": "running"},
    )
    first = CreditAssigner(config)
    first.assign(two_groups(), None)
    assert first.moments == {"A": [4.0, 0.5, 1.0]}
    resumed = CreditAssigner(config, None, json.loads(json.dumps(first.moments)))
    _, metrics = resumed.assign(two_groups(), None)
    assert resumed.moments == {"A": [8.0, 0.5, 2.0]}
    assert metrics["critic/running_mean/A"] == 0.5
    assert metrics["critic/running_std/A"] == pytest.approx(math.sqrt(2 / 7))
