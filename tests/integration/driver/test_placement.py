"""Actors are where their role is."""

from __future__ import annotations

import os

import pytest
import ray

from agenticrun_api import Role
from agenticrun_workers.launch import ActorOptions
from agenticrun_workers.launch.ray_launcher import RayLauncher
from agenticrun_workers.placement import (
    MisplacedActor,
    Placement,
    check_placement,
    current_placement,
)

pytestmark = pytest.mark.usefixtures("ray_node")


class Actor:
    """Says where it is."""

    def placement(self) -> Placement:
        return current_placement("actor-0", Role.ENV)


def test_an_actor_reports_a_node_that_offers_its_role() -> None:
    launcher = RayLauncher()
    actor = launcher.start(ActorOptions(Role.ENV), Actor)
    placement = actor.call(lambda actor: actor.placement()).wait()
    check_placement(placement, launcher.offers(placement.node_id))
    assert placement.pid != os.getpid()
    actor.kill()


def test_a_node_without_the_role_is_refused() -> None:
    elsewhere = Placement(
        "actor-0", Role.DRIVER, ray.get_runtime_context().get_node_id(), "pod-0", 1
    )
    with pytest.raises(MisplacedActor, match="actor-0 runs on pod-0, which is not a driver pod"):
        check_placement(elsewhere, RayLauncher().offers(elsewhere.node_id))
