"""`agenticrun run --in-process`: a debugger in the terminal stops where the user's code runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

from tiny_runs import tiny_document

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


def run(folder: Path, commands: str, **pipeline: object) -> subprocess.CompletedProcess[str]:
    document = tiny_document(**pipeline)
    del document["metadata"]["uid"]
    (folder / "run.yaml").write_text(yaml.safe_dump(document))
    command = [*(sys.executable, "-m", "agenticrun_workers.cli", "run", "--in-process")]
    command += ["-f", str(folder / "run.yaml"), "-o", str(folder / "out")]
    return subprocess.run(
        command,
        input=commands,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
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
    assert "Succeeded: trained 1 steps" in done.stdout
    assert done.returncode == 0
