"""Markers by folder, and the cluster. A test that needs a cluster fails without one: nothing is skipped."""

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by the folder below tests/ that holds it."""
    root = Path(__file__).parent
    for item in items:
        item.add_marker(item.path.relative_to(root).parts[0])


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The development cluster, brought up if it is down."""
    with running_cluster() as found:
        yield found


@pytest.fixture(scope="session")
def kubeconfig(cluster: Cluster) -> Path:
    """The kubeconfig of the development cluster."""
    return Path(cluster.env["KUBECONFIG"])
