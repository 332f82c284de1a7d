"""Processes that have imported torch before they start: forks of one server per test process.

Importing torch, transformers and the trainer takes five seconds of a core, and tests start about
two hundred actors and ranks. `executable()` takes the place of `sys.executable` where a fresh
interpreter is not what the test is about. The processes are real ones, which can be killed, frozen
and waited for. Tests of whole commands start everything as a user does.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from waiting import eventually

_HERE = Path(__file__).parent
_EXECUTABLE = "AGENTICRUN_TEST_PRELOADED"


def executable() -> list[str]:
    """Return a command that runs the Python program after it in a preloaded process."""
    return [sys.executable, "-I", "-S", str(_HERE / "preloaded_client.py"), _server()]


def environment() -> dict[str, str]:
    """Return variables with which a command starts its own Ray's actors as preloaded processes.

    These processes are not of the command's session.
    """
    path = filter(None, (str(_HERE), os.environ.get("PYTHONPATH")))
    return {
        "PYTHONPATH": os.pathsep.join(path),
        _EXECUTABLE: " ".join(executable()),
        "RAY_RUNTIME_ENV_HOOK": f"{__name__}.{use_preloaded.__name__}",
    }


def use_preloaded(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Return the environment of Ray's workers; Ray calls it in the command's process."""
    return {**(runtime_env or {}), "py_executable": os.environ[_EXECUTABLE]}


@functools.cache
def _server() -> str:
    """Start the server, which ends with this process, and return the path of its socket."""
    folder = tempfile.TemporaryDirectory(prefix="arun-preloaded-", dir="/tmp")
    path = Path(folder.name, "socket")
    process = subprocess.Popen(
        [sys.executable, str(_HERE / "preloaded_server.py"), str(path)],
        stdin=subprocess.PIPE,  # closes when this process ends
    )
    _kept.extend((folder, process))

    def answers() -> bool:
        assert process.poll() is None, "the server of preloaded processes has ended: see above"
        return path.exists()

    eventually(answers, 300, "torch is imported", interval=0.05)
    return str(path)


_kept: list[object] = []
"""The folder goes, and the server ends, with this process."""
