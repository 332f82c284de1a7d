"""`pipeline.deterministic`: one seed is one run, bit for bit, on Ray or not, and after kills."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from agenticrun_api import parse_run
from agenticrun_workers.driver.checkpoints import MANIFEST
from agenticrun_workers.driver.export import export_checkpoint
from curves import Curve, read_curve
from preloaded import environment, executable
from processes import of_session, ray_folders
from tiny_runs import tiny_document
from waiting import eventually

KILLS = int(os.environ.get("AGENTICRUN_DETERMINISTIC_KILLS", "2"))
"""`make drills` kills 20 times."""

pytestmark = pytest.mark.timeout(600 * (KILLS + 1))

STEPS = 10 if KILLS <= 2 else 60
AFTER_STEPS = range(5, 5 + 2 * KILLS, 2)
"""When it is killed. `saveSteps` is 2, and a save ends before the next one, so two steps before it
there is a checkpoint."""

STEP = re.compile(r"\bstep (\d+)/")

RAY_AGENT = re.compile(r"ray::\w+Agent")
"""Looks once a minute whether its Ray is gone."""


def document() -> dict[str, Any]:
    """Return a run with every kind of state.

    Critic, reference, adaptive KL, schedules, several optimizer steps, a guard that counts.
    """
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
        actorTrain={
            "training": {
                "learningRate": 0.003,
                "miniBatchSize": 4,
                "lrSchedulerType": "cosine",
                "warmupSteps": 3,
            }
        },
    )
    del run["metadata"]["uid"]
    return run


class Command:
    """A running `agenticrun run` in `folder`, whose actors are preloaded processes.

    Args:
        preloaded: so is the command. Then it cannot be killed with all that it has started, because
            its session is another one.
    """

    def __init__(self, folder: Path, *options: str, preloaded: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(document()))
        self._log = folder / f"log-{time.monotonic_ns()}"
        self._others = ray_folders()
        command = [
            *(executable() if preloaded else [sys.executable]),
            "-m",
            "agenticrun_workers.cli",
            "run",
            "-f",
            str(file),
            "-o",
            str(folder / "out"),
            *options,
        ]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | environment(),
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """If a failure has left it running, end it with all that it started."""
        if self.process.poll() is None:
            self._end_group()
            self.process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def finish(self) -> Curve:
        """The run's metrics at its end."""
        assert self.process.wait(1200) == 0, self.log
        return read_curve(self.folder / "out")

    def kill(self, after_step: int, seconds: float) -> bool:
        """SIGKILL the driver some seconds after a step, or after its first one if that is later.

        Returns False if the run was done before.
        """

        def there() -> bool:
            return any(int(step) >= after_step for step in STEP.findall(self.log))

        eventually(
            lambda: there() or self.process.poll() is not None, 1200, f"step {after_step}", 0.02
        )
        time.sleep(seconds)
        self.process.kill()
        if self.process.wait() != -signal.SIGKILL:
            assert self.process.returncode == 0, self.log
            return False
        eventually(
            lambda: all(RAY_AGENT.search(line) for line in of_session(self.process.pid)),
            120,
            "only Ray's agents live on, for a minute",
            0.1,
        )
        self._end_group()
        eventually(lambda: not of_session(self.process.pid), 30, "nothing lives on", 0.1)
        for folder in ray_folders(self.process.pid) - self._others:
            shutil.rmtree(folder)
        return True

    def _end_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def killed_and_gone_on_with(folder: Path, rng: random.Random) -> Curve | None:
    """The metrics of a run that was killed `KILLS` times; None if it was done before."""
    for after_step in AFTER_STEPS:
        with Command(folder) as command:
            if not command.kill(after_step, rng.uniform(0.0, 0.3)):
                return None
            assert ("[warm-up]" in command.log) == (after_step == AFTER_STEPS[0]), (
                "it goes on, and does not begin anew"
            )
        assert any((folder / "out/checkpoints").glob(f"step-*/{MANIFEST}"))
    with Command(folder, preloaded=True) as command:
        metrics = command.finish()
        assert "[warm-up]" not in command.log
        return metrics


def weights(folder: Path) -> bytes:
    """The policy of the last checkpoint, as a file."""
    run = parse_run(document())
    export_checkpoint(run, str(folder / "out/checkpoints"), folder / "exported")
    return (folder / "exported/model.safetensors").read_bytes()


def test_a_killed_run_on_ray_trains_the_policy_of_one_undisturbed_process_bit_for_bit(
    tmp_path: Path,
) -> None:
    with Command(tmp_path / "whole", "--in-process", preloaded=True) as command:
        expected = command.finish()
    assert sorted(step for step, validation in expected if not validation) == list(
        range(1, STEPS + 1)
    )
    rng = random.Random(KILLS)
    folders = [tmp_path / f"killed-{number}" for number in range(3)]
    tries = ((folder, killed_and_gone_on_with(folder, rng)) for folder in folders)
    killed = next((found for found in tries if found[1] is not None), None)
    assert killed is not None, "three times it was done before it was killed: train more steps"
    folder, metrics = killed
    assert metrics == expected
    assert weights(folder) == weights(tmp_path / "whole")
