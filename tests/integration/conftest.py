"""One real Ray for the tests that start actors themselves.

A process can be in one Ray only. Its node offers every role twice. Its actors are preloaded
processes; tests/integration/local has those that a user starts.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from preloaded import preloaded_actors


@pytest.fixture(scope="session")
def ray_node() -> Iterator[None]:
    with preloaded_actors():
        ray.init(
            address="local",
            num_cpus=1,
            resources={"trainer": 2, "inference": 2, "env": 2, "reference": 2, "critic": 2},
            object_store_memory=150 * 1024 * 1024,
            include_dashboard=False,
            log_to_driver=False,
        )
    yield
    ray.shutdown()
