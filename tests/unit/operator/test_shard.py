"""Each run belongs to one shard, and an operator touches no run of another one."""

from __future__ import annotations

import uuid
from collections import Counter
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from agenticrun_api.names import KIND, LABEL_RUN_UID
from agenticrun_operator.resources import CLAIM_KIND
from agenticrun_operator.settings import Settings
from agenticrun_operator.shard import ALL_RUNS, Shard
from operator_world import Operator, World, training


@given(st.uuids(), st.integers(1, 64))
def test_each_run_belongs_to_one_of_the_shards(uid: uuid.UUID, count: int) -> None:
    assert sum(Shard(number, count).has(str(uid)) for number in range(count)) == 1
    assert ALL_RUNS.has(str(uid))


def test_shards_have_about_the_same_number_of_runs() -> None:
    uids = [str(uuid.UUID(int=1103515245 * number % 2**128)) for number in range(8000)]
    found = Counter(next(n for n in range(8) if Shard(n, 8).has(uid)) for uid in uids)
    assert min(found.values()) > 800
    assert max(found.values()) < 1200


def test_a_claim_is_seen_that_an_earlier_run_of_the_name_has_left() -> None:
    claim = {"metadata": {"uid": "x", "labels": {LABEL_RUN_UID: "of an earlier run"}}}
    assert all(Shard(number, 2).sees(CLAIM_KIND, claim) for number in (0, 1))


@given(st.uuids())
def test_children_are_of_the_shard_of_their_run(uid: uuid.UUID) -> None:
    run = {"metadata": {"uid": str(uid), "labels": {LABEL_RUN_UID: "another"}}}
    pod = {"metadata": {"uid": "x", "labels": {LABEL_RUN_UID: str(uid)}}}
    for shard in (Shard(0, 2), Shard(1, 2)):
        assert shard.sees(KIND, run) == shard.sees("Pod", pod) == shard.has(str(uid))
        assert shard.sees("Pod", {"metadata": {"uid": "x", "labels": None}}), "it may be anyone's"


async def test_a_run_of_another_shard_is_not_touched(world: World, operator: Operator) -> None:
    await training(operator)
    uid = world.run["metadata"]["uid"]
    operator.shard = next(shard for shard in (Shard(0, 2), Shard(1, 2)) if not shard.has(uid))
    operator.upgrade(operator.images)
    before = world.status
    world.requests.clear()
    world.drive(2)
    for _ in range(5):
        world.now += timedelta(seconds=60)
        assert await operator.reconcile() is None
    assert set(world.requests) == {f"get {KIND}"}
    assert world.status == before
    assert operator.reconciler.known_keys() == []


@pytest.mark.parametrize("shard", ["2/2", "1/0", "-1/2", "1", "x/2", "1/2/3"])
def test_a_shard_that_does_not_exist_is_refused(shard: str) -> None:
    with pytest.raises(ValidationError, match="shard"):
        Settings(operator_key=SecretStr("k" * 32), worker_image="worker:1", shard=shard)


def test_without_a_setting_an_operator_follows_all_runs() -> None:
    settings = Settings(operator_key=SecretStr("k" * 32), worker_image="worker:1")
    assert settings.part == ALL_RUNS
