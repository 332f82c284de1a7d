"""`agenticrun run --in-process`: a debugger in the terminal stops where the user's code runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import yaml

from agenticrun_api.names import ExitCode
from preloaded import executable
from tiny_runs import tiny_document
from waiting import eventually

STOPPING = """
import threading
from agenticrun_workers.envs.frozen_lake import FrozenLake
from agenticrun_workers.trainer import actor_loss

seen = threading.Lock()

class Stopping(FrozenLake):
    def step(self, action):
        if seen.acquire(blocking=False):
            place = "an environment"
            breakpoint()
        return super().step(action)

computing = threading.Lock()
compute = actor_loss.ActorLoss.__call__

def stopping(self, *arguments):
    if computing.acquire(blocking=False):
        place = "the loss"
        breakpoint()
    return compute(self, *arguments)

actor_loss.ActorLoss.__call__ = stopping
"""
"""An environment that stops in its first step, and in the first micro-batch of the loss."""


def command(folder: Path, **pipeline: object) -> list[str]:
    """Write a run and return the command that trains it."""
    document = tiny_document(**pipeline)
    del document["metadata"]["uid"]
    (folder / "run.yaml").write_text(yaml.safe_dump(document))
    run = [*executable(), "-m", "agenticrun_workers.cli", "run", "--in-process"]
    return [*run, "-f", str(folder / "run.yaml"), "-o", str(folder / "out")]


def run(folder: Path, commands: str, **pipeline: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTHONBREAKPOINT", None)  # Ray sets it in a process that has run one
    return subprocess.run(
        command(folder, **pipeline),
        input=commands,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )


def test_breakpoints_in_an_environment_and_in_the_loss_open_the_debugger(tmp_path: Path) -> None:
    """The time limit of a step does not run meanwhile, and the run goes on afterwards."""
    (tmp_path / "stopping.py").write_text(STOPPING)
    env = {"tag": "Lake", "type": "stopping:Stopping", "stepTimeoutSeconds": 1, "isolated": True}
    env |= {"config": {"size": 4}}
    done = run(
        tmp_path,
        "p 'stopped in', place\nimport time; time.sleep(2)\nc\np 'stopped in', place\nc\n",
        envs=[env],
        warmup=None,
        evalSteps=0,
        maxSteps=1,
    )
    assert "('stopped in', 'an environment')" in done.stdout, done.stdout + done.stderr
    assert "('stopped in', 'the loss')" in done.stdout
    assert "Succeeded: trained 1 step" in done.stdout
    assert done.returncode == 0


def test_ctrl_c_saves_and_ends_the_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command(tmp_path, maxSteps=10_000, saveSteps=0, evalSteps=0, warmup=None),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        eventually(
            lambda: "step 1/" in log.read_text() or process.poll() is not None, 200, "a step", 0.1
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == ExitCode.STOPPED, log.read_text()
    finally:
        process.kill()
    assert "Stopped: stopped on request after" in log.read_text()
    assert list((tmp_path / "out/checkpoints").glob("step-*"))
