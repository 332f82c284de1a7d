"""Requests, parsing and memory per run stay small. `benchmarks/operator_cost.py` has the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from agenticrun_api import Activity, Outcome, Phase
from agenticrun_api.names import KIND
from agenticrun_operator import pod_reader, reconciler, resources
from agenticrun_operator.planning import result
from fleet import Fleet
from operator_world import NAME, NAMESPACE, Operator, World, training


def counted(monkeypatch: pytest.MonkeyPatch, *functions: tuple[Any, str]) -> Counter[str]:
    """Count the calls of functions, given as modules and names."""
    calls = Counter[str]()

    def counting(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            return inner(*arguments, **named)

        return outer

    for module, name in functions:
        monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    return calls


@pytest.mark.parametrize(
    ("step_seconds", "most_looks", "writes"), [(1, 60, 30), (5, 30, 12), (20, 30, 7), (60, 30, 7)]
)
async def test_requests_per_minute_of_a_run_that_trains(
    world: World, operator: Operator, step_seconds: int, most_looks: float, writes: float
) -> None:
    """Each step has a rollout and a training, and the watches work."""
    await training(operator, 1, max_steps=10**6)
    world.now += timedelta(seconds=60)
    await operator.reconcile(changed=False)
    began, looks = world.now, 0
    world.requests.clear()
    while (elapsed := (world.now - began).total_seconds()) < 600:
        activity = (
            Activity.ROLLOUT if elapsed % step_seconds < 0.6 * step_seconds else Activity.TRAINING
        )
        step = 2 + int(elapsed // step_seconds)
        world.drive(step, max_steps=10**6, seconds_per_step=step_seconds, activity=activity)
        delay = await operator.reconcile(changed=False)
        assert delay is not None
        world.now += timedelta(seconds=delay)
        looks += 1
    found = Counter(world.requests)
    del found["wrote status"]
    assert set(found) == {"get job", "get progress", "write status"}, "and nothing else"
    assert found["get job"] == found["get progress"] == looks
    assert looks / 10 <= most_looks
    assert found["write status"] / 10 <= writes


async def test_a_run_is_parsed_once_for_each_version_that_others_have_written(
    world: World, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await training(operator)
    calls = counted(monkeypatch, (reconciler, "parse_served"))
    for step in range(2, 12):
        world.drive(step, max_steps=100)
        world.now += timedelta(seconds=30)
        await operator.reconcile()
    assert world.status.step == 11
    assert calls["parse_served"] == 0, "the operator's own status writes need no parsing"
    world.change_run(("ttlSecondsAfterFinished", 60))
    await operator.reconcile()
    assert calls["parse_served"] == 1


async def test_a_look_without_news_makes_its_policies_once_and_no_condition(
    world: World, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator.upgrade(replace(operator.images, operator_namespace="agenticrun-system"))
    await training(operator)
    calls = counted(monkeypatch, (resources, "network_policies"), (result, "Condition"))
    for _ in range(5):
        await operator.reconcile(changed=False)
    assert calls == {"network_policies": 5}


async def test_an_event_of_one_of_many_pods_reads_one_pod(
    world: World, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look after it costs as much as with a few pods."""
    world.change_run(("roles.env.replicas", 200))
    await training(operator)
    world.now += timedelta(seconds=30)
    await operator.reconcile()
    calls = counted(monkeypatch, (pod_reader, "read_pod"), (pod_reader, "resolve_pod"))
    for pod in world.pods()[:3]:
        pod["status"]["message"] = "changed"
        await operator.reconcile()
    assert calls == {"read_pod": 3, "resolve_pod": 3}


async def test_a_run_that_trains_costs_little_memory() -> None:
    """Its document, its pods and its connections, but no manifests of pods."""
    fleet = Fleet()
    assert await fleet.bytes_per_run(await fleet.add_training(30)) <= 150_000
    many = Fleet(("spec.roles.env.replicas", 51))
    more = await many.bytes_per_run(await many.add_training(10))
    assert more - 150_000 <= 50 * 3000, "a pod costs at most 3 KB"


async def test_a_run_that_has_ended_costs_at_most_four_kilobytes() -> None:
    fleet = Fleet()
    assert await fleet.bytes_per_run(await fleet.add_ended(50)) <= 4096


async def test_only_the_metrics_stay_of_a_run_that_has_ended(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.reporter_down = True
    await operator.settle()
    world.reporter_down = False
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(10)
    assert world.status.phase is Phase.SUCCEEDED
    assert not world.pods()
    kept, observer = operator.reconciler, operator.reconciler._observer
    assert not any((kept._cache, kept._conflicts, observer._pods, observer._silent))
    assert kept.known_keys() == [(NAMESPACE, NAME)]
    world.requests.clear()
    assert await operator.reconcile() is None, "a resync"
    assert world.requests == []


async def test_nothing_stays_of_a_run_that_is_deleted(world: World, operator: Operator) -> None:
    await training(operator)
    world.reporter_down = True
    await operator.settle()
    world.delete_run()
    await operator.reconcile()
    kept, observer = operator.reconciler, operator.reconciler._observer
    assert not any((kept.known_keys(), kept._conflicts, observer._pods, observer._silent))


async def test_a_run_that_has_ended_is_looked_at_when_its_time_is_over(
    world: World, operator: Operator
) -> None:
    world.change_run(("ttlSecondsAfterFinished", 3600))
    await training(operator)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(10)
    world.now += timedelta(seconds=1800)
    left = await operator.reconcile()
    assert left is not None
    assert 1700 <= left <= 1800, "also if a resync has replaced its timer"
    world.now += timedelta(seconds=left)
    await operator.reconcile(changed=False)
    assert (KIND, NAME) not in world.objects
    await operator.reconcile()
    assert operator.reconciler.known_keys() == []


async def test_a_run_that_has_ended_and_changes_is_looked_at(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(10)
    world.change_run(("ttlSecondsAfterFinished", 5))
    world.now += timedelta(seconds=60)
    await operator.reconcile()
    assert (KIND, NAME) not in world.objects


async def test_pods_that_appear_after_the_end_of_a_run_are_looked_at(
    world: World, operator: Operator
) -> None:
    """A RayCluster that was made again by hand, for example."""
    await training(operator)
    cluster = world.objects["RayCluster", NAME]
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(10)
    assert operator.reconciler._ended
    world.objects["RayCluster", NAME] = cluster
    await operator.settle()
    assert ("RayCluster", NAME) not in world.objects, "spec.cleanup deletes it"
