"""Processes that have imported torch before they start: forks of one server per test process.

Importing torch, transformers and the trainer takes five seconds of a core, and tests start about
two hundred actors and ranks. `executable()` takes the place of `sys.executable` where a fresh
interpreter is not what the test is about. The processes are real ones, which can be killed, frozen
and waited for. Tests of whole commands start everything as a user does.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import ray

from waiting import eventually

MODULES = (
    "torch._dynamo",  # the first optimizer step imports it
    "transformers.models.llama.modeling_llama",
    "agenticrun_workers.inference.actor",
    "agenticrun_workers.inference.transformers.engine",
    "agenticrun_workers.models.initialize",
    "agenticrun_workers.rollout.env_worker",
    "agenticrun_workers.trainer.policy_rank",
    "agenticrun_workers.trainer.reference_and_critic",
    "agenticrun_workers.trainer.rank_models",
    "agenticrun_workers.trainer.strategies",
    "agenticrun_workers.trainer.fsdp2",
    "agenticrun_workers.trainer.megatron.strategy",
    "agenticrun_workers.trainer.deepspeed.strategy",
)
"""Modules that actors and ranks import before they do anything."""


_HERE = Path(__file__).parent
_EXECUTABLE = "AGENTICRUN_TEST_PRELOADED"


def executable() -> list[str]:
    """Return a command that runs the Python program after it in a preloaded process."""
    return [sys.executable, "-I", "-S", str(_HERE / "preloaded_client.py"), _server()]


def environment() -> dict[str, str]:
    """Return variables with which a command starts its own Ray's actors as preloaded processes.

    These processes are not of the command's session, but die with those of it that started them.
    """
    return {
        "PYTHONPATH": _python_path(),
        _EXECUTABLE: _script(),
        "RAY_RUNTIME_ENV_HOOK": f"{__name__}.{_before_ray_starts.__name__}",
    }


@contextmanager
def preloaded_actors() -> Iterator[None]:
    """Let a Ray that the body starts run its actors as preloaded processes.

    They can import the modules of tests/support.
    """
    with mock.patch.dict(os.environ, {"PYTHONPATH": _python_path()}), _patched_ray(_script()):
        yield


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(_HERE), os.environ.get("PYTHONPATH"))))


def _before_ray_starts(runtime_env: dict[str, Any] | None) -> dict[str, Any] | None:
    """Patch Ray; `ray.init` calls it in the command's process."""
    _kept.append(patch := ExitStack())  # for the life of the process
    patch.enter_context(_patched_ray(os.environ[_EXECUTABLE]))
    return runtime_env


@contextmanager
def _patched_ray(script: str) -> Iterator[None]:
    """Replace the interpreter of Ray's daemons, and start none that no test needs.

    Tests read log files, look at no dashboard and have no autoscaler. `script` becomes a plain
    interpreter for everything except workers.
    """
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(sys, "executable", script))
        for start in ("start_log_monitor", "start_api_server", "start_monitor"):
            patches.enter_context(mock.patch.object(ray._private.node.Node, start))
        yield


@functools.cache
def _server() -> str:
    """Start the server, which ends with this process, and return the path of its socket."""
    folder = tempfile.TemporaryDirectory(prefix="arun-preloaded-", dir="/tmp")
    path = Path(folder.name, "socket")
    process = subprocess.Popen(
        [sys.executable, str(_HERE / "preloaded_server.py"), str(path), *MODULES],
        stdin=subprocess.PIPE,  # closes when this process ends
    )
    _kept.extend((folder, process))

    def answers() -> bool:
        assert process.poll() is None, "the server of preloaded processes has ended: see above"
        return path.exists()

    eventually(answers, 300, "torch is imported", interval=0.05)
    return str(path)


@functools.cache
def _script() -> str:
    """Return the path of an interpreter that runs Ray's workers as preloaded processes."""
    path = Path(_server()).with_name("python")
    preloaded = shlex.join(executable())
    path.write_text(
        "#!/bin/sh\n"
        f'case "$1" in */default_worker.py) exec {preloaded} "$@";; esac\n'
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


_kept: list[object] = []
"""The folder goes, and the server ends, with this process."""
