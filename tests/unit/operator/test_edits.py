"""Changes of a run's RayCluster and pods by others: seen, named, and put back where possible."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest

from agenticrun_api import AgenticRun, ConditionType, Outcome, Phase, PoolStatus, Role
from agenticrun_api.load import parse_served
from agenticrun_operator.errors import Denied
from agenticrun_operator.observed import Edit, Observed
from agenticrun_operator.observing import Observer
from agenticrun_operator.resources import (
    Child,
    Manifest,
    changes_by_others,
    editor_of,
    repaired,
    replicas_in,
    rescaled,
)
from agenticrun_operator.watch_cache import cluster_summary
from operator_world import KEY, NAME, Operator, World, condition, happened, training

CLUSTER = ("RayCluster", NAME)


@pytest.fixture
async def world() -> World:
    world = World()
    world.apply_run()
    await training(Operator(world))
    return world


def run_of(world: World) -> AgenticRun:
    return parse_served(world.run)


def group(cluster: Manifest, role: Role) -> Manifest:
    groups: list[Manifest] = cluster["spec"]["workerGroupSpecs"]
    return next(item for item in groups if item["groupName"] == role.value)


async def look(world: World) -> Observed:
    """Return what an operator that has just started reads."""
    world.let_watches_catch_up()
    observer = Observer(world, world, world.watched, KEY, lambda: world.now)
    return await observer.look(
        run_of(world), await observer.read_objects(run_of(world), fresh=False)
    )


async def edits(world: World) -> list[Edit]:
    return (await look(world)).edits(run_of(world))


async def test_what_the_operator_made_is_no_edit(world: World) -> None:
    cluster = world.objects[CLUSTER]
    assert changes_by_others(run_of(world), cluster) == ()
    assert changes_by_others(run_of(world), cluster_summary(cluster)) == ()
    assert await edits(world) == []


@pytest.mark.parametrize(
    ("role", "fields", "changes"),
    [
        (
            Role.ENV,
            {"replicas": 2, "minReplicas": 2, "maxReplicas": 2},
            (
                "replicas of worker group env is 2 instead of 1",
                "minReplicas of worker group env is 2 instead of 1",
                "maxReplicas of worker group env is 2 instead of 1",
            ),
        ),
        (Role.TRAINER, {"replicas": 0}, ("replicas of worker group trainer is 0 instead of 1",)),
        (Role.ENV, {"maxReplicas": 9}, ("maxReplicas of worker group env is 9 instead of 1",)),
    ],
)
async def test_other_numbers_of_pods_are_put_back(
    world: World, role: Role, fields: dict[str, int], changes: tuple[str, ...]
) -> None:
    made, cluster = copy.deepcopy(world.objects[CLUSTER]), world.objects[CLUSTER]
    group(cluster, role).update(fields)
    assert changes_by_others(run_of(world), cluster) == changes
    assert repaired(run_of(world), cluster) == made
    assert [edit.changes for edit in await edits(world)] == [changes]


async def test_numbers_that_the_operator_asked_for_last_are_the_right_ones(world: World) -> None:
    """The spec asks for others already: they come in order, when the driver is ready."""
    world.change_run(("roles.env.replicas", 3))
    cluster = world.objects[CLUSTER]
    assert changes_by_others(run_of(world), cluster) == ()
    group(cluster, Role.ENV)["replicas"] = 5
    assert group(repaired(run_of(world), cluster), Role.ENV)["replicas"] == 1


async def test_what_a_queue_and_kuberay_change_is_left_alone(world: World) -> None:
    cluster = world.objects[CLUSTER]
    cluster["spec"]["suspend"] = True
    group(cluster, Role.ENV)["scaleStrategy"] = {"workersToDelete": ["a"]}
    cluster["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "q"
    cluster["metadata"]["finalizers"] = ["ray.io/gcs"]
    assert changes_by_others(run_of(world), cluster) == ()
    group(cluster, Role.ENV)["replicas"] = 2
    fixed = repaired(run_of(world), cluster)
    assert fixed["spec"]["suspend"] is True
    assert group(fixed, Role.ENV)["scaleStrategy"] == {"workersToDelete": ["a"]}
    assert fixed["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"


@pytest.mark.parametrize(
    "removed", ["agenticrun.dev/run", "agenticrun.dev/run-uid", "agenticrun.dev/env-replicas"]
)
async def test_a_label_that_was_removed_comes_back(world: World, removed: str) -> None:
    made, cluster = copy.deepcopy(world.objects[CLUSTER]), world.objects[CLUSTER]
    del cluster["metadata"]["labels"][removed]
    assert changes_by_others(run_of(world), cluster) == (f"label {removed} is missing",)
    assert repaired(run_of(world), cluster) == made
    assert [edit.object for edit in await edits(world)] == [Child("RayCluster", NAME)]


async def test_a_label_with_another_value_is_put_back(world: World) -> None:
    made, cluster = copy.deepcopy(world.objects[CLUSTER]), world.objects[CLUSTER]
    cluster["metadata"]["labels"]["agenticrun.dev/run"] = "river"
    (change,) = changes_by_others(run_of(world), cluster)
    assert change == "label agenticrun.dev/run is river instead of lake"
    assert repaired(run_of(world), cluster) == made


OWN = {"agenticrun.dev/run", "agenticrun.dev/run-uid"}


def disown(world: World) -> None:
    """Remove the owner of the RayCluster, and the labels that name its run."""
    metadata = world.objects[CLUSTER]["metadata"]
    del metadata["ownerReferences"]
    metadata["labels"] = {key: metadata["labels"][key] for key in metadata["labels"].keys() - OWN}


def is_owned(world: World) -> bool:
    metadata = world.objects[CLUSTER]["metadata"]
    return bool(metadata.get("ownerReferences")) and metadata["labels"].keys() >= OWN


async def test_labels_and_owner_come_back_while_a_driver_stops(world: World) -> None:
    operator = Operator(world)
    world.change_run(("suspend", True))
    await operator.settle(2)
    disown(world)
    await operator.settle(2)
    assert world.status.phase is Phase.SUSPENDING
    assert is_owned(world)


async def test_labels_and_owner_come_back_before_a_deletion_that_was_denied(world: World) -> None:
    """As the chart's own policy denies it: it goes by them."""
    operator = Operator(world)
    world.delete_errors["RayCluster"] = Denied("only RayClusters of runs")
    world.change_run(("suspend", True))
    await operator.settle(2)
    world.end_driver(Outcome.STOPPED)
    disown(world)
    await operator.settle(4)
    assert is_owned(world)


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
async def test_labels_and_owner_of_pods_that_stay_after_the_end_come_back(outcome: Outcome) -> None:
    """Without its owner, the RayCluster would outlive the run. Numbers are the user's now."""
    world = World()
    world.apply_run(("spec.cleanup", {"onSuccess": "Keep", "onFailure": "Keep"}))
    operator = Operator(world)
    await training(operator)
    world.end_driver(outcome, retryable=False)
    await operator.settle(3)
    assert world.status.phase.finished
    disown(world)
    group(world.objects[CLUSTER], Role.ENV)["replicas"] = 0
    await operator.settle(3)
    assert is_owned(world)
    assert group(world.objects[CLUSTER], Role.ENV)["replicas"] == 0


async def test_the_owner_comes_back_while_a_finalizer_holds_a_deleted_run(world: World) -> None:
    operator = Operator(world)
    world.run["metadata"]["finalizers"] = ["foregroundDeletion"]
    world.delete_run()
    disown(world)
    await operator.settle(2)
    assert is_owned(world)


async def test_children_of_a_run_that_is_deleted_with_cascade_orphan_are_left_alone(
    world: World,
) -> None:
    operator = Operator(world)
    world.run["metadata"]["finalizers"] = ["orphan"]
    world.delete_run()
    disown(world)
    await operator.settle(2)
    assert not is_owned(world)


async def test_other_owners_stay_when_that_of_the_run_comes_back(world: World) -> None:
    cluster = world.objects[CLUSTER]
    (mine,) = cluster["metadata"]["ownerReferences"]
    other = {"apiVersion": "v1", "kind": "ConfigMap", "name": "budget", "uid": "c"}
    cluster["metadata"]["ownerReferences"] = [other, mine]
    assert changes_by_others(run_of(world), cluster) == ()
    cluster["metadata"]["ownerReferences"] = [other, mine | {"controller": False}]
    assert repaired(run_of(world), cluster)["metadata"]["ownerReferences"] == [other, mine]


async def test_a_label_with_other_replicas_is_put_back_and_starts_no_pods(world: World) -> None:
    operator = Operator(world)
    made, cluster = copy.deepcopy(world.objects[CLUSTER]), world.objects[CLUSTER]
    cluster["metadata"]["labels"]["agenticrun.dev/inference-replicas"] = "40"
    await operator.settle(3)
    assert world.objects[CLUSTER]["spec"] == made["spec"]
    assert world.objects[CLUSTER]["metadata"]["labels"] == made["metadata"]["labels"]
    assert world.status.phase is Phase.RUNNING
    (event,) = [event for event in world.events if event.reason == "ClusterRepaired"]
    assert "label agenticrun.dev/inference-replicas is 40 instead of 1" in event.message
    assert not {"Scaled", "Rescaling"} & set(happened(world))


@pytest.mark.parametrize("pending", [False, True], ids=["at-rest", "before-other-replicas"])
async def test_label_and_numbers_together_are_put_back(world: World, pending: bool) -> None:
    """They look as if the operator had written them; its status says that it has not."""
    operator = Operator(world)
    if pending:
        world.change_run(("roles.env.replicas", 3))
    cluster = world.objects[CLUSTER]
    cluster["metadata"]["labels"]["agenticrun.dev/env-replicas"] = "40"
    numbers = {"replicas": 40, "minReplicas": 40, "maxReplicas": 40}
    group(cluster, Role.ENV).update(numbers)
    await operator.reconcile()
    assert group(world.objects[CLUSTER], Role.ENV)["replicas"] == 1
    labels = world.objects[CLUSTER]["metadata"]["labels"]
    assert labels["agenticrun.dev/env-replicas"] == "1"
    assert len(world.pods(Role.ENV)) == 1


async def test_a_rescaling_that_the_status_has_missed_counts(world: World) -> None:
    """The operator has ended after the change of the RayCluster, before its status."""
    world.change_run(("roles.env.replicas", 3))
    cluster = world.objects[CLUSTER]
    world.objects[CLUSTER] = rescaled(cluster, {Role.ENV: 3}, ())
    assert replicas_in(run_of(world), world.objects[CLUSTER])["env"] == 3
    assert changes_by_others(run_of(world), world.objects[CLUSTER]) == ()
    world.run["spec"]["roles"]["env"]["replicas"] = 2  # only an edit has these numbers
    assert replicas_in(run_of(world), world.objects[CLUSTER])["env"] == 1


async def test_without_a_record_the_label_counts_unless_the_numbers_are_right(world: World) -> None:
    """As while the CRD is older than the operator."""
    world.run["status"]["rayCluster"].pop("replicas")
    cluster = world.objects[CLUSTER]
    cluster["metadata"]["labels"]["agenticrun.dev/env-replicas"] = "40"
    assert replicas_in(run_of(world), cluster)["env"] == 1
    world.change_run(("roles.env.replicas", 3))
    cluster["metadata"]["labels"]["agenticrun.dev/env-replicas"] = "1"
    assert replicas_in(run_of(world), cluster)["env"] == 1


async def test_a_worker_group_of_others_is_named_once_and_hinders_nothing(world: World) -> None:
    operator = Operator(world)
    pools = {role: PoolStatus(replicas=1, serving=1) for role in (Role.ENV, Role.INFERENCE)}
    world.drive(1, pools=pools)
    await operator.settle(1)
    groups = world.objects[CLUSTER]["spec"]["workerGroupSpecs"]
    extra = copy.deepcopy(groups[0]) | {"groupName": "extra", "replicas": 0}
    groups.append(extra)
    world.change_run(("roles.env.replicas", 3))
    world.drive(2, pools=pools)
    await operator.settle(3)
    assert group(world.objects[CLUSTER], Role.ENV)["replicas"] == 3
    assert extra in world.objects[CLUSTER]["spec"]["workerGroupSpecs"]
    found = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert (found.status, found.reason) == ("True", "ClusterEdited")
    assert found.message == (
        "RayCluster lake was changed: worker group extra was added; "
        "undo it: kubectl edit raycluster lake"
    )
    assert happened(world).count("ClusterEdited") == 1
    assert "ClusterRepaired" not in happened(world)
    groups = world.objects[CLUSTER]["spec"]["workerGroupSpecs"]
    groups.remove(extra)
    groups.remove(group(world.objects[CLUSTER], Role.ENV))
    await operator.settle(12)  # a message alone is written every 10 s
    found = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert "worker group env was removed" in found.message


async def test_a_change_that_cannot_be_put_back_is_named(world: World) -> None:
    operator = Operator(world)
    world.put_error = Denied("no changes on Fridays")
    group(world.objects[CLUSTER], Role.ENV)["replicas"] = 2
    await operator.settle(40)
    found = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert (found.status, found.reason) == ("True", "ClusterEdited")
    assert found.message == (
        "RayCluster lake was changed: replicas of worker group env is 2 instead of 1; "
        "the operator cannot put it back: no changes on Fridays"
    )
    assert happened(world).count("ClusterEdited") == 1


async def test_all_labels_and_the_owner_come_back_at_once(world: World) -> None:
    """As after a restore from a backup. The uid in the status shows that it is the run's own."""
    made, cluster = copy.deepcopy(world.objects[CLUSTER]), world.objects[CLUSTER]
    world.run["status"]["rayCluster"] = {"name": NAME, "uid": cluster["metadata"]["uid"]}
    del cluster["metadata"]["labels"], cluster["metadata"]["ownerReferences"]
    assert repaired(run_of(world), cluster) == made
    (edit,) = await edits(world)
    assert edit.changes[-1] == "the reference to its owner is missing"


@pytest.mark.parametrize("without", ["labels", "ownerReferences"])
async def test_a_ray_cluster_without_them_is_still_the_runs_own(world: World, without: str) -> None:
    cluster = world.objects[CLUSTER]
    del cluster["metadata"][without]
    observed = await look(world)
    assert observed.own_cluster(run_of(world)) is not None
    head = observed.head(world.run["metadata"]["uid"])
    assert head is not None
    assert head.ready


async def test_a_ray_cluster_of_another_owner_is_never_the_runs_own(world: World) -> None:
    cluster = world.objects[CLUSTER]
    world.run["status"]["rayCluster"] = {"name": NAME, "uid": cluster["metadata"]["uid"]}
    cluster["metadata"]["ownerReferences"][0]["uid"] = "another"
    assert (await look(world)).own_cluster(run_of(world)) is None
    del cluster["metadata"]["ownerReferences"]
    cluster["metadata"]["labels"]["agenticrun.dev/run-uid"] = "another"
    world.run["status"]["rayCluster"]["uid"] = "another"
    assert (await look(world)).own_cluster(run_of(world)) is None


@pytest.mark.parametrize("role", [Role.DRIVER, Role.ENV])
async def test_a_pod_whose_labels_were_removed_still_counts(world: World, role: Role) -> None:
    (pod,) = world.pods(role)
    pod["metadata"]["labels"].pop("agenticrun.dev/run")
    name = pod["metadata"]["name"]
    (edit,) = await edits(world)
    assert str(edit) == (
        f"Pod {name} was changed: label agenticrun.dev/run is missing; "
        f"set it: kubectl label pod {name} agenticrun.dev/run=lake"
    )
    pod["metadata"]["labels"].pop("agenticrun.dev/role")
    observed = await look(world)
    assert [pod.ready for pod in observed.pods if pod.role is role] == [True]


async def test_a_head_whose_label_was_removed_is_no_lost_head(world: World) -> None:
    operator = Operator(world)
    (head,) = world.pods(Role.DRIVER)
    head["metadata"]["labels"].pop("agenticrun.dev/run")
    for step in range(2, 30):
        world.drive(step, max_steps=100)
        await operator.reconcile()
        world.now += timedelta(seconds=3)
    assert (world.status.phase, world.status.step) == (Phase.RUNNING, 29)
    assert (world.status.restarts, world.status.failures_without_progress) == (0, 0)


async def test_a_run_whose_pods_are_all_known_is_not_listed_again(world: World) -> None:
    world.requests.clear()
    await look(world)
    assert "list pods" not in world.requests


@pytest.mark.parametrize(
    ("fields", "editor"),
    [
        ([], ""),
        ([("kubectl-edit", "2026-01-01T00:00:00Z", {"f:workerGroupSpecs": {}})], "kubectl-edit"),
        (
            [
                ("agenticrun-operator", "2026-01-01T00:00:00Z", {"f:headGroupSpec": {}}),
                ("autoscaler", "2026-01-02T00:00:00Z", {"f:workerGroupSpecs": {}}),
                ("kuberay", "2026-01-03T00:00:00Z", {}),
            ],
            "autoscaler",
        ),
    ],
)
async def test_the_client_that_changed_the_numbers_is_named(
    world: World, fields: list[tuple[str, str, dict[str, Any]]], editor: str
) -> None:
    cluster = world.objects[CLUSTER]
    cluster["metadata"]["managedFields"] = [
        {"manager": manager, "time": time, "fieldsV1": {"f:spec": spec}}
        for manager, time, spec in fields
    ]
    assert editor_of(cluster) == editor
    told = str(Edit(Child("RayCluster", NAME), ("a is b",), editor_of(cluster)))
    assert told == f"RayCluster lake was changed{f' by {editor}' if editor else ''}: a is b"
