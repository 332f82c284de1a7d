"""The claim of a run's checkpoints: it outlives the run, and the next run of the name uses it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from agenticrun_api import ConditionType, InvalidRun, Outcome, Phase, Role, parse_run
from agenticrun_api.load import parse_served
from agenticrun_api.names import KIND
from agenticrun_api.status import CheckpointStatus
from agenticrun_operator.observing import Observer
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import CLAIM_KIND, Child, Manifest, unsuitable
from operator_world import KEY, NAME, Operator, World, happened
from runs import Change, run_with

CLAIM = ("PersistentVolumeClaim", f"{NAME}-checkpoints")
SMALL = {"size": "1Gi"}
TWO_TRAINERS: Change = ("spec.roles.trainer", {"replicas": 2, "gpus": 8})
ONE_NODE: Change = ("spec.checkpoint.volumeClaim.oneNode", True)


async def a_run(world: World, claim: dict[str, Any], *changes: tuple[str, Any]) -> Operator:
    """Apply a run and bring it to a driver."""
    world.apply_run(("spec.checkpoint", {"volumeClaim": claim}), *changes)
    operator = Operator(world)
    await operator.settle()
    return operator


async def deleted(world: World) -> None:
    world.delete_run()
    for _ in range(3):  # owners of owners
        world.collect_garbage()


def provisioned(world: World) -> tuple[str, str]:
    kind = ConditionType.CLUSTER_PROVISIONED.value
    found = next(item for item in world.status.conditions if item.type == kind)
    return found.reason, found.message


def claim_of(world: World) -> Manifest:
    return world.objects[CLAIM]


async def test_a_disruption_budget_lives_as_long_as_its_run() -> None:
    world = World()
    await a_run(world, SMALL, ("spec.disruptionBudget", "Block"))
    budget = ("PodDisruptionBudget", NAME)
    assert budget in world.objects
    await deleted(world)
    assert budget not in world.objects


async def test_a_claim_outlives_its_run_and_the_next_run_of_the_name_uses_it() -> None:
    world = World()
    await a_run(world, SMALL)
    before = claim_of(world)["metadata"]
    assert "ClaimReused" not in happened(world)
    await deleted(world)
    assert set(world.objects) == {CLAIM}
    await a_run(world, SMALL)
    assert world.status.phase is Phase.STARTING
    assert len(world.jobs) == 2
    assert claim_of(world)["metadata"] == before
    assert happened(world).count("ClaimReused") == 1
    (said,) = [event.message for event in world.events if event.reason == "ClaimReused"]
    assert "starts at step 0 (checkpoint.resume: FromPreviousRun" in said


async def test_a_run_that_is_not_to_retain_its_claim_takes_it_along() -> None:
    world = World()
    await a_run(world, SMALL | {"retain": False})
    await deleted(world)
    assert world.objects == {}


async def test_a_retained_claim_is_not_lost_to_a_later_run_that_retains_none() -> None:
    world = World()
    await a_run(world, SMALL)
    await deleted(world)
    await a_run(world, SMALL | {"retain": False})
    await deleted(world)
    assert set(world.objects) == {CLAIM}


async def test_the_ttl_deletes_no_checkpoint() -> None:
    world = World()
    operator = await a_run(world, SMALL, ("spec.ttlSecondsAfterFinished", 1))
    world.drive(1)
    await operator.settle(2)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(6)
    assert (KIND, NAME) not in world.objects
    assert CLAIM in world.objects


async def test_a_claim_with_an_owner_is_left_as_it_is() -> None:
    """It dies with its run, and the next run waits for that."""
    world = World()
    await a_run(world, SMALL | {"retain": False})
    world.run["spec"]["checkpoint"]["volumeClaim"]["retain"] = True
    before = claim_of(world)
    operator = Operator(world)
    await operator.settle()
    assert len(world.jobs) == 1
    assert claim_of(world) == before
    world.delete_run()
    await a_run(world, SMALL)
    assert provisioned(world)[0] == "WaitingForPreviousRun"


async def test_a_claim_without_our_label_is_never_used(world: World, operator: Operator) -> None:
    world.delete_run()
    theirs = {"kind": CLAIM[0], "metadata": {"name": CLAIM[1], "namespace": "team"}, "spec": {}}
    await world.create(theirs)
    await a_run(world, SMALL)
    assert (world.status.phase, provisioned(world)[0]) == (Phase.PENDING, "NameConflict")


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"size": "2Gi"}, "has 1Gi, and this run asks for size 2Gi"),
        ({"accessMode": "ReadWriteMany"}, "has ReadWriteOnce, and this run asks for ReadWriteMany"),
        ({"storageClassName": "fast"}, "has StorageClass standard, and this run asks for fast"),
        ({"size": "0.5Gi"}, None),
        ({"storageClassName": "standard"}, None),
    ],
)
async def test_a_claim_of_an_earlier_run_must_have_what_this_run_asks_for(
    asked: dict[str, Any], problem: str | None
) -> None:
    world = World()
    await a_run(world, SMALL)  # in the fake's default class, standard
    await deleted(world)
    await a_run(world, SMALL | asked)
    if problem is None:
        assert len(world.jobs) == 2
        return
    reason, message = provisioned(world)
    assert (world.status.phase, reason) == (Phase.PENDING, "ClaimUnsuitable")
    assert problem in message
    assert "kubectl delete pvc lake-checkpoints" in message
    assert len(world.jobs) == 1


async def test_a_claim_that_an_admin_changed_stays_the_runs_own() -> None:
    world = World()
    operator = await a_run(world, SMALL)
    claim_of(world)["spec"]["resources"]["requests"]["storage"] = "500Mi"
    world.run["metadata"]["generation"] += 1
    await operator.settle()
    assert provisioned(world)[0] == "ClusterCreated"


async def test_a_claim_that_is_being_deleted_is_waited_for() -> None:
    world = World()
    await a_run(world, SMALL)
    await deleted(world)
    claim_of(world)["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    operator = await a_run(world, SMALL)
    assert provisioned(world)[0] == "WaitingForPreviousRun"
    del world.objects[CLAIM]
    await operator.settle()
    assert len(world.jobs) == 2


async def test_a_run_without_a_default_storage_class_waits_and_says_what_to_write() -> None:
    world = World(storage_down=True)
    world.apply_run()
    operator = Operator(world)
    await operator.settle(20)
    reason, message = provisioned(world)
    assert (world.status.phase, reason) == (Phase.PENDING, "ClaimPending")
    for words in ("no default StorageClass", "storageClassName", "s3://", "{none: true}"):
        assert words in message
    assert (world.jobs, happened(world).count("ClaimPending")) == ([], 1)
    world.storage_down = False
    world.bind_claims()
    await operator.settle()
    assert len(world.jobs) == 1
    assert world.status.volume_claim == CLAIM[1]


@pytest.mark.parametrize(
    ("problem", "waits"),
    [
        ("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.", True),
        ("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", False),
    ],
)
async def test_a_storage_class_that_provides_nothing_is_named_if_pods_wait_for_it(
    problem: str, waits: bool
) -> None:
    """A class that waits for the first consumer has claims that are Pending with no fault."""
    world = World(storage_down=True)
    world.apply_run(
        ("spec.checkpoint", {"volumeClaim": {"size": "1Gi", "storageClassName": "slow"}})
    )
    operator = Operator(world)
    await operator.reconcile()
    world.make_pods(ready=False)
    for pod in world.pods():
        pod["status"]["containerStatuses"] = []
        pod["status"]["conditions"] = [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": problem,
            }
        ]
    await operator.reconcile()
    assert provisioned(world)[0] != "ClaimPending", "the volume may still come"
    world.now += timedelta(seconds=16)
    for _ in range(2):
        await operator.reconcile()
    reason, message = provisioned(world)
    assert (reason == "ClaimPending") is waits
    assert not waits or "StorageClass slow provides none. kubectl describe pvc" in message


async def test_a_run_that_opts_out_saves_nothing() -> None:
    world = World(storage_down=True)
    world.apply_run(("spec.checkpoint.none", True))
    await Operator(world).settle(20)
    assert len(world.jobs) == 1
    assert CLAIM not in world.objects
    assert world.status.volume_claim is None


@pytest.mark.parametrize(
    ("modes", "more", "told"),
    [
        (["ReadWriteMany"], [TWO_TRAINERS], None),
        (["ReadWriteOnce", "ReadWriteMany"], [TWO_TRAINERS], None),
        (["ReadWriteOnce"], [], None),
        (["ReadWriteOnce"], [TWO_TRAINERS], "has ReadWriteOnce, and several trainer pods"),
        (["ReadWriteOnce"], [TWO_TRAINERS, ONE_NODE], None),
        (["ReadWriteOncePod"], [], "has ReadWriteOncePod, and head and trainer pods must write"),
        (["ReadOnlyMany"], [ONE_NODE], "has ReadOnlyMany, and head and trainer pods must write"),
    ],
)
def test_a_claim_of_the_users_is_refused_if_the_pods_cannot_all_mount_it(
    modes: list[str], more: list[Change], told: str | None
) -> None:
    run = parse_run(run_with(("spec.checkpoint.volumeClaim.claimName", "data"), *more))
    claim = {"kind": CLAIM_KIND, "metadata": {"name": "data"}, "spec": {"accessModes": modes}}
    why = unsuitable(run, claim)
    assert why is None if told is None else told in str(why)


def test_a_run_of_an_earlier_version_that_the_rule_refuses_continues() -> None:
    document = run_with(TWO_TRAINERS, ("spec.checkpoint.volumeClaim.size", "1Gi"))
    with pytest.raises(InvalidRun, match="ReadWriteOnce allows one node"):
        parse_run(document)
    document["metadata"] |= {"namespace": "team", "uid": "1", "generation": 1}
    parse_served(document)


async def test_a_claim_of_the_users_is_read_and_never_written() -> None:
    world = World()
    world.apply_run(("spec.checkpoint.volumeClaim.claimName", "data"))
    claim = {
        "apiVersion": "v1",
        "kind": CLAIM_KIND,
        "metadata": {"name": "data", "namespace": "team", "uid": "u", "resourceVersion": "1"},
        "spec": {"accessModes": ["ReadWriteOncePod"]},
    }
    for stored in (None, claim):
        if stored:
            world.objects[CLAIM_KIND, "data"] = stored
        observer = Observer(world, world, world.watched, KEY, lambda: world.now)
        objects = await observer.read_objects(parse_served(world.run), fresh=True)
        claims = {
            child: found for child, found in objects.children.items() if "Claim" in child.kind
        }
        assert claims == {Child(CLAIM_KIND, "data"): stored}


@pytest.mark.parametrize(
    ("mode", "refused", "bound"),
    [
        ("ReadWriteOncePod", True, None),
        ("ReadWriteOnce", False, True),
        ("ReadWriteMany", False, False),
    ],
)
async def test_the_access_mode_of_the_users_claim_decides_where_pods_go(
    mode: str, refused: bool, bound: bool | None
) -> None:
    world = World()
    metadata = {"name": "data", "namespace": "team", "uid": "u", "resourceVersion": "1"}
    spec = {"accessModes": [mode]}
    world.objects[CLAIM_KIND, "data"] = {"kind": CLAIM_KIND, "metadata": metadata, "spec": spec}
    await a_run(world, {"claimName": "data"})
    cluster = world.objects.get(("RayCluster", NAME))
    assert (provisioned(world)[0] == "ClaimUnsuitable") is refused
    assert (cluster is None) is refused
    if cluster:
        head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
        assert ("affinity" in head) is bound


def users_claim(world: World) -> Manifest | None:
    return world.objects.get((CLAIM_KIND, "data"))


async def trains_on_the_users_claim(world: World, saved: int | None = 1) -> Operator:
    world.add_claim("data")
    operator = await a_run(world, {"claimName": "data"})
    time = format_time(world.now)
    checkpoint = CheckpointStatus(step=saved, uri="/checkpoints/1", time=time) if saved else None
    world.drive(1, checkpoint=checkpoint)
    await operator.settle(2)
    assert world.status.phase is Phase.RUNNING
    return operator


async def test_a_run_waits_for_the_users_claim_which_decides_where_its_pods_go() -> None:
    world = World()
    operator = await a_run(world, {"claimName": "data"})
    reason, message = provisioned(world)
    assert (world.status.phase, reason) == (Phase.PENDING, "ClaimPending")
    assert "waiting for volume claim data" in message
    assert "does not exist" in message
    assert "create it" in message
    assert ("RayCluster", NAME) not in world.objects
    assert users_claim(world) is None, "it is the user's to create"
    world.add_claim("data")
    await operator.settle(4)
    head = world.objects["RayCluster", NAME]["spec"]["headGroupSpec"]["template"]["spec"]
    assert "affinity" in head
    assert len(world.jobs) == 1
    assert provisioned(world)[0] == "ClusterCreated"


@pytest.mark.parametrize("held", [True, False])
async def test_pods_that_wait_for_the_users_claim_are_made_again_with_it(held: bool) -> None:
    """A claim that comes later may have other access modes, and no new pod mounts one that goes."""
    world = World()
    world.add_claim("data", "ReadWriteMany")
    world.apply_run(("spec.checkpoint", {"volumeClaim": {"claimName": "data"}}))
    operator = Operator(world)
    await operator.reconcile()
    world.make_pods(ready=False)
    if held:
        world.delete_claim("data")
    else:
        del world.objects[CLAIM_KIND, "data"]
    await operator.settle(3)
    assert users_claim(world) is None
    assert ("RayCluster", NAME) not in world.objects
    assert provisioned(world)[0] == "ClaimPending"
    world.add_claim("data")
    world.now += timedelta(seconds=30)
    await operator.settle(6)
    head = world.objects["RayCluster", NAME]["spec"]["headGroupSpec"]["template"]["spec"]
    assert "affinity" in head
    assert [job.attempt for job in world.jobs] == [1]


@pytest.mark.parametrize("change", [("suspend", True), ("roles", {"env": {"replicas": 3}}), None])
async def test_pods_stay_while_the_users_claim_is_being_deleted(
    change: tuple[str, Any] | None,
) -> None:
    world = World()
    operator = await trains_on_the_users_claim(world)
    world.delete_claim("data")
    world.now += timedelta(seconds=20)
    world.drive(1)
    await operator.settle(1)
    reason, message = provisioned(world)
    assert reason == "CheckpointsLost"
    assert "volume claim data was deleted" in message
    assert "Copy them now" in (world.status.message or "")
    if change:
        world.change_run(change)
    else:
        world.delete_pod(Role.TRAINER)
        world.end_driver(Outcome.FAILED)
    for _ in range(20):
        world.drive(2)
        await operator.settle(2)
        world.now += timedelta(seconds=30)
    assert users_claim(world), "its checkpoints can still be copied"
    assert world.pods(Role.DRIVER)
    assert world.stop_requests == 0
    assert provisioned(world)[0] == "CheckpointsLost"
    assert happened(world).count("CheckpointsLost") == (2 if change == ("suspend", True) else 1)


async def test_a_run_that_ends_keeps_its_pods_while_the_users_claim_is_being_deleted() -> None:
    world = World()
    operator = await trains_on_the_users_claim(world)
    world.delete_claim("data")
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(4)
    world.now += timedelta(seconds=60)
    await operator.settle(4)
    assert world.status.phase is Phase.SUCCEEDED
    assert users_claim(world)
    assert world.pods()
    assert provisioned(world)[0] == "CheckpointsLost"


async def test_a_run_waits_for_the_users_claim_with_its_checkpoints_to_come_back() -> None:
    """A volume may outlive its claim, and only the user knows; an empty claim starts at step 0."""
    world = World()
    operator = await trains_on_the_users_claim(world)
    world.delete_cluster()
    world.collect_garbage()
    del world.objects[CLAIM_KIND, "data"]
    await operator.settle(16)
    reason, message = provisioned(world)
    assert (world.status.phase, reason) == (Phase.RESTARTING, "CheckpointsLost")
    assert "the checkpoint of step 1" in message
    assert len(world.jobs) == 1
    world.add_claim("data")
    world.now += timedelta(seconds=60)
    await operator.settle(8)
    assert len(world.jobs) == 2


async def test_a_claim_that_goes_is_reported_although_a_pod_is_being_removed() -> None:
    world = World()
    operator = await a_run(world, SMALL)
    time = format_time(world.now)
    world.drive(1, checkpoint=CheckpointStatus(step=1, uri="/checkpoints/1", time=time))
    await operator.settle(2)
    world.lose_node(Role.ENV)
    world.evict_lost_pods()
    world.now += timedelta(seconds=100)
    world.delete_claim()
    for _ in range(4):
        world.drive(1)
        await operator.settle(1)
    assert "NodeLost" in happened(world)
    assert provisioned(world)[0] == "CheckpointsLost"


async def test_the_users_claim_costs_a_run_that_trains_one_request_per_full_look() -> None:
    world = World()
    operator = await trains_on_the_users_claim(world)
    world.now += timedelta(seconds=20)
    await operator.reconcile(changed=False)
    world.requests.clear()
    for _ in range(40):
        world.now += timedelta(seconds=2)
        world.drive(1)
        await operator.reconcile(changed=False)
    assert world.requests.count(f"get {CLAIM_KIND}") <= 80 / 20
    assert provisioned(world)[0] == "ClusterCreated"
