"""Libraries that take seconds and hundreds of MB: processes that do not need them start without."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys

import pytest

from agenticrun_workers.processes import quick_imports

HEAVY = {"torch", "transformers", "datasets"}
PROCESSES = {
    "command for a run on a cluster": ("cli.app, driver.checkpoints", HEAVY | {"numba"}),
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


def test_nothing_is_collected_while_libraries_are_imported() -> None:
    with quick_imports():
        assert not gc.isenabled()
        with quick_imports():
            pass
        assert not gc.isenabled(), "the outer block goes on"
    assert gc.isenabled()


def test_a_failed_import_leaves_the_collector_on() -> None:
    with pytest.raises(ModuleNotFoundError), quick_imports():
        importlib.import_module("no_such_module")
    assert gc.isenabled()
