"""Markers by folder, and the cluster. A test that needs a cluster fails without one: nothing is skipped.

`make test` runs two processes of pytest side by side (pytest-xdist). Tests of one file stay together, because they share fixtures, and
so do all tests that change what a cluster has only one of: its definitions and its rights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from testcluster import Cluster, running_cluster

# `make test` gives the same answer twice; HYPOTHESIS_PROFILE=explore looks for new counterexamples.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


ON_THE_CLUSTER = ("api", "chart", "devcluster", "operator")
"""Folders of integration tests whose tests follow each other."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by the folder below tests/ that holds it, and by what must stay in one process."""
    root = Path(__file__).parent
    for item in items:
        tier, *folders = item.path.relative_to(root).parts
        item.add_marker(tier)
        item.add_marker(pytest.mark.xdist_group("cluster" if folders[0] in ON_THE_CLUSTER and tier == "integration" else str(item.path)))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The development cluster, brought up if it is down."""
    with running_cluster() as found:
        yield found


@pytest.fixture(scope="session")
def kubeconfig(cluster: Cluster) -> Path:
    """The kubeconfig of the development cluster."""
    return Path(cluster.env["KUBECONFIG"])
