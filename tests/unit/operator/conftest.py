"""The world of a run whose restarts run out soon, and an operator in it."""

from __future__ import annotations

import pytest

from operator_world import Operator, World


@pytest.fixture
def world() -> World:
    world = World()
    world.apply_run(("spec.failurePolicy", {"maxRestarts": 2, "backoffSeconds": 10}))
    return world


@pytest.fixture
def operator(world: World) -> Operator:
    return Operator(world)
