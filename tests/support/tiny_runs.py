"""Runs that train in seconds, and an attempt of one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from agenticrun_api import AgenticRun, FinalReport, Progress, parse_run
from agenticrun_workers.driver.attempt import AttemptRunner
from agenticrun_workers.driver.local_actors import check_in_process, threads_of_this_process
from agenticrun_workers.driver.progress import AttemptId, Requests
from agenticrun_workers.launch import Launcher
from agenticrun_workers.launch.ray_launcher import RayLauncher

ROOT = Path(__file__).parents[2]


def tiny_document(**pipeline: Any) -> dict[str, Any]:
    """Return a complete AgenticRun with a tiny model; `pipeline` replaces fields of the spec."""
    return {
        "apiVersion": "agenticrun.dev/v1alpha1",
        "kind": "AgenticRun",
        "metadata": {"name": "tiny", "uid": "tiny-uid"},
        "spec": {
            "model": {
                "initialize": {"hiddenSize": 16, "layers": 1, "heads": 2, "intermediateSize": 32}
            },
            "tracking": {"tensorboard": False},
            "pipeline": {
                "seed": 3,
                "maxSteps": 3,
                "rolloutBatchSize": 8,
                "valBatchSize": 8,
                "evalSteps": 2,
                "saveSteps": 1,
                "sequenceLength": 256,
                "warmup": {"steps": 2, "batchSize": 4},
                "envs": [
                    {
                        "tag": "Lake",
                        "type": "frozen_lake",
                        "maxSteps": 3,
                        "maxTokensPerStep": 2,
                        "agent": {"config": {"systemTemplate": ""}},
                    }
                ],
                "trainEnvs": {"groups": 4, "groupSize": 2, "tags": ["Lake"]},
                "valEnvs": {"groups": 8, "tags": ["Lake"]},
                "actorTrain": {"training": {"learningRate": 0.003, "miniBatchSize": 4}},
                **pipeline,
            },
        },
    }


def tiny_run(**pipeline: Any) -> AgenticRun:
    return parse_run(tiny_document(**pipeline))


class CollectingSink:
    """Keeps every snapshot."""

    def __init__(self) -> None:
        self.snapshots: list[Progress] = []

    def update(self, progress: Progress) -> None:
        self.snapshots.append(progress)

    def sample(self, transcript: str) -> None: ...

    async def finish(self, progress: Progress) -> None:
        self.update(progress)

    @property
    def step(self) -> int:
        return self.snapshots[-1].step if self.snapshots else 0


class TinyAttempt:
    """One attempt of a run in `folder`. `execute` needs an initialised Ray with the run's roles."""

    def __init__(self, run: AgenticRun, folder: Path, *, attempt: int = 1) -> None:
        self.sink = CollectingSink()
        self.requests = Requests()
        self._run = run
        self._attempt = attempt
        self._folder = folder

    async def execute(self) -> FinalReport:
        return await self._execute(RayLauncher())

    async def _execute(self, launcher: Launcher) -> FinalReport:
        runner = AttemptRunner(
            run=self._run,
            attempt=AttemptId(self._run.metadata.uid or "", f"tiny-{self._attempt}", self._attempt),
            output=self._folder,
            checkpoints=str(self._folder / "checkpoints"),
            resume="Auto",
            sink=self.sink,
            requests=self.requests,
            launcher=launcher,
        )
        return await runner.execute()

    def training_steps(self) -> dict[int, dict[str, float]]:
        """The logged metrics of each training step."""
        return {int(line["step"]): line for line in self._logged() if "system/tps" in line}

    def parity_gap(self) -> float:
        """The difference of engines and trainer at the start."""
        (found,) = (line for line in self._logged() if "engine/parity_gap" in line)
        return found["engine/parity_gap"]

    def _logged(self) -> list[dict[str, float]]:
        text = (self._folder / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]


class InProcessAttempt(TinyAttempt):
    """An attempt with all actors in this process, for tests that are not about Ray.

    It saves the start of Ray and of seven processes that import torch.
    """

    async def execute(self) -> FinalReport:
        check_in_process(self._run)
        if str(ROOT) not in sys.path:  # where Ray's workers find the modules of examples
            sys.path.append(str(ROOT))
        with threads_of_this_process(self._folder / "engines") as launcher:
            return await self._execute(launcher)
