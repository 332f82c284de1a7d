"""One real Ray for the tests that start actors themselves.

A process can be in one Ray only. Its node offers every role twice, and GPUs that it does not have.
Its actors are preloaded
processes; tests/integration/local has those that a user starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import ray

from agenticrun_api.names import RAY_ENV
from preloaded import preloaded_actors

GPUS = 8


@pytest.fixture(scope="session")
def ray_node() -> Iterator[None]:
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(GPUS)))}
    with preloaded_actors(), mock.patch.dict(os.environ, RAY_ENV | gpus):
        ray.init(
            address="local",
            num_cpus=1,
            num_gpus=GPUS,
            resources={"trainer": 2, "inference": 2, "env": 2, "reference": 2, "critic": 2},
            object_store_memory=150 * 1024 * 1024,
            include_dashboard=False,
            log_to_driver=False,
        )
    yield
    ray.shutdown()
