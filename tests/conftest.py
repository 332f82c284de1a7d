"""Markers by folder, and the cluster.

A test that needs a cluster fails without one: nothing is skipped.

`make test` runs two processes of pytest side by side (pytest-xdist). Tests of one file stay
together, because they share fixtures. So do all tests that change what a cluster has only one of:
its definitions and its rights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadScopeScheduling

from testcluster import Cluster, running_cluster

# `make test` gives the same answer twice; HYPOTHESIS_PROFILE=explore looks for new counterexamples.
# Machines are shared and busy: no deadline per example. A fixture may serve all examples of a test.
shared = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.register_profile("repeatable", shared, derandomize=True)
settings.register_profile("explore", shared, derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
if settings.get_current_profile_name() == "repeatable":
    # Otherwise examples also use constants of the modules that this process has already imported.
    providers._get_local_constants = lambda: providers._local_constants


ON_THE_CLUSTER = ("api", "chart", "devcluster", "operator")
"""Folders of integration tests that follow each other."""


SLOW_FILES = (
    "test_deterministic.py",
    "test_gpu_examples.py",
    "test_session.py",
    "test_algorithms.py",
    "test_engines_and_trainers.py",
    "test_weight_sync.py",
    "test_eval.py",
    "test_colocated.py",
)
"""Of minutes each, begun with: none of them is to run alone at the end."""


class StaysTogether(LoadScopeScheduling):
    """Gives one process all tests of a file, or of the cluster."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        tier, folder = file.split("/")[-3:-1]
        return "cluster" if tier == "integration" and folder in ON_THE_CLUSTER else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> StaysTogether:
    """Return the scheduler that assigns tests to the processes of `pytest -n 2`.

    The groups of pytest-xdist 3.8 do nothing under pytest 9.2.
    """
    return StaysTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by the folder below tests/ that holds it, and begin with the slow files."""
    root = Path(__file__).parent
    for item in items:
        item.add_marker(item.path.relative_to(root).parts[0])
    items.sort(
        key=lambda item: (
            SLOW_FILES.index(item.path.name) if item.path.name in SLOW_FILES else len(SLOW_FILES)
        )
    )


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The development cluster, brought up if it is down."""
    with running_cluster() as found:
        yield found


@pytest.fixture(scope="session")
def kubeconfig(cluster: Cluster) -> Path:
    """The kubeconfig of the development cluster."""
    return Path(cluster.env["KUBECONFIG"])
