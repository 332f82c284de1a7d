"""A disruption by the platform is no failure of the run, and loses no place in a queue."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from agenticrun_api import ConditionType, Outcome, Phase, Role
from agenticrun_api.status import CheckpointStatus
from agenticrun_operator.cluster import HeadAddress
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import Manifest
from operator_world import NAME, Operator, World, condition, copied, happened, training

TARGET = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "EvictionByEvictionAPI",
    "message": "Eviction API: evicting",
}


def a_run(**policy: Any) -> Operator:
    world = World()
    world.apply_run(
        ("spec.checkpoint", {"volumeClaim": {"size": "1Gi"}}),
        ("spec.failurePolicy", {"backoffSeconds": 10, **policy}),
    )
    return Operator(world)


async def pass_time(operator: Operator, seconds: int, step: int = 5) -> None:
    for _ in range(seconds // step):
        operator.world.make_pods()
        await operator.reconcile()
        operator.world.now += timedelta(seconds=step)


def phase_of(world: World) -> Phase:
    return world.status.phase


def counts(world: World) -> tuple[int, int, int]:
    """Return disruptions, restarts, and failures without progress."""
    status = world.status
    return status.disruptions, status.restarts, status.failures_without_progress


def checkpoint(world: World, step: int) -> CheckpointStatus:
    return CheckpointStatus(step=step, uri=f"/checkpoints/{step}", time=format_time(world.now))


async def test_drains_without_a_step_between_them_never_end_a_run() -> None:
    operator = a_run(maxRestarts=2)
    world = operator.world
    await training(operator, step=0)
    waits: list[float] = []
    for drained in range(1, 9):
        world.delete_pod(Role.DRIVER)
        began = world.now
        while not world.live_jobs():
            await pass_time(operator, 5)
        waits.append((world.now - began).total_seconds())
        world.drive(0)
        await operator.settle(2)
        assert counts(world) == (drained, 0, 0)
    assert phase_of(world) is Phase.RUNNING
    types = [event.type for event in world.events if event.reason == "Disrupted"]
    assert types == ["Normal"] * 2 + ["Warning"] * 6
    assert waits[1] < waits[3] < waits[5] <= 620, "a run may cause its own evictions"


async def test_a_run_may_limit_its_disruptions() -> None:
    operator = a_run(maxDisruptions=1)
    world = operator.world
    await training(operator)
    for _ in range(2):
        world.delete_pod(Role.DRIVER)
        await pass_time(operator, 60)
        world.drive(1)
        await operator.settle(1)
    assert phase_of(world) is Phase.FAILED
    failed = condition(world, ConditionType.FAILED)
    assert failed.reason == "DisruptionsExhausted"
    assert "failurePolicy.maxDisruptions" in failed.message


@pytest.mark.parametrize("role", [Role.DRIVER, Role.TRAINER])
async def test_an_evicted_pod_is_named_with_the_cause(role: Role) -> None:
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 1))
    (pod,) = world.pods(role)
    pod["status"]["conditions"].append(TARGET)
    world._mark_deleted(pod)
    await operator.reconcile()
    assert phase_of(world) is Phase.RUNNING, "the driver saves"
    world.end_driver(Outcome.STOPPED)
    await operator.reconcile()
    world.delete_pod(role)
    assert counts(world) == (1, 0, 0)
    assert world.status.message == (
        f"attempt 1 was disrupted after it had saved a checkpoint: {role.value} pod "
        f"{pod['metadata']['name']} was disrupted (EvictionByEvictionAPI)"
    )
    await pass_time(operator, 60)
    assert [job.attempt for job in world.jobs] == [1, 2]
    assert world.status.job is not None
    assert world.status.job.disruption == ""


async def test_the_cause_is_remembered_although_the_pod_is_gone_when_the_attempt_ends() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    (pod,) = world.pods(Role.TRAINER)
    pod["status"]["conditions"].append(TARGET)
    world._mark_deleted(pod)
    await operator.reconcile()
    del world.objects["Pod", pod["metadata"]["name"]]
    again = Operator(world)
    await again.settle(1)
    world.end_driver(Outcome.FAILED)
    await again.settle(2)
    assert counts(world) == (1, 0, 0)
    assert "EvictionByEvictionAPI" in (world.status.message or "")


async def test_a_trainer_pod_that_was_replaced_while_the_operator_was_away_is_a_disruption() -> (
    None
):
    operator = a_run()
    world = operator.world
    await training(operator)
    world.now += timedelta(seconds=60)
    world.delete_pod(Role.TRAINER)
    world.make_pods()
    world.end_driver(Outcome.FAILED)
    await operator.settle(2)
    assert counts(world) == (1, 0, 0)
    assert "a trainer pod was replaced by" in (world.status.message or "")


class SlowClock(World):
    """The clock of the head's node is a minute behind."""

    async def submit(
        self, head: HeadAddress, submission_id: str, attempt: int, replicas: Mapping[str, int]
    ) -> None:
        known = len(self.jobs)
        await super().submit(head, submission_id, attempt, replicas)
        for job in self.jobs[known:]:
            job.start_time -= 60


@pytest.mark.parametrize("replaced", [False, True])
async def test_the_clock_of_the_heads_node_does_not_decide_if_a_pod_was_replaced(
    replaced: bool,
) -> None:
    world = SlowClock()
    world.apply_run(("spec.failurePolicy", {"backoffSeconds": 10}))
    operator = Operator(world)
    await training(operator)
    if replaced:
        world.now += timedelta(seconds=5)
        world.delete_pod(Role.TRAINER)
        world.make_pods()
    world.end_driver(None)
    await operator.settle(3)
    assert counts(world) == ((1, 0, 0) if replaced else (0, 1, 1))


async def test_a_pod_that_is_replaced_before_ray_takes_the_attempt_does_not_disrupt_it() -> None:
    operator = a_run()
    world = operator.world
    world.submit_down = True
    await operator.settle()
    world.delete_pod(Role.TRAINER)
    await pass_time(operator, 30)
    world.submit_down = False
    await pass_time(operator, 120)
    world.drive(1)
    await operator.settle(3)
    world.end_driver(Outcome.FAILED)
    await operator.settle(2)
    assert counts(world) == (0, 1, 1)


@pytest.mark.parametrize("what", ["driver", "head container", "env pod"])
async def test_what_the_run_does_itself_is_a_failure(what: str) -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    if what == "head container":
        world.restart_head_container()
    if what == "env pod":
        world.delete_pod(Role.ENV)
    if what != "head container":
        world.end_driver(Outcome.FAILED)
    await operator.settle(3)
    assert counts(world) == (0, 1, 1)


async def test_a_pod_that_ends_slowly_does_not_disrupt_the_next_attempt() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    (slow,) = world.pods(Role.TRAINER)
    world.delete_pod(Role.DRIVER)
    await pass_time(operator, 60)
    slow = copied(slow)
    end = format_time(world.now + timedelta(seconds=600))
    slow["metadata"] |= {"deletionTimestamp": end, "name": "slow", "uid": "slow"}
    world.objects["Pod", "slow"] = slow
    assert len(world.pods(Role.TRAINER)) == 2
    world.drive(1)
    await operator.settle(1)
    world.end_driver(Outcome.FAILED)
    await operator.settle(2)
    assert counts(world) == (1, 1, 1)


async def test_a_slow_pod_that_was_drained_does_not_disrupt_the_next_attempt() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    slow = copied(world.pods(Role.TRAINER)[0])
    end = format_time(world.now + timedelta(seconds=600))
    slow["metadata"] |= {"deletionTimestamp": end, "name": "slow", "uid": "slow"}
    slow["status"]["conditions"].append(TARGET)
    world.objects["Pod", "slow"] = slow
    await operator.reconcile()
    world.end_driver(Outcome.FAILED)
    await operator.reconcile()
    assert counts(world) == (0, 1, 1)


async def test_a_disruption_that_is_taken_back_hides_no_later_failure() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    (pod,) = world.pods(Role.TRAINER)
    pod["status"]["conditions"].append(dict(TARGET))
    await operator.settle(2)
    assert world.status.job is not None
    assert "was disrupted" in world.status.job.disruption
    pod["status"]["conditions"][-1]["status"] = "False"
    await operator.settle(2)
    assert world.status.job is not None
    assert world.status.job.disruption == ""
    world.end_driver(Outcome.FAILED)
    await operator.settle(2)
    assert counts(world) == (0, 1, 1)


async def test_a_head_that_hangs_on_a_node_that_answers_is_a_failure() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.reporter_down = world.ray_down = True
    (head,) = world.pods(Role.DRIVER)
    world._set_ready(head, False)
    for _ in range(60):
        await operator.reconcile()
        world.now += timedelta(seconds=5)
    assert counts(world) == (0, 1, 1)


@pytest.mark.parametrize("role", [Role.DRIVER, Role.TRAINER])
async def test_a_pod_beyond_its_own_limits_is_a_failure_although_it_is_replaced(role: Role) -> None:
    operator = a_run(maxRestarts=2)
    world = operator.world
    await training(operator, step=0)
    for _ in range(3):
        (pod,) = world.pods(role)
        pod["status"] |= {
            "phase": "Failed",
            "reason": "Evicted",
            "message": "Pod ephemeral local storage usage exceeds the total limit of containers.",
            "conditions": [],
        }
        await operator.reconcile()
        world.delete_pod(role)
        world.now += timedelta(seconds=5)
        world.make_pods()
        await operator.reconcile()
        world.end_driver(Outcome.FAILED)
        await pass_time(operator, 60)
        world.drive(0)
        await operator.settle(2)
    assert phase_of(world) is Phase.FAILED
    assert world.status.disruptions == 0


async def test_a_node_that_reboots_under_the_head_is_a_disruption() -> None:
    """Its containers start again in the same pods."""
    operator = a_run()
    world = operator.world
    await training(operator)
    world.lose_node(Role.DRIVER)
    await pass_time(operator, 60)
    world.nodes_return()
    await pass_time(operator, 60)
    assert [job.attempt for job in world.jobs] == [1, 2]
    assert counts(world) == (1, 0, 0)
    (event,) = [event for event in world.events if event.reason == "Disrupted"]
    assert "which no longer answered" in event.message
    assert "ClusterLost" not in happened(world)


async def test_a_reboot_too_short_for_kubernetes_to_notice_is_a_disruption_too() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    ended = {"reason": "Unknown", "exitCode": 255}
    world.restart_head_container()
    (head,) = world.pods(Role.DRIVER)
    head["status"]["containerStatuses"][0]["lastState"] = {"terminated": ended}
    await pass_time(operator, 60)
    assert counts(world) == (1, 0, 0)
    world.drive(1)
    await operator.settle(2)
    world.end_driver(None)
    await operator.settle(2)
    assert counts(world) == (1, 1, 1), "what the kubelet remembers is of an earlier attempt"


async def test_a_trainers_node_that_no_longer_answers_disrupts_an_attempt_that_fails() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.lose_node(Role.TRAINER)
    await operator.settle(2)
    world.end_driver(Outcome.FAILED)
    await operator.settle(2)
    assert counts(world) == (1, 0, 0)


async def test_a_node_that_answers_again_in_time_hides_no_later_failure() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.lose_node(Role.TRAINER, partition=True)
    await operator.settle(2)
    world.nodes_return()
    world.drive(2)
    await operator.settle(2)
    world.end_driver(Outcome.FAILED)
    await operator.settle(2)
    assert counts(world) == (0, 1, 1)


# -- a RayCluster that others suspend --------------------------------------------------------------


def suspend_cluster(world: World) -> None:
    """A queue suspends the RayCluster, and KubeRay deletes its pods."""
    cluster = world.objects["RayCluster", NAME]
    cluster["spec"]["suspend"] = True
    for pod in list(world.pods()):
        del world.objects["Pod", pod["metadata"]["name"]]


async def wait_suspended(operator: Operator, seconds: int) -> None:
    for _ in range(seconds // 10):
        await operator.reconcile()
        operator.world.now += timedelta(seconds=10)


async def test_a_run_in_a_queue_keeps_its_place_and_says_that_it_waits() -> None:
    operator = a_run(startupDeadlineSeconds=60)
    world = operator.world
    await operator.settle(1)
    uid = world.objects["RayCluster", NAME]["metadata"]["uid"]
    suspend_cluster(world)
    await wait_suspended(operator, 3 * 3600)
    assert world.objects["RayCluster", NAME]["metadata"]["uid"] == uid
    assert phase_of(world) is Phase.SUSPENDED
    held = condition(world, ConditionType.SUSPENDED)
    assert (held.status, held.reason) == ("True", "ClusterSuspended")
    assert "another controller has suspended RayCluster lake" in (world.status.message or "")
    provisioned = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert (provisioned.status, provisioned.reason) == ("False", "ClusterSuspended")
    assert "StartupDeadlineExceeded" not in happened(world)
    world.objects["RayCluster", NAME]["spec"]["suspend"] = False
    await operator.settle()
    assert [job.attempt for job in world.jobs] == [1]
    assert phase_of(world) is not Phase.SUSPENDED
    assert counts(world) == (0, 0, 0)


async def test_a_preemption_by_a_queue_is_no_failure_and_the_run_resumes_when_it_is_released() -> (
    None
):
    operator = a_run(startupDeadlineSeconds=60)
    world = operator.world
    await training(operator, step=0, checkpoint=checkpoint(world, 0))
    for _ in range(5):
        suspend_cluster(world)
        await wait_suspended(operator, 600)
        assert phase_of(world) is Phase.SUSPENDED
        assert "resumes from the checkpoint of step 0" in (world.status.message or "")
        world.objects["RayCluster", NAME]["spec"]["suspend"] = False
        await pass_time(operator, 60)
        world.drive(0)
        await operator.settle(2)
        assert phase_of(world) is Phase.RUNNING
        assert counts(world) == (0, 0, 0)
    assert [job.attempt for job in world.jobs] == [1, 2, 3, 4, 5, 6]


async def test_the_driver_of_a_suspended_cluster_is_asked_to_stop_while_its_head_answers() -> None:
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 1))
    world.objects["RayCluster", NAME]["spec"]["suspend"] = True
    await operator.reconcile()
    assert world.stop_requests == 1
    assert phase_of(world) is Phase.SUSPENDING
    world.end_driver(Outcome.STOPPED)
    suspend_cluster(world)
    await wait_suspended(operator, 30)
    assert phase_of(world) is Phase.SUSPENDED


async def test_a_queue_uses_up_none_of_the_disruptions_that_a_run_may_have() -> None:
    operator = a_run(maxDisruptions=1)
    world = operator.world
    await training(operator)
    for _ in range(3):
        suspend_cluster(world)
        await wait_suspended(operator, 60)
        world.objects["RayCluster", NAME]["spec"]["suspend"] = False
        await pass_time(operator, 60)
        world.drive(1)
        await operator.settle(1)
    for drained in (1, 2):
        world.delete_pod(Role.DRIVER)
        await pass_time(operator, 60)
        world.drive(1)
        await operator.settle(1)
        assert world.status.disruptions == 1
        assert (phase_of(world) is Phase.FAILED) is (drained == 2)
    assert condition(world, ConditionType.FAILED).reason == "DisruptionsExhausted"


async def test_the_user_may_suspend_a_run_whose_cluster_is_suspended() -> None:
    operator = a_run()
    world = operator.world
    await operator.settle(1)
    suspend_cluster(world)
    await wait_suspended(operator, 60)
    world.change_run(("suspend", True))
    await wait_suspended(operator, 60)
    assert ("RayCluster", NAME) not in world.objects
    assert condition(world, ConditionType.SUSPENDED).reason == "Suspended"


# -- a restart waits only for the pods that training needs -----------------------------------------


class OneEnvShort(World):
    """A cluster without room for the last env pod."""

    short = False

    def _cannot_be_placed(self, pod: Manifest, placed: int) -> str | None:
        placed_env = sum("nodeName" in item["spec"] for item in self.pods(Role.ENV))
        is_env = pod["metadata"]["labels"]["agenticrun.dev/role"] == "env"
        if self.short and is_env and placed_env >= 3:
            return "0/40 nodes are available: 40 Insufficient cpu."
        return super()._cannot_be_placed(pod, placed)


async def test_a_restart_does_not_wait_for_an_env_pod_that_cannot_be_placed() -> None:
    world = OneEnvShort()
    world.apply_run(("spec.roles.env.replicas", 4))
    operator = Operator(world)
    await training(operator)
    world.delete_pod(Role.ENV)
    world.short = True
    await pass_time(operator, 30)
    world.end_driver(None)
    await pass_time(operator, 60)
    assert [job.attempt for job in world.jobs] == [1, 2]
    ready = condition(world, ConditionType.ROLES_READY)
    assert (ready.status, ready.reason) == ("False", "Unschedulable")


@pytest.mark.parametrize(("least", "waits"), [(None, 300), (3, 300), (4, None)])
async def test_the_first_attempt_waits_for_all_pods_for_a_while(
    least: int | None, waits: int | None
) -> None:
    world = OneEnvShort()
    world.short = True
    world.apply_run(("spec.roles.env", {"replicas": 4, "minReplicas": least}))
    operator = Operator(world)
    await pass_time(operator, 280)
    assert world.jobs == []
    await pass_time(operator, 60)
    assert bool(world.jobs) is (waits is not None)


async def test_a_startup_deadline_before_the_end_of_the_wait_ends_the_wait() -> None:
    world = OneEnvShort()
    world.short = True
    policy = {"startupDeadlineSeconds": 120, "waitSeconds": 300}
    world.apply_run(("spec.roles.env.replicas", 4), ("spec.failurePolicy", policy))
    operator = Operator(world)
    await pass_time(operator, 180)
    assert [job.attempt for job in world.jobs] == [1]
    assert "StartupDeadlineExceeded" not in happened(world)


async def test_a_deterministic_run_needs_all_its_pods() -> None:
    world = OneEnvShort()
    world.short = True
    world.apply_run(("spec.roles.env.replicas", 4), ("spec.pipeline.deterministic", True))
    operator = Operator(world)
    await pass_time(operator, 600)
    assert world.jobs == []


# -- what others write -----------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
async def test_an_end_that_someone_else_wrote_is_repaired(phase: str) -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.run["status"] |= {"phase": phase, "message": "by hand"}
    world.run["metadata"]["resourceVersion"] = "by hand"
    world.drive(2)
    await operator.settle(2)
    assert (world.status.phase, world.status.step) == (Phase.RUNNING, 2)
    assert happened(world).count("StatusRepaired") == 1
    assert world.live_jobs()
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(3)
    assert phase_of(world) is Phase.SUCCEEDED
    assert ("RayCluster", NAME) not in world.objects


async def test_words_that_change_each_second_are_not_written_each_second() -> None:
    operator = a_run()
    world = operator.world
    world.make_pods(ready=False)
    await operator.reconcile()
    world.make_pods(ready=False)
    await operator.reconcile()
    writes, events = world.status_writes, len(world.events)
    for second in range(60):
        for pod in world.pods():
            pod["spec"].pop("nodeName", None)
            words = f"0/5123 nodes are available: {1000 + second} Insufficient nvidia.com/gpu"
            pod["status"] = {
                "conditions": [{"type": "PodScheduled", "status": "False", "message": words}]
            }
        world.now += timedelta(seconds=1)
        await operator.reconcile()
    assert world.status_writes - writes <= 8
    assert len(world.events) - events <= 1
    assert "Insufficient nvidia.com/gpu" in (world.status.message or "")


@pytest.mark.parametrize(("role", "number"), [("env", 3), ("trainer", 0)])
async def test_a_raycluster_that_someone_edits_is_put_back_and_the_client_named(
    role: str, number: int
) -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    cluster = world.objects["RayCluster", NAME]
    for group in cluster["spec"]["workerGroupSpecs"]:
        if group["groupName"] == role:
            group |= {"replicas": number, "minReplicas": number, "maxReplicas": number}
    await operator.settle(3)
    groups = world.objects["RayCluster", NAME]["spec"]["workerGroupSpecs"]
    assert {group["replicas"] for group in groups} == {1}
    (event,) = [event for event in world.events if event.reason == "ClusterRepaired"]
    assert f"replicas of worker group {role} is {number} instead of 1" in event.message
    assert "The operator puts it back" in event.message


async def test_a_client_that_keeps_editing_the_raycluster_is_answered_every_half_minute() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    for _ in range(60):
        world.objects["RayCluster", NAME]["spec"]["workerGroupSpecs"][-1]["maxReplicas"] = 9
        await operator.settle(1)
    assert 2 <= happened(world).count("ClusterRepaired") <= 3


async def test_a_raycluster_without_its_owner_gets_it_back_and_trains_on() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    del world.objects["RayCluster", NAME]["metadata"]["ownerReferences"]
    world.objects["RayCluster", NAME]["metadata"]["resourceVersion"] = "edited"
    await operator.settle(3)
    owners = world.objects["RayCluster", NAME]["metadata"]["ownerReferences"]
    assert owners[0]["uid"] == world.run["metadata"]["uid"]
    assert phase_of(world) is Phase.RUNNING
    assert [job.attempt for job in world.jobs] == [1]
    assert "NameConflict" not in happened(world)


async def test_a_head_without_its_label_is_no_lost_head() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    (head,) = world.pods(Role.DRIVER)
    del head["metadata"]["labels"]["agenticrun.dev/run"]
    head["metadata"]["resourceVersion"] = "edited"
    world.objects["RayCluster", NAME]["status"] = {
        "head": {"podName": head["metadata"]["name"], "podIP": head["status"]["podIP"]}
    }
    world.drive(2)
    await operator.settle(1)
    assert (phase_of(world), world.status.step) == (Phase.RUNNING, 2)
    assert counts(world) == (0, 0, 0)
    ready = condition(world, ConditionType.ROLES_READY)
    assert (ready.status, ready.reason) == ("True", "LabelsMissing")
    assert f"kubectl label pod {head['metadata']['name']} agenticrun.dev/run=lake" in ready.message


async def test_pods_that_a_deleted_raycluster_leaves_behind_are_deleted() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    left = world.pods()
    for pod in left:
        pod["metadata"]["ownerReferences"] = []
        pod["metadata"]["labels"] |= {"ray.io/cluster": NAME}
    world.delete_cluster()  # kubectl delete raycluster --cascade=orphan
    world.now += timedelta(seconds=5)
    await pass_time(operator, 90)
    names = {pod["metadata"]["name"] for pod in left}
    assert not names & {name for kind, name in world.objects if kind == "Pod"}
    assert [job.attempt for job in world.jobs] == [1, 2]
    assert counts(world) == (1, 0, 0)


async def test_a_second_pod_that_claims_to_be_the_head_costs_no_attempt() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.objects["RayCluster", NAME]["status"] = {}
    (head,) = world.pods(Role.DRIVER)
    forged = copied(head)
    forged["metadata"] |= {"name": "aaa-evil", "uid": "evil", "resourceVersion": "1"}
    world.objects["Pod", "aaa-evil"] = forged
    for _ in range(20):
        world.drive(2)
        await operator.reconcile()
        world.now += timedelta(seconds=10)
    assert counts(world) == (0, 0, 0)
    assert phase_of(world) is Phase.RUNNING
    del world.objects["Pod", "aaa-evil"]
    world.drive(3)
    await operator.settle(2)
    assert (world.status.step, [job.attempt for job in world.jobs]) == (3, [1])
