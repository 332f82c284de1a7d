"""What fails again and again is tried less and less often, and the run says so."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from agenticrun_api import ConditionType, Phase
from agenticrun_operator.errors import Conflict, Denied
from operator_world import Operator, World, condition, happened


async def follow(operator: Operator, seconds: float) -> int:
    """Look whenever the operator asks for it, without events. Return the number of looks."""
    world, looks = operator.world, 0
    end = world.now + timedelta(seconds=seconds)
    while world.now < end:
        delay = await operator.reconcile(changed=False)
        assert delay is not None
        world.now += timedelta(seconds=delay)
        looks += 1
    return looks


async def test_a_refused_submission_is_repeated_ever_more_rarely_and_is_visible(
    world: World, operator: Operator
) -> None:
    world.submit_down = True
    await operator.settle()
    since = condition(world, ConditionType.TRAINING).message
    assert "refused the submission" in since
    await follow(operator, 1200)
    assert 20 <= world.requests.count("submit") <= 36
    training = condition(world, ConditionType.TRAINING)
    assert training.reason == "SubmissionRefused"
    count = world.requests.count("submit")
    known = (f"{number} times since 2026-01-01T00:00:" for number in (count - 1, count))
    assert any(text in training.message for text in known), training.message
    assert training.message.endswith("Ray did not take the job")
    assert happened(world).count("SubmissionRefused") == 1
    assert world.jobs == []
    world.submit_down = False
    await follow(operator, 70)
    assert [job.attempt for job in world.jobs] == [1]
    world.drive(1)
    await operator.settle(2)
    assert condition(world, ConditionType.TRAINING).reason == "DriverRunning"


async def test_contention_for_a_quota_is_a_denial_and_no_tight_loop(
    world: World, operator: Operator
) -> None:
    world.create_errors["RayCluster"] = Conflict('resourcequotas "q": the object was modified')
    assert await follow(operator, 600) <= 40
    provisioned = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert provisioned.reason == "Denied"
    assert "contention for a quota" in provisioned.message
    assert happened(world).count("Denied") == 1
    world.create_errors.clear()
    await follow(operator, 35)
    assert ("RayCluster", "lake") in world.objects


async def test_conflicts_in_a_row_are_retried_ever_more_rarely(
    world: World, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> None:
        raise Conflict("the run has changed")

    monkeypatch.setattr(world, "write_status", refuse)
    delays = [await operator.reconcile(changed=False) for _ in range(10)]
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, *[5.0] * 5]
    monkeypatch.undo()
    await operator.settle(1)
    assert world.status.phase is Phase.STARTING
    monkeypatch.setattr(world, "write_status", refuse)
    world.pods_denied = "no"
    world.make_pods()
    assert await operator.reconcile() == 0.2, "the count begins again"


@pytest.mark.parametrize("obstacle", ["no image", "denied"])
async def test_an_obstacle_is_looked_at_ever_more_rarely(
    world: World, operator: Operator, obstacle: str
) -> None:
    if obstacle == "no image":
        world.run["spec"]["pipeline"]["actorInfer"]["strategy"]["name"] = "vllm"
    else:
        world.create_errors["RayCluster"] = Denied("quota")
    assert 25 <= await follow(operator, 600) <= 40
    assert len(happened(world)) == 1
