"""A run that asks for trackers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agenticrun_api import AgenticRun, parse_run

MakeRun = Callable[..., AgenticRun]


@pytest.fixture
def make_run() -> MakeRun:
    """`make_run(uid="", **tracking)`."""

    def make(uid: str = "", **tracking: Any) -> AgenticRun:
        return parse_run(
            {
                "apiVersion": "agenticrun.dev/v1alpha1",
                "kind": "AgenticRun",
                "metadata": {"name": "lake", **({"uid": uid} if uid else {})},
                "spec": {
                    "model": {"initialize": {}},
                    "roles": {"driver": {"env": [{"name": "TOKEN", "value": "tell-nobody"}]}},
                    "pipeline": {
                        "maxSteps": 10,
                        "rolloutBatchSize": 8,
                        "evalSteps": 0,
                        "envs": [{"tag": "A", "type": "frozen_lake"}],
                        "trainEnvs": {"groups": 4, "groupSize": 2, "tags": ["A"]},
                    },
                    "tracking": tracking,
                },
            }
        )

    return make
