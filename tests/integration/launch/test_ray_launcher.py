"""The launcher on a real Ray."""

from __future__ import annotations

import sys

import pytest
import ray

from agenticrun_workers.launch import Launcher
from agenticrun_workers.launch.ray_launcher import RayLauncher
from launcher_conformance import LauncherConformance

pytestmark = pytest.mark.usefixtures("ray_node")
ray.cloudpickle.register_pickle_by_value(
    sys.modules[LauncherConformance.__module__]
)  # workers cannot import the tests' modules


@pytest.fixture(scope="class")
def launcher() -> Launcher:
    return RayLauncher()


class TestRayLauncher(LauncherConformance):
    """See `LauncherConformance`."""
