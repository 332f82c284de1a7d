"""The folder in shared memory goes with the process that made it, whatever ends that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agenticrun_workers.weights.node import PREFIX, SharedFolder
from waiting import eventually

PROGRAM = """
import sys, time
from agenticrun_workers.weights.node import SharedFolder
folder = SharedFolder("drill")
(folder.path / "bucket").write_bytes(bytes(1000))
print(folder.path, flush=True)
time.sleep(600)
"""


def gone(path: Path) -> bool:
    return eventually(lambda: not path.exists(), 60, f"{path} is removed")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_killed_process(number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    owner = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert owner.stdout is not None
    path = Path(owner.stdout.readline().strip())
    assert path.name.startswith(f"{PREFIX}drill-")
    assert (path / "bucket").stat().st_size == 1000
    os.killpg(owner.pid, number)
    owner.wait()
    assert gone(path)


def test_a_deleted_folder_is_gone_at_once_and_may_be_deleted_again() -> None:
    folder = SharedFolder("drill")
    assert folder.path.is_dir()
    folder.delete()
    assert not folder.path.exists()
    folder.delete()
