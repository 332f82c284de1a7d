"""`pipeline.deterministic`: a driver that is killed at any moment goes on bit for bit, and one seed is one run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tiny_runs import tiny_document

KILLS = int(os.environ.get("AGENTICRUN_DETERMINISTIC_KILLS", "2"))
"""`make drills` kills 20 times."""

STEPS = 8 if KILLS <= 2 else 60
WALL_CLOCK = ("time", "system/tps", "weight_sync/seconds", "train/tokens_per_second", "engine/engine-", "rollout/utilization")
"""Metrics that are about the machine and not about the run."""


def document() -> dict[str, Any]:
    """A run with every kind of state: critic, reference, adaptive KL, schedules, several optimizer steps, a guard that counts."""
    run = tiny_document(
        deterministic=True,
        maxSteps=STEPS,
        evalSteps=3,
        saveSteps=2,
        criticWarmup=1,
        guards={"minEntropy": 5.0, "patience": 3},
        algorithm={
            "name": "gae",
            "whitenAdvantages": True,
            "ppoEpochs": 2,
            "entropyLossCoef": 0.01,
            "rewardKl": {"coef": 0.1, "targetKl": 0.01, "horizon": 64},
            "lossKl": {"coef": 0.01},
        },
        critic={"training": {"learningRate": 0.01}},
        actorTrain={"training": {"learningRate": 0.003, "miniBatchSize": 4, "lrSchedulerType": "cosine", "warmupSteps": 3}},
    )
    del run["metadata"]["uid"]
    return run


class Command:
    """A running `agenticrun run` in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(document()))
        self.log = folder / f"log-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "agenticrun_workers.cli", "run", "-f", str(file), "-o", str(folder / "out")]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def finish(self) -> dict[tuple[int, bool], dict[str, float]]:
        """The run's metrics at its end, by step and whether they are a validation's."""
        assert self.process.wait(300) == 0, self.log.read_text()
        lines = [json.loads(line) for line in (self.folder / "out/metrics.jsonl").read_text().splitlines()]
        return {
            (line["step"], "system/tps" not in line): {name: value for name, value in line.items() if not name.startswith(WALL_CLOCK)}
            for line in lines
        }

    def kill(self, after: float) -> bool:
        """SIGKILL the driver so many seconds after it began to train; False if it was done before."""
        while "[warm-up]" not in self.log.read_text() and "step " not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        time.sleep(after)
        if self.process.poll() is not None:
            return False
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for _ in range(200):  # the actors and daemons of its Ray end by themselves
            if not subprocess.run(["ps", "-o", "pid=", "--sid", str(self.process.pid)], capture_output=True, text=True).stdout.strip():
                return True
            time.sleep(0.1)
        os.killpg(self.process.pid, signal.SIGKILL)
        return True


def test_a_killed_run_goes_on_bit_for_bit_and_a_seed_is_a_run(tmp_path: Path) -> None:
    whole = Command(tmp_path / "whole").finish()
    assert sorted(step for step, validation in whole if not validation) == list(range(1, STEPS + 1))
    moments = random.Random(KILLS)
    kills = 0
    while kills < KILLS:
        assert Command(tmp_path / "killed").kill(moments.uniform(0.0, 4.0)), f"done after {kills} kills: train more steps"
        kills += 1
    assert Command(tmp_path / "killed").finish() == whole
