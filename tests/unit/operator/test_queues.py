"""spec.queue: pods exist only while Kueue admits the run, and quota outlives the last pod."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from agenticrun_api import ConditionType, Outcome, Phase, PoolStatus, Role
from agenticrun_api.names import KIND, LABEL_ROLE
from agenticrun_api.status import CheckpointStatus
from agenticrun_api.version import __version__
from agenticrun_operator.errors import Denied, KubeUnavailable, RightMissing
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import Manifest, workloads
from fake_kueue import NO_QUOTA, PREEMPTED, FakeKueue
from operator_world import NAME, Gpus, Operator, World, condition, happened, training

QUEUE = {"name": "research", "preemption": {"graceSeconds": 120}}


def a_run(
    *changes: tuple[str, Any], free: bool = True, queue: Any = QUEUE, world: type[World] = World
) -> Operator:
    """Return an operator on a run in a queue, which saves checkpoints on a claim."""
    there = world(kueue=FakeKueue(free=free))
    there.apply_run(
        ("spec.queue", queue),
        ("spec.roles.trainer", {"gpus": 1}),
        ("spec.checkpoint", {"volumeClaim": {"size": "1Gi"}}),
        ("spec.failurePolicy", {"maxRestarts": 2, "backoffSeconds": 10}),
        *changes,
    )
    return Operator(there)


def kueue(world: World) -> FakeKueue:
    assert world.kueue is not None
    return world.kueue


def workload(world: World) -> Manifest:
    found = world.workload
    assert found is not None
    return found


def evict(world: World, *words: str) -> None:
    kueue(world).evict(workload(world), world.now, *words)


def said(world: World, kind: str) -> tuple[str, str]:
    """Return status and reason of a condition of the Workload."""
    found = workloads.condition_of(workload(world), kind)
    return found.get("status", ""), found.get("reason", "")


def queued(world: World) -> tuple[str, str, str]:
    """Return the phase, and status and reason of the condition Queued."""
    found = condition(world, ConditionType.QUEUED)
    return world.status.phase.value, found.status, found.reason


def checkpoint(world: World, step: int) -> CheckpointStatus:
    return CheckpointStatus(step=step, uri=f"/checkpoints/{step}", time=format_time(world.now))


def driver_stops(world: World, saved: int) -> None:
    assert world.stop_requests, "no one has asked it"
    world.drive(saved, checkpoint=checkpoint(world, saved))
    world.end_driver(Outcome.STOPPED)


def holds_nothing(world: World) -> bool:
    return not world.pods() and ("RayCluster", NAME) not in world.objects


class RoomForOneEnvPod(World):
    def _cannot_be_placed(self, pod: Manifest, placed: int) -> str | None:
        full = any("nodeName" in item["spec"] for item in self.pods(Role.ENV))
        if full and pod["metadata"]["labels"][LABEL_ROLE] == Role.ENV.value:
            return "0/1 nodes are available: 1 Insufficient cpu."
        return super()._cannot_be_placed(pod, placed)


def follows(env: int) -> dict[str, Any]:
    """Return what a driver reports that has this number of env pods and can change it."""
    pool = PoolStatus(replicas=env, serving=env)
    one = PoolStatus(replicas=1, serving=1)
    return {"pools": {Role.ENV: pool, Role.INFERENCE: one}, "version": __version__}


@pytest.fixture
async def three_env_pods() -> Operator:
    """An operator on a run that trains with three env pods, and whose driver can change that."""
    operator = a_run(("spec.roles.env", {"replicas": 3}))
    await training(operator, checkpoint=checkpoint(operator.world, 1), **follows(3))
    return operator


async def pass_time(operator: Operator, seconds: int, step: int = 5) -> None:
    for _ in range(seconds // step):
        operator.world.make_pods()
        await operator.reconcile()
        operator.world.now += timedelta(seconds=step)


# -- wait and start --------------------------------------------------------------------------------


async def test_a_run_waits_in_its_queue_with_kueues_words_and_trains_when_it_is_admitted() -> None:
    operator = a_run(free=False)
    world = operator.world
    await pass_time(operator, 20)
    assert queued(world) == ("Queued", "True", "Queued")
    assert world.status.message == f"queue research: {NO_QUOTA}"
    assert {kind for kind, _ in world.objects} == {KIND, "Workload"}
    assert condition(world, ConditionType.PROGRESSING).status == "True"
    assert world.status.start_time is None
    kueue(world).free = True
    await operator.settle()
    assert [job.attempt for job in world.jobs] == [1]
    world.drive(1)
    await operator.settle(2)
    assert queued(world) == ("Running", "False", "Admitted")
    assert happened(world)[:2] == ["Queued", "Admitted"]
    assert "Resumed" not in happened(world)
    assert world.quota_faults == []


async def test_a_run_that_waits_writes_nothing_and_reads_little() -> None:
    operator = a_run(free=False)
    world = operator.world
    await pass_time(operator, 20)
    writes = world.status_writes
    world.requests.clear()
    await pass_time(operator, 600, 30)
    assert world.status_writes == writes
    assert not [request for request in world.requests if "Workload" in request]


async def test_a_run_that_waits_shows_its_position_while_kueue_says_it() -> None:
    operator = a_run(free=False)
    world = operator.world
    await pass_time(operator, 10)
    name = workload(world)["metadata"]["name"]
    for position in (12, 11):
        kueue(world).positions = {"of-another-run": 1, name: position}
        await pass_time(operator, 60)
        assert world.status.message == f"queue research, position {position}: {NO_QUOTA}"
    assert happened(world).count("Queued") == 1, "another position is no event"
    kueue(world).positions = None
    await pass_time(operator, 60)
    assert world.status.message == f"queue research: {NO_QUOTA}"


async def test_a_run_that_could_never_be_admitted_has_no_position() -> None:
    operator = a_run(free=False)
    world = operator.world
    kueue(world).refusal = ("ExceedsMaxQuota", "the run is larger than the ClusterQueue")
    await pass_time(operator, 10)
    kueue(world).positions = {workload(world)["metadata"]["name"]: 1}
    await pass_time(operator, 60)
    assert "position" not in (world.status.message or "")


async def test_positions_are_asked_for_once_in_20_seconds_at_most() -> None:
    """Events of the run's Workload lead to looks in between."""
    operator = a_run(free=False)
    world = operator.world
    await pass_time(operator, 10)
    for served in ({workload(world)["metadata"]["name"]: 2}, None):
        kueue(world).positions = served
        await pass_time(operator, 60)
        world.requests.clear()
        await pass_time(operator, 120, step=1)
        assert 3 <= world.requests.count("get positions") <= 7


class SilentPositions(World):
    async def queue_positions(self, namespace: str, queue: str) -> dict[str, int]:
        await asyncio.Event().wait()
        raise AssertionError


async def test_no_look_waits_for_positions() -> None:
    operator = a_run(free=False, world=SilentPositions)
    async with asyncio.timeout(20):
        await pass_time(operator, 120)
    assert operator.world.status.message == f"queue research: {NO_QUOTA}"
    kueue(operator.world).free = True
    await operator.settle()
    assert operator.world.jobs
    await operator.reconciler.stop()


async def test_flavors_decide_where_the_pods_go() -> None:
    operator = a_run()
    await operator.settle()
    cluster = operator.world.objects["RayCluster", NAME]["spec"]
    pods = {group["groupName"]: group["template"]["spec"] for group in cluster["workerGroupSpecs"]}
    assert pods["trainer"]["nodeSelector"]["pool"] == "a100"
    assert {"key": "gpu", "operator": "Exists"} in pods["trainer"]["tolerations"]
    assert "pool" not in pods["env"]["nodeSelector"]
    labels = operator.world.objects["RayCluster", NAME]["metadata"]["labels"]
    assert not [label for label in labels if "kueue" in label]


RACK = "example.com/rack"
GATED = [{"name": "kueue.x-k8s.io/topology"}]


def for_kueue(template: Manifest) -> dict[str, str]:
    """Return the metadata of a pod by which Kueue finds it."""
    metadata = template["metadata"]
    found = metadata.get("annotations", {}) | metadata["labels"]
    return {
        key.removeprefix("kueue.x-k8s.io/"): value for key, value in found.items() if "kueue" in key
    }


def templates(world: World) -> dict[str, Manifest]:
    """Return the pod template of each role in the RayCluster."""
    spec = world.objects["RayCluster", NAME]["spec"]
    workers = {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
    return workers | {"driver": spec["headGroupSpec"]["template"]}


@pytest.mark.parametrize("kind", ["required", "preferred"])
async def test_kueue_gives_the_pods_of_a_role_with_a_topology_their_nodes(kind: str) -> None:
    operator = a_run(
        ("spec.roles.trainer", {"replicas": 2, "topology": {kind: RACK}}),
        ("spec.checkpoint", {"uri": "s3://bucket/prefix"}),
    )
    world = operator.world
    kueue(world).has_topology = True
    await operator.settle()
    asked = {
        item["name"]: item.get("topologyRequest") for item in workload(world)["spec"]["podSets"]
    }
    assert {role for role, request in asked.items() if request} == {"trainer"}
    assert asked["trainer"] == {kind: RACK}
    made, name = templates(world), workload(world)["metadata"]["name"]
    assert {role: pod["spec"]["schedulingGates"] for role, pod in made.items()} == dict.fromkeys(
        ("driver", "trainer", "inference", "env"), GATED
    )
    assert for_kueue(made["trainer"]) == {
        "podset": "trainer",
        "workload": name,
        f"podset-{kind}-topology": RACK,
    }
    assert for_kueue(made["env"]) == {
        "podset": "env",
        "workload": name,
        "podset-unconstrained-topology": "true",
    }


async def test_a_volume_of_one_node_chooses_the_node_of_the_pods_that_save() -> None:
    """Kueue does not know the volume: on the nodes that it chooses, they could not start."""
    operator = a_run(("spec.roles.inference", {"replicas": 2, "topology": {"required": RACK}}))
    world = operator.world
    kueue(world).has_topology = True
    await operator.settle()
    gated = {role for role, pod in templates(world).items() if "schedulingGates" in pod["spec"]}
    assert gated == {"inference", "env"}
    assert not for_kueue(templates(world)["trainer"])


async def test_a_claim_of_one_node_and_a_topology_of_the_trainers_exclude_each_other() -> None:
    operator = a_run(
        ("spec.roles.trainer", {"replicas": 2, "topology": {"required": RACK}}),
        ("spec.checkpoint", {"volumeClaim": {"claimName": "mine"}}),
    )
    world = operator.world
    world.add_claim("mine")
    await operator.settle()
    assert world.status.phase is Phase.PENDING
    assert "without topology of roles trainer" in (world.status.message or "")
    assert world.workload is None


async def test_pods_get_no_gate_from_a_kueue_without_a_topology() -> None:
    operator = a_run()
    await operator.settle()
    made = templates(operator.world)
    assert not [pod for pod in made.values() if "schedulingGates" in pod["spec"] or for_kueue(pod)]


async def test_a_flavor_that_does_not_exist_is_named() -> None:
    operator = a_run()
    world = operator.world
    del kueue(world).objects["ResourceFlavor", "a100"]
    await operator.settle()
    assert "ResourceFlavor a100" in (world.status.message or "")
    assert holds_nothing(world)


async def test_the_workload_asks_for_what_the_pods_request() -> None:
    operator = a_run(queue=QUEUE | {"priorityClass": "urgent"})
    world = operator.world
    await operator.settle()
    spec, owners = workload(world)["spec"], workload(world)["metadata"]["ownerReferences"]
    assert [(owner["kind"], owner["controller"]) for owner in owners] == [(KIND, True)]
    assert spec["queueName"] == "research"
    assert (spec["priorityClassRef"]["name"], spec["priority"]) == ("urgent", 1000)
    asked = {item["name"]: item for item in spec["podSets"]}
    cluster = world.objects["RayCluster", NAME]["spec"]
    made = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert asked.keys() == {"driver", *made}
    for role, group in made.items():
        assert asked[role]["count"] == group["replicas"]
        containers = asked[role]["template"]["spec"]["containers"]
        ours = group["template"]["spec"]["containers"]
        assert [item["resources"] for item in containers] == [item["resources"] for item in ours]
        assert not [item for item in containers if "env" in item], "users of Kueue may read it"
    reporter = asked["driver"]["template"]["spec"]["initContainers"][0]
    assert (reporter["name"], reporter["restartPolicy"]) == ("reporter", "Always")


async def test_an_admission_check_that_is_open_is_shown() -> None:
    operator = a_run()
    world = operator.world
    check = {"name": "provision", "state": "Pending", "message": "nodes are ordered"}
    kueue(world).checks = [check]
    await pass_time(operator, 20)
    assert queued(world) == ("Queued", "True", "Queued")
    assert "admission check provision is Pending (nodes are ordered)" in (
        world.status.message or ""
    )
    assert holds_nothing(world)
    update = {"name": "trainer", "annotations": {"booked": "yes"}, "nodeSelector": {"new": "yes"}}
    kueue(world).checks = [check | {"state": "Ready", "podSetUpdates": [update]}]
    await operator.settle()
    (trainer, *_) = world.objects["RayCluster", NAME]["spec"]["workerGroupSpecs"]
    assert trainer["template"]["metadata"]["annotations"]["booked"] == "yes"
    selector = trainer["template"]["spec"]["nodeSelector"]
    assert (selector["pool"], selector["new"]) == ("a100", "yes")


async def test_kueue_learns_once_that_the_pods_are_ready() -> None:
    operator = a_run()
    await training(operator)
    assert said(operator.world, "PodsReady") == ("True", "Started")
    await operator.settle(5)
    assert operator.world.requests.count("put status of Workload") == 1


# -- whose move it is ------------------------------------------------------------------------------


async def test_without_kueue_the_run_is_pending_until_it_is_installed() -> None:
    operator = a_run()
    world = operator.world
    world.kueue = None
    await operator.settle()
    assert queued(world) == ("Pending", "True", "KueueMissing")
    assert "an administrator must install Kueue" in (world.status.message or "")
    assert condition(world, ConditionType.PROGRESSING).status == "False"
    assert set(world.objects) == {(KIND, NAME)}
    world.kueue = FakeKueue()
    await pass_time(operator, 60)
    assert [job.attempt for job in world.jobs] == [1]


async def test_a_run_that_trains_when_kueue_vanishes_trains_on() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.kueue = None
    await pass_time(operator, 300, 30)
    assert world.status.phase is Phase.RUNNING
    assert len(world.live_jobs()) == 1


async def test_an_operator_without_the_right_to_read_workloads_says_so() -> None:
    operator = a_run()
    world = operator.world
    world.kueue_denied = RightMissing('User "operator" cannot get resource "workloads"')
    await operator.settle()
    assert world.status.phase is Phase.PENDING
    assert "cannot get resource" in (world.status.message or "")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Inadmissible", "LocalQueue research doesn't exist"),
        ("Pending", "insufficient quota for cpu in flavor cheap, request > maximum capacity (1)"),
        ("ExceedsMaxQuota", "the run is larger than the ClusterQueue"),
    ],
)
async def test_what_no_other_run_can_free_needs_a_user(reason: str, words: str) -> None:
    operator = a_run(free=False)
    world = operator.world
    kueue(world).refusal = (reason, words)
    await operator.settle()
    assert queued(world) == ("Queued", "True", "Inadmissible")
    assert words in (world.status.message or "")
    assert "ask its administrator" in (world.status.message or "")
    assert condition(world, ConditionType.PROGRESSING).status == "False"
    assert [event.type for event in world.events if event.reason == "Inadmissible"] == ["Warning"]


async def test_a_priority_class_that_does_not_exist_is_named() -> None:
    operator = a_run(queue=QUEUE | {"priorityClass": "no-such"})
    world = operator.world
    await operator.settle()
    assert world.status.phase is Phase.PENDING
    assert "WorkloadPriorityClass no-such does not exist" in (world.status.message or "")
    assert world.workload is None


async def test_a_kueue_that_does_not_answer_is_named() -> None:
    operator = a_run()
    world = operator.world
    kueue(world).works = False
    await pass_time(operator, 60)
    assert "its controller may be stopped" in (world.status.message or "")


async def test_a_run_that_could_not_start_takes_no_quota() -> None:
    operator = a_run(("spec.pipeline.actorInfer", {"strategy": {"name": "vllm"}}))
    world = operator.world
    await operator.settle()
    assert world.status.phase is Phase.PENDING
    assert "no worker image with vllm" in (world.status.message or "")
    assert world.workload is None


async def test_a_workload_that_kueue_refuses_is_shown() -> None:
    operator = a_run()
    world = operator.world
    world.create_errors["Workload"] = Denied("admission webhook denied the request: no")
    await operator.settle()
    assert world.status.phase is Phase.PENDING
    assert "denied the request" in (world.status.message or "")
    world.create_errors.clear()
    await pass_time(operator, 60)
    assert [job.attempt for job in world.jobs] == [1]


# -- eviction --------------------------------------------------------------------------------------


async def test_an_evicted_run_saves_gives_back_its_pods_then_its_quota_and_resumes() -> None:
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 0))
    place = workload(world)["metadata"]["uid"]
    evict(world)
    await operator.settle(3)
    assert world.status.phase is Phase.SUSPENDING
    assert PREEMPTED in (world.status.message or "")
    assert len(world.live_jobs()) == 1, "it is saving"
    assert said(world, "QuotaReserved")[0] == "True", "its pods are there"
    driver_stops(world, saved=1)
    await operator.settle(3)
    assert holds_nothing(world)
    assert said(world, "QuotaReserved")[0] == said(world, "Admitted")[0] == "False"
    assert said(world, "Requeued") == ("True", "Preempted")
    assert "admission" not in workload(world)["status"]
    assert workload(world)["metadata"]["uid"] == place, "it keeps its place"
    await operator.settle(2)
    assert queued(world) == ("Queued", "True", "Queued")
    assert "resumes from the checkpoint of step 1" in (world.status.message or "")
    kueue(world).free = True
    await operator.settle()
    assert [job.attempt for job in world.jobs] == [1, 2]
    world.drive(1, checkpoint=checkpoint(world, 1))
    await operator.settle(2)
    status = world.status
    assert (status.phase, status.step, status.disruptions) == (Phase.RUNNING, 1, 1)
    assert (status.restarts, status.failures_without_progress) == (0, 0)
    assert happened(world).count("Evicted") == 1
    assert world.quota_faults == []


@pytest.mark.parametrize("grace", [0, 120])
async def test_a_driver_that_does_not_stop_keeps_the_quota_no_longer_than_its_grace(
    grace: int,
) -> None:
    operator = a_run(queue={"name": "research", "preemption": {"graceSeconds": grace}})
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 1))
    evict(world)
    await operator.reconcile()
    if grace:
        await pass_time(operator, grace - 10)
        assert ("RayCluster", NAME) in world.objects
    await pass_time(operator, 30)
    assert holds_nothing(world)
    assert said(world, "QuotaReserved")[0] == "False"


async def test_a_pod_on_a_lost_node_keeps_the_quota() -> None:
    operator = a_run(("spec.roles.env", {"replicas": 2}))
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 1))
    world.lose_node(Role.ENV, partition=True)
    evict(world)
    await operator.settle(2)
    driver_stops(world, saved=1)
    await operator.settle(4)
    assert world.pods(Role.ENV)
    assert said(world, "QuotaReserved")[0] == "True"
    world.nodes_return()
    world.collect_garbage()
    await pass_time(operator, 30)
    assert holds_nothing(world)
    assert said(world, "QuotaReserved")[0] == "False"
    assert world.quota_faults == []


async def test_a_run_that_is_evicted_while_it_starts_gives_everything_back_at_once() -> None:
    operator = a_run()
    world = operator.world
    await pass_time(operator, 10)
    world.gpus = Gpus(0, [world])
    evict(world)
    await pass_time(operator, 20)
    assert holds_nothing(world)
    assert said(world, "QuotaReserved")[0] == "False"
    assert world.status.disruptions == len(world.jobs)


@pytest.mark.parametrize(
    "when", [0, 1, 2, "wrote status", "delete RayCluster", "deleted", "put status of Workload"]
)
async def test_a_crash_of_the_operator_neither_leaks_nor_loses_quota(when: int | str) -> None:
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 1))
    evict(world)
    await operator.settle(2)
    driver_stops(world, saved=1)
    world.interruption = (when, world.crash)
    await operator.settle(6)
    assert operator.crashes == 1
    assert holds_nothing(world)
    assert said(world, "QuotaReserved")[0] == "False"
    assert world.status.disruptions == 1
    assert world.quota_faults == []


async def test_quota_that_cannot_be_given_back_is_shown_and_given_back_later() -> None:
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 1))
    evict(world)
    await operator.settle(2)
    driver_stops(world, saved=1)
    world.put_error = KubeUnavailable("the webhook of Kueue does not answer")
    await pass_time(operator, 20)
    assert holds_nothing(world)
    assert said(world, "QuotaReserved")[0] == "True"
    assert "the Workload cannot be changed: the webhook" in (world.status.message or "")
    world.put_error = None
    await pass_time(operator, 60)
    assert said(world, "QuotaReserved")[0] == "False"


async def test_a_workload_that_an_administrator_deletes_costs_no_step() -> None:
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 0))
    first = workload(world)["metadata"]
    del world.objects["Workload", first["name"]]
    await operator.settle(2)
    driver_stops(world, saved=1)
    await operator.settle(8)
    assert workload(world)["metadata"]["uid"] != first["uid"]
    assert [job.attempt for job in world.jobs] == [1, 2]


async def test_a_deactivated_run_is_suspended_until_it_is_activated_again() -> None:
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 1))
    workload(world)["spec"]["active"] = False
    await operator.settle(2)
    driver_stops(world, saved=1)
    await operator.settle(4)
    assert queued(world) == ("Suspended", "False", "Deactivated")
    assert condition(world, ConditionType.SUSPENDED).status == "True"
    assert "an administrator must set its spec.active to true" in (world.status.message or "")
    assert said(world, "QuotaReserved")[0] == "False"
    assert said(world, "Requeued") == ("False", "Deactivated")
    workload(world)["spec"]["active"] = True
    kueue(world).free = True
    await operator.settle()
    assert [job.attempt for job in world.jobs] == [1, 2]


# -- suspension, other pods, the end ---------------------------------------------------------------


async def test_a_suspended_run_leaves_the_queue_when_its_pods_are_gone() -> None:
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 1))
    place = workload(world)["metadata"]["uid"]
    world.change_run(("suspend", True))
    await operator.settle(2)
    assert said(world, "QuotaReserved")[0] == "True"
    driver_stops(world, saved=1)
    await operator.settle(4)
    assert world.status.phase is Phase.SUSPENDED
    assert world.workload is None
    assert condition(world, ConditionType.QUEUED).status == "False"
    kueue(world).free = False
    world.change_run(("suspend", False))
    await operator.settle()
    assert queued(world) == ("Queued", "True", "Queued")
    assert condition(world, ConditionType.SUSPENDED).status == "False"
    assert workload(world)["metadata"]["uid"] != place
    kueue(world).free = True
    await operator.settle()
    assert [job.attempt for job in world.jobs] == [1, 2]
    assert world.quota_faults == []


async def test_a_run_that_is_created_suspended_asks_for_no_quota() -> None:
    operator = a_run(("spec.suspend", True))
    await operator.settle()
    assert operator.world.status.phase is Phase.SUSPENDED
    assert operator.world.workload is None


async def test_pods_that_cannot_start_in_time_take_no_quota_while_the_run_waits() -> None:
    operator = a_run(("spec.failurePolicy", {"startupDeadlineSeconds": 60}))
    world = operator.world
    world.gpus = Gpus(0, [world])
    while world.status.startup_timeouts == 0:
        await pass_time(operator, 10)
    await pass_time(operator, 10)
    assert world.status.phase is Phase.PENDING
    assert holds_nothing(world)
    assert world.workload is None
    world.gpus = None
    await pass_time(operator, 120)
    assert [job.attempt for job in world.jobs] == [1]
    assert world.quota_faults == []


async def test_more_env_pods_than_were_admitted_go_through_the_queue() -> None:
    operator = a_run(("spec.roles.env", {"replicas": 1}))
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 1))
    world.change_run(("roles.env.replicas", 2))
    await operator.settle(2)
    assert len(world.pods(Role.ENV)) == 1, "the queue has admitted one"
    driver_stops(world, saved=1)
    await operator.settle(8)
    assert workloads.pod_counts(workload(world))["env"] == 2
    assert len(world.pods(Role.ENV)) == 2
    assert [job.attempt for job in world.jobs] == [1, 2]
    assert world.quota_faults == []


async def test_a_run_with_min_replicas_trains_with_the_pods_that_were_admitted() -> None:
    operator = a_run(("spec.roles.env", {"replicas": 4, "minReplicas": 2}), free=False)
    world = operator.world
    await pass_time(operator, 10)
    kueue(world).free, kueue(world).elastic_pods = True, 3
    await training(operator, checkpoint=checkpoint(world, 1))
    (asked,) = [item for item in workload(world)["spec"]["podSets"] if "minCount" in item]
    assert (asked["name"], asked["count"], asked["minCount"]) == ("env", 4, 2)
    assert len(world.pods(Role.ENV)) == 3
    assert [job.replicas["env"] for job in world.jobs] == [3]
    assert [role.desired for role in world.status.roles if role.name == "env"] == [3]
    assert "with 3 of 4 env pods" in condition(world, ConditionType.QUEUED).message
    await pass_time(operator, 120)
    assert (world.status.phase, world.stop_requests) == (Phase.RUNNING, 0)
    place = workload(world)["metadata"]["uid"]
    evict(world)
    await operator.settle(2)
    driver_stops(world, saved=1)
    await operator.settle(4)
    kueue(world).free, kueue(world).elastic_pods = True, 4
    await operator.settle(8)
    assert [job.replicas["env"] for job in world.jobs] == [3, 4]
    assert len(world.pods(Role.ENV)) == 4
    assert workload(world)["metadata"]["uid"] == place, "it keeps its place"
    assert world.quota_faults == []


@pytest.mark.parametrize(
    ("inference", "env", "fewest"),
    [
        ({"replicas": 4, "minReplicas": 2}, {"replicas": 4, "minReplicas": 1}, {"inference": 2}),
        ({"replicas": 4}, {"replicas": 4, "minReplicas": 1}, {"env": 1}),
        ({"replicas": 4}, {"replicas": 4, "minReplicas": 4}, {}),
        ({"replicas": 4}, {"replicas": 4}, {}),
    ],
)
async def test_only_one_role_may_have_fewer_pods_and_only_if_its_user_says_so(
    inference: dict[str, int], env: dict[str, int], fewest: dict[str, int]
) -> None:
    operator = a_run(("spec.roles.inference", inference), ("spec.roles.env", env))
    await operator.settle()
    asked = workload(operator.world)["spec"]["podSets"]
    assert {item["name"]: item["minCount"] for item in asked if "minCount" in item} == fewest


async def test_a_run_that_waits_is_admitted_with_the_min_replicas_that_its_user_adds() -> None:
    operator = a_run(("spec.roles.env", {"replicas": 4}), free=False)
    world = operator.world
    await operator.settle()
    kueue(world).elastic_pods = 2
    world.change_run(("roles.env.minReplicas", 2))
    await operator.settle()
    kueue(world).free = True
    await operator.settle(8)
    assert [job.replicas["env"] for job in world.jobs] == [2]
    assert world.quota_faults == []


async def test_a_run_is_not_admitted_again_with_fewer_pods_than_its_user_allows_now() -> None:
    operator = a_run(("spec.roles.env", {"replicas": 4, "minReplicas": 1}))
    world = operator.world
    kueue(world).elastic_pods = 2
    await training(operator, checkpoint=checkpoint(world, 1))
    world.change_run(("roles.env.minReplicas", 3))
    await operator.settle(3)
    assert (world.status.phase, world.stop_requests) == (Phase.RUNNING, 0)
    evict(world)
    await operator.settle(2)
    driver_stops(world, saved=1)
    await operator.settle(4)
    kueue(world).free = True
    await pass_time(operator, 60)
    assert queued(world) == ("Queued", "True", "Queued")
    assert holds_nothing(world)
    kueue(world).elastic_pods = 3
    await operator.settle(8)
    assert [job.replicas["env"] for job in world.jobs] == [2, 3]
    assert world.quota_faults == []


async def test_less_quota_than_min_replicas_admits_no_pods() -> None:
    operator = a_run(("spec.roles.env", {"replicas": 4, "minReplicas": 2}))
    world = operator.world
    kueue(world).elastic_pods = 1
    await pass_time(operator, 60)
    assert queued(world) == ("Queued", "True", "Queued")
    assert holds_nothing(world)


async def test_a_kueue_that_admits_no_parts_keeps_the_place_of_a_run_with_min_replicas() -> None:
    operator = a_run(("spec.roles.env", {"replicas": 4, "minReplicas": 2}), free=False)
    world = operator.world
    kueue(world).admits_parts = False
    await operator.settle()
    place = workload(world)["metadata"]["uid"]
    await pass_time(operator, 120)
    assert not [item for item in workload(world)["spec"]["podSets"] if "minCount" in item]
    assert workload(world)["metadata"]["uid"] == place


async def test_a_run_that_has_become_as_small_as_its_min_replicas_keeps_its_place() -> None:
    operator = a_run(("spec.roles.env", {"replicas": 3, "minReplicas": 2}))
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 1), **follows(3))
    place = workload(world)["metadata"]["uid"]
    world.change_run(("roles.env.replicas", 1), ("roles.env.minReplicas", 1))
    await operator.settle(2)
    world.drive(1, checkpoint=checkpoint(world, 1), **follows(1))
    await operator.settle(4)
    evict(world)
    await operator.settle(2)
    driver_stops(world, saved=1)
    await operator.settle(4)
    kueue(world).free = True
    await operator.settle(8)
    assert [job.replicas["env"] for job in world.jobs] == [3, 1]
    assert workload(world)["metadata"]["uid"] == place
    assert world.quota_faults == []


async def test_a_partly_admitted_run_that_wants_other_numbers() -> None:
    operator = a_run(("spec.roles.env", {"replicas": 4, "minReplicas": 1}))
    world = operator.world
    kueue(world).elastic_pods = 2
    await training(operator, checkpoint=checkpoint(world, 1), observed_generation=1)
    for number in (3, 4):  # the queue was asked for as many, and had not enough
        world.change_run(("roles.env.replicas", number))
        await operator.settle(3)
        assert len(world.pods(Role.ENV)) == 2
        assert world.stop_requests == 0
    assert [config.replicas[Role.ENV] for config in world.configs.values()] == [2]
    world.change_run(("roles.env.replicas", 5))
    kueue(world).elastic_pods = 5
    await operator.settle(2)
    driver_stops(world, saved=1)
    await operator.settle(10)
    assert len(world.pods(Role.ENV)) == 5
    assert world.quota_faults == []


async def test_fewer_pods_give_their_quota_back_when_they_are_gone(
    three_env_pods: Operator,
) -> None:
    operator, world = three_env_pods, three_env_pods.world
    place = workload(world)["metadata"]["uid"]
    world.change_run(("roles.env.replicas", 1))
    await operator.settle(2)
    assert workloads.admitted_pods(workload(world))["env"] == 3
    world.drive(1, checkpoint=checkpoint(world, 1), **follows(1))
    for _ in range(4):  # KubeRay does not come to it
        await operator.reconcile()
        world.now += timedelta(seconds=5)
    assert "Scaled" in happened(world)
    assert len(world.pods(Role.ENV)) == 3
    assert workloads.admitted_pods(workload(world))["env"] == 3, "the pods exist"
    await operator.settle(3)
    assert workload(world)["status"]["reclaimablePods"] == [{"name": "env", "count": 2}]
    assert workloads.admitted_pods(workload(world))["env"] == 1
    assert (world.status.phase, world.stop_requests) == (Phase.RUNNING, 0)
    evict(world)
    await operator.settle(2)
    driver_stops(world, saved=1)
    await operator.settle(4)
    kueue(world).free = True
    await operator.settle(8)
    assert [job.replicas["env"] for job in world.jobs] == [3, 1]
    assert workload(world)["metadata"]["uid"] == place, "it keeps its place"
    assert world.quota_faults == []


async def test_quota_that_was_given_back_is_asked_for_again(three_env_pods: Operator) -> None:
    operator, world = three_env_pods, three_env_pods.world
    world.change_run(("roles.env.replicas", 1))
    await operator.settle(1)
    world.drive(1, checkpoint=checkpoint(world, 1), **follows(1))
    await operator.settle(4)
    assert workloads.admitted_pods(workload(world))["env"] == 1
    world.change_run(("roles.env.replicas", 2))
    await operator.settle(2)
    assert len(world.pods(Role.ENV)) == 1
    driver_stops(world, saved=1)
    await operator.settle(10)
    assert workloads.pod_counts(workload(world))["env"] == 2
    assert [job.replicas["env"] for job in world.jobs] == [3, 2]
    assert world.quota_faults == []


async def test_pods_whose_quota_was_given_back_too_late_go_through_the_queue(
    three_env_pods: Operator,
) -> None:
    """The answer of Kueue's webhook was slow, and the user wanted the pods again before it."""
    operator, world = three_env_pods, three_env_pods.world
    workload(world)["status"]["reclaimablePods"] = [{"name": "env", "count": 2}]
    await operator.settle(2)
    found = condition(world, ConditionType.SUSPENDED)
    assert "roles.env has 3 pods (queue research has admitted 1)" in found.message
    driver_stops(world, saved=1)
    await operator.settle(10)
    assert workloads.admitted_pods(workload(world))["env"] == 3
    assert [job.replicas["env"] for job in world.jobs] == [3, 3]
    assert world.quota_faults == []


async def test_a_run_that_keeps_its_pods_gets_no_more_than_the_queue_has_admitted() -> None:
    operator = a_run(("spec.checkpoint", {"none": True}), ("spec.roles.env", {"replicas": 1}))
    world = operator.world
    await training(operator, **follows(1))
    world.change_run(("roles.env.replicas", 2))
    await operator.settle(3)
    assert "the run keeps its pods" in condition(world, ConditionType.SUSPENDED).message
    assert len(world.pods(Role.ENV)) == 1
    assert (world.status.phase, world.stop_requests) == (Phase.RUNNING, 0)
    assert world.quota_faults == []


async def test_no_pods_are_added_while_kueue_cannot_be_read() -> None:
    operator = a_run(("spec.roles.env", {"replicas": 4, "minReplicas": 1}))
    world = operator.world
    kueue(world).elastic_pods = 2
    await training(operator, checkpoint=checkpoint(world, 1), **follows(2))
    world.kueue_denied = RightMissing('User "operator" cannot get resource "workloads"')
    await operator.settle(3)
    assert len(world.pods(Role.ENV)) == 2
    world.change_run(("roles.env.replicas", 6))
    await operator.settle(3)
    assert len(world.pods(Role.ENV)) == 2
    assert (world.status.phase, world.stop_requests) == (Phase.RUNNING, 0)


async def test_a_run_that_trains_with_a_part_of_its_env_pods_is_ready_for_kueue() -> None:
    """Else `waitForPodsReady` evicts a run that trains."""
    operator = a_run(
        ("spec.roles.env", {"replicas": 3, "minReplicas": 1}),
        ("spec.failurePolicy", {"waitSeconds": 20}),
        world=RoomForOneEnvPod,
    )
    world = operator.world
    await pass_time(operator, 15)
    assert said(world, "PodsReady") == ("", "")
    await pass_time(operator, 20)
    assert [job.attempt for job in world.jobs] == [1]
    assert said(world, "PodsReady") == ("True", "Started")


async def test_a_run_that_waits_asks_for_the_pods_that_it_has_in_its_spec_now() -> None:
    operator = a_run(("spec.roles.env", {"replicas": 4}), free=False)
    world = operator.world
    await operator.settle()
    world.change_run(("roles.env.replicas", 2))
    await operator.settle()
    assert workloads.pod_counts(workload(world))["env"] == 2
    assert world.status.phase is Phase.QUEUED


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
async def test_the_end_of_the_run_is_the_end_of_its_workload(outcome: Outcome) -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.end_driver(outcome, retryable=False)
    await operator.settle(6)
    assert holds_nothing(world)
    assert said(world, "Finished") == ("True", outcome.value)
    assert world.quota_faults == []


async def test_a_slow_webhook_of_kueue_does_not_keep_the_quota_of_a_run_that_has_ended() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.put_seconds = 6.0  # a look waits for 5 s
    world.end_driver(Outcome.SUCCEEDED)
    await pass_time(operator, 30)
    assert holds_nothing(world)
    await asyncio.sleep(2.0)
    await pass_time(operator, 30)
    assert said(world, "Finished") == ("True", "Succeeded")


async def test_pods_that_outlive_a_failed_run_keep_its_quota() -> None:
    operator = a_run(("spec.cleanup", {"onFailure": "Keep"}))
    world = operator.world
    await training(operator)
    world.end_driver(Outcome.FAILED, retryable=False)
    await operator.settle(6)
    assert world.status.phase is Phase.FAILED
    assert world.pods()
    assert said(world, "Finished") == ("", "")
    world.delete_cluster()
    world.collect_garbage()
    await operator.settle(3)
    assert said(world, "Finished") == ("True", "Failed")


async def test_a_run_that_is_past_its_deadline_ends_its_workload() -> None:
    operator = a_run(("spec.activeDeadlineSeconds", 60))
    world = operator.world
    await training(operator)
    await pass_time(operator, 200)
    assert world.status.phase is Phase.FAILED
    assert holds_nothing(world)
    assert said(world, "Finished") == ("True", "Failed")
