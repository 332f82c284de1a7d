"""Problems of pods that often pass without help count only if they do not."""

from __future__ import annotations

from datetime import timedelta

from agenticrun_api import ConditionType, Role
from operator_world import Operator, World, condition, happened, training


def roles_ready(world: World) -> tuple[str, str]:
    found = condition(world, ConditionType.ROLES_READY)
    return found.reason, found.message


async def wait(operator: Operator, seconds: int) -> None:
    for _ in range(seconds):
        operator.world.now += timedelta(seconds=1)
        await operator.reconcile()


async def test_a_container_that_is_not_ready_is_named_after_some_seconds() -> None:
    world = World()
    world.apply_run()
    operator = Operator(world)
    await operator.reconcile()
    await operator.reconcile()
    world.make_pods(ready=False)
    await wait(operator, 10)
    assert roles_ready(world) == ("PodsPending", "driver: 0 of 1 pods ready")
    await wait(operator, 15)
    reason, message = roles_ready(world)
    name = world.pods(Role.DRIVER)[0]["metadata"]["name"]
    assert (reason, message) == (
        "ContainerNotReady",
        f"driver: pod {name} container ray is not ready",
    )
    await operator.settle(2)
    assert roles_ready(world)[0] == "PodsReady"


async def test_a_claim_that_gets_its_volume_a_moment_later_is_no_alarm() -> None:
    world = World(storage_down=True)
    world.apply_run()
    operator = Operator(world)
    await operator.reconcile()
    await operator.reconcile()
    world.make_pods()
    for pod in world.pods():
        words = "pod has unbound immediate PersistentVolumeClaims. not found"
        pod["status"] = {
            "conditions": [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "message": words,
                    "lastTransitionTime": world.now.isoformat(),
                }
            ]
        }
        del pod["spec"]["nodeName"]
    await wait(operator, 5)
    assert "Unschedulable" not in happened(world)
    assert roles_ready(world)[0] == "PodsPending"
    await wait(operator, 10)
    assert roles_ready(world)[0] == "Unschedulable"


async def test_a_scheduling_gate_that_stays_is_named() -> None:
    world = World()
    world.apply_run()
    operator = Operator(world)
    await operator.reconcile()
    await operator.reconcile()
    world.make_pods()
    for pod in world.pods(Role.ENV):
        gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
        words = "Scheduling is blocked due to non-empty scheduling gates"
        pod["status"] = {"conditions": [gated | {"message": words}]}
        pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/topology"}]
        del pod["spec"]["nodeName"]
    await wait(operator, 5)
    assert "Unschedulable" not in happened(world), "Kueue takes a moment"
    await wait(operator, 10)
    reason, message = roles_ready(world)
    assert reason == "Unschedulable"
    assert "waits for scheduling gate kueue.x-k8s.io/topology" in message


async def test_a_worker_that_starts_again_with_its_head_is_no_crash() -> None:
    world = World(rejoin_seconds=20.0)
    world.apply_run()
    operator = Operator(world)
    await training(operator)
    env = world.pods(Role.ENV)[0]
    began = world.now
    world.now += timedelta(seconds=5)
    world.delete_pod(Role.DRIVER)
    world.make_pods()
    (container,) = env["status"]["containerStatuses"]
    container |= {
        "restartCount": 1,
        "ready": False,
        "lastState": {
            "terminated": {
                "exitCode": 1,
                "reason": "Error",
                "startedAt": began.isoformat(),
                "finishedAt": world.now.isoformat(),
            }
        },
    }
    env["status"]["conditions"] = [
        {"type": "Ready", "status": "False", "lastTransitionTime": world.now.isoformat()}
    ]
    await wait(operator, 10)
    assert "ContainerCrashed" not in happened(world)
    assert roles_ready(world)[0] == "PodsPending"
