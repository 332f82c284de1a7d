"""Runs that need all their pods at once: what batch schedulers read, and runs without one."""

from __future__ import annotations

import asyncio
import itertools
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agenticrun_api import AgenticRun, Outcome, Phase, parse_run
from agenticrun_operator.resources import WorkerImages, desired_children
from operator_world import Gpus, Operator, World, happened
from runs import run_with

GANG = "ray.io/gang-scheduling-enabled"
PRIORITY = "ray.io/priority-class-name"


def cluster_of(*changes: tuple[str, Any]) -> dict[str, Any]:
    run: AgenticRun = parse_run(run_with(*changes, name="lake"))
    return desired_children(run, WorkerImages("worker:1"), "tokens")[-1]


def pod_specs(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    groups = (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"])
    return [group["template"]["spec"] for group in groups]


def test_by_default_kubernetes_places_the_pods() -> None:
    cluster = cluster_of(("spec.priorityClassName", "high"))
    assert not {GANG, PRIORITY} & cluster["metadata"]["labels"].keys()
    assert all("schedulerName" not in pod for pod in pod_specs(cluster))


def test_a_gang_has_the_labels_that_kuberays_batch_schedulers_read() -> None:
    labels = cluster_of(("spec.scheduling", {"gang": True}))["metadata"]["labels"]
    assert labels[GANG] == "true"
    assert PRIORITY not in labels
    gang = (("spec.scheduling", {"gang": True}), ("spec.priorityClassName", "high"))
    assert cluster_of(*gang)["metadata"]["labels"][PRIORITY] == "high"


def test_all_pods_go_to_the_scheduler_that_is_named_unless_a_role_names_another_one() -> None:
    scheduler = ("spec.scheduling", {"schedulerName": "volcano"})
    assert {pod["schedulerName"] for pod in pod_specs(cluster_of(scheduler))} == {"volcano"}
    own = ("spec.roles.env.podTemplate", {"spec": {"schedulerName": "default-scheduler"}})
    names = [pod["schedulerName"] for pod in pod_specs(cluster_of(scheduler, own))]
    assert sorted(set(names)) == ["default-scheduler", "volcano"]
    assert names.count("default-scheduler") == 1


def contenders(total: int, needs: list[int], **policy: int) -> list[Operator]:
    """Return runs that share GPUs; their pods are placed one by one."""
    gpus, operators = Gpus(total), []
    for place, replicas in enumerate(needs):
        world = World(gpus=gpus)
        world._ids = itertools.count(1000 * (place + 1))
        world.apply_run(
            ("spec.roles.trainer", {"replicas": replicas, "gpus": 1}),
            ("spec.checkpoint.none", True),
            ("spec.failurePolicy", policy),
        )
        gpus.worlds.append(world)
        operators.append(Operator(world))
    return operators


async def look(operators: list[Operator], seconds: int) -> None:
    """Let KubeRay, the scheduler and the operator work for one moment, run by run."""
    for operator in operators:
        operator.world.make_pods()
        await operator.reconcile()
        operator.world.drive(1)
    for operator in operators:
        operator.world.now += timedelta(seconds=seconds)


def placed(operator: Operator) -> int:
    return sum("nodeName" in pod["spec"] for pod in operator.world.pods())


@pytest.mark.parametrize(("hold", "given_back_after"), [(None, 900), (60, 60)])
async def test_half_placed_runs_give_their_pods_back_after_the_time_that_they_may_hold_them(
    hold: int | None, given_back_after: int
) -> None:
    policy = {"startupDeadlineSeconds": 900} | ({"holdSeconds": hold} if hold else {})
    operators = contenders(2, [2, 2], **policy)
    # The scheduler places the pods of both in turn: neither gets all.
    for operator in operators:
        operator.world.gpus = Gpus(1, [operator.world])
    for _ in range(given_back_after // 5 - 1):
        await look(operators, 5)
    assert all(placed(operator) for operator in operators), "each waits for the other"
    for _ in range(4):
        await look(operators, 5)
    for operator in operators:
        assert happened(operator.world).count("StartupDeadlineExceeded") == 1
        assert placed(operator) == 0


async def test_a_run_of_which_no_pod_is_placed_holds_nothing_and_waits_for_the_deadline() -> None:
    world = World(gpus=Gpus(0))
    world.apply_run(
        *(
            (f"spec.roles.{role}", {"gpus": 1})
            for role in ("driver", "trainer", "inference", "env")
        ),
        ("spec.checkpoint.none", True),
        ("spec.failurePolicy", {"startupDeadlineSeconds": 900, "holdSeconds": 60}),
    )
    operator = Operator(world)
    for _ in range(60):
        await look([operator], 5)
    assert placed(operator) == 0
    assert world.status.phase is Phase.STARTING
    assert "StartupDeadlineExceeded" not in happened(world)


@given(
    total=st.integers(2, 5),
    needs=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    hold=st.sampled_from([60, 300]),
    seconds=st.sampled_from([5, 13, 30]),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_in_any_order_every_run_that_fits_alone_trains_in_the_end(
    total: int, needs: list[int], hold: int, seconds: int, order: Any
) -> None:
    """No two runs block each other, whichever is looked at first and whichever pods are placed."""
    needs = [min(need, total) for need in needs]
    waiting = contenders(total, needs, startupDeadlineSeconds=900, holdSeconds=hold)

    async def until_all_have_trained() -> None:
        for _ in range(2000):
            order.shuffle(waiting)
            await look(waiting, seconds)
            for operator in list(waiting):
                if operator.world.status.phase is Phase.RUNNING:
                    operator.world.end_driver(Outcome.SUCCEEDED)
                    await operator.settle(4)
                if operator.world.status.phase is Phase.SUCCEEDED:
                    waiting.remove(operator)
            if not waiting:
                return
        states = [operator.world.status.message for operator in waiting]
        raise AssertionError(f"these never trained: {states}")

    asyncio.run(until_all_have_trained())
