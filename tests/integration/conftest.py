"""One real Ray for the tests that start actors themselves.

A process can be in one Ray only. Its node offers every role twice. Its actors are preloaded
processes; tests/integration/local has those that a user starts.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest
import ray

from preloaded import preloaded_actors, shared


def pytest_configure(config: pytest.Config) -> None:
    """Make the processes of `pytest -n 2` forks of one that has imported torch.

    Each would import it twice: for itself and for its actors.
    """
    if config.getoption("numprocesses", 0) and not hasattr(config, "workerinput"):
        config.option.tx = [f"{each}//python={shlex.join(shared())}" for each in config.option.tx]


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
