"""An operator that is newer than the CRD: the apiserver does not store all that it writes."""

from __future__ import annotations

from datetime import timedelta

import pytest

from agenticrun_api import Outcome, Phase
from agenticrun_api.names import LABEL_RUN_UID
from agenticrun_operator.resources import Manifest
from operator_world import IMAGES, NAME, Operator, World, training

CLAIM = ("PersistentVolumeClaim", f"{NAME}-checkpoints")
LACKS = ("volumeClaim", "job.version", "failuresWithoutProgress", "job.report", "job.endTime")
"""Fields of the status that an older CRD does not have."""


@pytest.fixture
def world(world: World) -> World:
    """The run of this world names no storage, so it gets a claim."""
    world.crd_lacks = LACKS
    return world


def mounts_the_claim(world: World) -> bool:
    """Return True if the head of the run's RayCluster has the claim."""
    head: Manifest = world.objects["RayCluster", NAME]["spec"]["headGroupSpec"]
    sources = [item.get("persistentVolumeClaim") for item in head["template"]["spec"]["volumes"]]
    return {"claimName": CLAIM[1]} in sources


async def lose_the_cluster(world: World, operator: Operator) -> None:
    """Delete the RayCluster, and let it be built again."""
    world.delete_cluster()
    world.collect_garbage()
    await operator.settle(3)


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_rebuilt_cluster_has_the_default_claim(
    world: World, operator: Operator, restarted: bool
) -> None:
    await training(operator)
    assert world.status.volume_claim is None, "the CRD has no such field"
    if restarted:
        operator.upgrade(IMAGES)
    await lose_the_cluster(world, operator)
    assert mounts_the_claim(world)


async def test_a_reused_claim_is_the_runs_own_too(world: World, operator: Operator) -> None:
    await training(operator)
    world.objects[CLAIM]["metadata"]["labels"][LABEL_RUN_UID] = "an earlier run's"
    operator.upgrade(IMAGES)
    await lose_the_cluster(world, operator)
    assert mounts_the_claim(world)


async def test_what_is_not_stored_is_not_written_at_each_look(
    world: World, operator: Operator
) -> None:
    await training(operator, version="0.2.0")
    await operator.settle(2)
    writes = world.status_writes
    for _ in range(5):
        world.now += timedelta(seconds=25)  # everything is looked at again
        await operator.reconcile(changed=False)
    assert world.status_writes == writes


@pytest.mark.parametrize("changed", [False, True])
async def test_failures_are_counted_that_are_not_stored(
    world: World, operator: Operator, changed: bool
) -> None:
    world.run["spec"]["failurePolicy"] |= {"maxRestarts": 1, "backoffSeconds": 1}
    await training(operator)
    for _ in range(2):
        world.end_driver(Outcome.FAILED)
        await operator.settle(6)
        if changed:  # by its user, so that it is read again
            world.change_run(("ttlSecondsAfterFinished", 3600))
    assert world.status.phase is Phase.FAILED
    assert len(world.jobs) == 2
