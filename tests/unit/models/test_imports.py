"""Libraries that take seconds and hundreds of MB: processes that do not need them start without."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "datasets"}
PROCESSES = {
    "driver": ("driver.__main__, driver.local", HEAVY),
    "env worker": ("rollout.env_worker, models.tokenizer", HEAVY - {"transformers"}),
    "actor of a server": (
        "inference.builder, inference.sglang.engine, inference.vllm.engine",
        HEAVY,
    ),
    "trajectory store": ("rollout.trajectory_store", HEAVY | {"numba"}),
    "holder of a node's weights": ("weights.node", HEAVY | {"numba"}),
}
"""The modules that a process has imported when it is ready to work, and what it never imports.

The first weight sync waits for the start of the processes that hold weights.
"""


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_starts_without_libraries_that_it_does_not_need(process: str) -> None:
    modules, never = PROCESSES[process]
    code = "import sys, " + ", ".join(f"agenticrun_workers.{name}" for name in modules.split(", "))
    found = subprocess.run(
        [sys.executable, "-c", f"{code}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not never & set(found.stdout.split())
