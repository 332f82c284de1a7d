"""A run whose processes are killed and frozen at any moment computes what an undisturbed one does.

`make drills` sets AGENTICRUN_PROCESS_FAULTS to the number of faults. AGENTICRUN_FAULT_SEED repeats
the faults of a run, at about the same moments. AGENTICRUN_FROZEN_SECONDS is the time after which a
stopped process counts as frozen: a run has 60.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from agenticrun_api import AgenticRun, Outcome, parse_run
from agenticrun_workers.inference import EngineError
from agenticrun_workers.inference.pool import EnginePool
from agenticrun_workers.inference.transformers.engine import TransformersEngine
from agenticrun_workers.launch import liveness
from agenticrun_workers.rollout.controller import Batch, RolloutController
from agenticrun_workers.types import Generation, GenerationRequest
from agenticrun_workers.weights.sync import SyncReport
from leaks import nothing_left_behind
from sync_actors import left_in_memory
from tiny_runs import InProcessAttempt, TinyAttempt, tiny_document
from waiting import eventually_in_loop

pytestmark = pytest.mark.usefixtures("ray_node")

FAULTS = int(os.environ.get("AGENTICRUN_PROCESS_FAULTS", "0"))
Fault = tuple[str, str]
"""The class of an actor, and what happens to its process: kill, freeze (it stays stopped), pause
(it goes on before it counts as frozen), or kill when a weight sync begins."""

CORE: tuple[Fault, ...] = (
    ("EnvWorker", "freeze"),
    ("EngineActor", "pause"),
    ("EngineActor", "freeze"),
    ("EngineActor", "kill at a sync"),
    ("NodeWeights", "kill at a sync"),
    ("TrajectoryStore", "kill"),
)
"""The faults of `make test`."""
CLASSES = ("EnvWorker", "EngineActor", "NodeWeights", "TrajectoryStore")
"""Only the loss of a store ends the attempt."""
FROZEN_SECONDS = float(os.environ.get("AGENTICRUN_FROZEN_SECONDS", "10"))
PAUSE_SECONDS = 0.3 * FROZEN_SECONDS
RAY_CONNECTIONS = 6
"""Sockets that Ray keeps in the driver. Three or four were seen after the core faults."""


def faults(rng: random.Random) -> list[Fault]:
    kinds = ("kill", "freeze", "pause", "kill at a sync")
    return [(rng.choice(CLASSES), rng.choice(kinds)) for _ in range(FAULTS)] or list(CORE)


def run_of(steps: int) -> AgenticRun:
    document = tiny_document(deterministic=True, maxSteps=steps, evalSteps=0)
    document["metadata"]["name"] = f"faults-{os.getpid()}"
    return parse_run(document)


def processes_of(cls: str, but: Collection[psutil.Process]) -> list[psutil.Process]:
    """The living processes of a class of actors, except those in `but`."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if title.startswith(f"ray::{cls}") and process not in but:
                found.append(process)
    return found


class Drill:
    """Attempts of one run, one after the other, and the groups that it trained on."""

    def __init__(self, run: AgenticRun, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._others = psutil.Process().children(recursive=True)
        self.attempts: list[TinyAttempt] = []
        self._sync = asyncio.Event()

    def sync_begins(self) -> None:
        self._sync.set()

    @property
    def step(self) -> int:
        return max((attempt.sink.step for attempt in self.attempts), default=0)

    async def execute(self) -> None:
        """Train until `stop`. Another attempt follows one that lost an actor."""
        while True:
            self.attempts.append(
                TinyAttempt(self._run, self._folder, attempt=len(self.attempts) + 1)
            )
            report = await self.attempts[-1].execute()
            if report.outcome is Outcome.STOPPED:
                return
            assert report.reason == "WorkerLost", report.message

    async def another_step(self, running: asyncio.Task[None], told: str) -> None:
        """Wait until a step begins and ends."""
        step = self.step + 2
        await eventually_in_loop(
            lambda: self.step >= step or running.done(), 110 + FROZEN_SECONDS, told
        )
        if running.done():
            await running

    async def strike(self, fault: Fault, delay: float) -> psutil.Process:
        """Do it after `delay` seconds, and return the process."""
        cls, kind = fault
        await asyncio.sleep(delay)
        victims: list[psutil.Process] = []

        def there() -> bool:
            victims[:] = processes_of(cls, self._others)
            return bool(victims)

        await eventually_in_loop(there, 60, f"there is a {cls}")
        if kind == "kill at a sync":
            self._sync.clear()
            await asyncio.wait_for(self._sync.wait(), 120)
        victims[0].send_signal(signal.SIGKILL if kind.startswith("kill") else signal.SIGSTOP)
        if kind == "pause":
            await asyncio.sleep(PAUSE_SECONDS)
            victims[0].send_signal(signal.SIGCONT)
        else:
            self._others.append(victims[0])  # its successor is another one
        return victims[0]


COMPARED = ("rollout/score/mean", "tokens/response", "actor/pg_loss", "actor/grad_norm")

AGAIN = ("group/rerolled", "rollout/stale", "rollout/lost_episodes")
"""Causes that run an episode again. Only a lost worker does so with the same seed."""


async def undisturbed(steps: int, folder: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step without faults."""
    attempt = InProcessAttempt(run_of(steps), folder)
    report = await attempt.execute()
    assert report.outcome is Outcome.SUCCEEDED, report.message
    return {
        step: {name: metrics[name] for name in COMPARED}
        for step, metrics in attempt.training_steps().items()
    }


async def test_engines_that_fail_requests_cost_no_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each failure comes in the middle of many responses, which go on at the next engine."""
    expected = await undisturbed(6, tmp_path / "undisturbed")
    sample, asked, failing = TransformersEngine.generate, itertools.count(1), {3, 40, 41, 90}

    async def generate(engine: TransformersEngine, request: GenerationRequest) -> Generation:
        if next(asked) in failing:
            raise EngineError("CUDA error: an illegal memory access was encountered")
        return await sample(engine, request)

    monkeypatch.setattr(TransformersEngine, "generate", generate)
    attempt = InProcessAttempt(run_of(6), tmp_path / "failing")
    report = await attempt.execute()
    assert report.outcome is Outcome.SUCCEEDED, report.message
    assert next(asked) > max(failing)
    for step, metrics in attempt.training_steps().items():
        assert {name: metrics[name] for name in COMPARED} == expected[step], step
        assert metrics["group/rerolled"] == 0


async def test_faults_change_nothing_that_a_run_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls = round(FROZEN_SECONDS / liveness.POLL_SECONDS)
    monkeypatch.setattr(liveness, "FROZEN_POLLS", polls)
    served: list[int] = []
    batch = RolloutController.batch

    async def noted(controller: RolloutController) -> Batch:
        made = await batch(controller)
        served.extend(group.number for group in made.groups)
        return made

    monkeypatch.setattr(RolloutController, "batch", noted)
    update = EnginePool.update_weights

    async def told_of(pool: EnginePool, *arguments: Any) -> SyncReport:
        drill.sync_begins()
        await asyncio.sleep(0)  # the fault comes first
        return await update(pool, *arguments)

    monkeypatch.setattr(EnginePool, "update_weights", told_of)
    seed = int(os.environ.get("AGENTICRUN_FAULT_SEED", random.SystemRandom().randrange(2**32)))
    rng = random.Random(seed)
    planned = faults(rng)
    run = run_of(100_000)
    drill = Drill(run, tmp_path / "drilled")
    struck: list[tuple[int, Fault]] = []
    async with nothing_left_behind(connections=RAY_CONNECTIONS):
        running = asyncio.create_task(drill.execute())
        for number, fault in enumerate(planned):
            told = f"seed {seed}: a step before fault {number}, {fault}"
            await drill.another_step(running, told)
            struck.append((drill.step, fault))
            victim = await drill.strike(fault, rng.uniform(0.0, 1.0))
            await drill.another_step(running, f"seed {seed}: a step after fault {number}, {fault}")
            if fault[1] == "pause":
                assert victim.is_running(), f"seed {seed}: fault {number}, {fault}"
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGCONT)
        await drill.another_step(running, f"seed {seed}: a last step")
        drill.attempts[-1].requests.stop.set()
        await running
        for handler in logging.getLogger().handlers:  # records have errors, and these have actors
            getattr(handler, "records", []).clear()
    name = f"{run.metadata.name}-{run.metadata.uid}"
    await eventually_in_loop(lambda: not left_in_memory(name), 60, "the memory of nodes is free")

    steps = drill.attempts[-1].training_steps()
    if len(drill.attempts) == 1:
        assert sorted(served) == list(range(4 * len(steps))), f"seed {seed}"
    monkeypatch.setattr(RolloutController, "batch", batch)
    expected = await undisturbed(max(steps), tmp_path / "undisturbed")
    assert steps.keys() == expected.keys()
    wrong = {
        (step, name): (steps[step][name], value, {each: steps[step][each] for each in AGAIN})
        for step, metrics in expected.items()
        for name, value in metrics.items()
        if steps[step][name] != value
    }
    assert not wrong, f"seed {seed}, {len(drill.attempts)} attempts, {struck}: {wrong}"
    assert {metrics["staleness/max"] for metrics in steps.values()} == {0.0}
    assert steps[max(steps)]["time/step"] < 10, f"seed {seed}: the last step waits for nobody"
