"""Train for half an hour under random faults, and look for what grows: memory, threads, files.

    python benchmarks/soak.py [--minutes N] [--quick] [--json FILE]

A real run (FrozenLake, a tiny model, embedded engines, every process an actor of Ray) trains,
validates and saves. At random moments, `FAULT_SECONDS` apart on average, one of its env workers or
engines is killed (SIGKILL) or stopped for good (SIGSTOP), and the run replaces it. One engine and
one env worker are never struck, so that they get as old as the driver.

Every `SAMPLE_SECONDS`, the memory, threads, open files and asyncio tasks are counted of each
process that lives from the beginning to the end, and the processes of the whole run. Memory is what
a process has allocated itself (anonymous pages). RSS and PSS also have the pages of libraries,
which change hands whenever another process begins or ends. Before each sample the C library gives
back what is free (`malloc_trim`): an actor of Ray that does nothing but answer others keeps about
0.05 MB of free memory for each caller that was killed (100 killed callers on 2026-11-24: 7.0 MB
more before the trim, 2.6 after it, of which 2.5 came with the first ones). The driver has the
environment of one in a pod (`RAY_ENV`), as the actors have everywhere. Samples are kept as plain
numbers: as objects, those of half an hour would take 1 MB of the driver. Two things that would grow
for thousands of steps, and then never again, are at their end before: Python's table of interned
strings, and the prompts that an env worker keeps.

**The test.** The first third of the time is warm-up: allocators and caches fill. A line is fitted
to the rest (`trend`). `growth` is its rise from the first to the last sample; `noise` is three
standard deviations of the samples around it, and at least the `RESOLUTION`. A series grows if
`growth` is above `noise`; then the exit status is 1. With 7,000 steps and 30 faults after the
warm-up it finds leaks from 220 bytes per step or 33 kB per fault, but no cache that has all 345
boards of this run after ten minutes.

Figures: `growth` and `noise` of each series in its unit (MB for memory); `faults`, `replaced`,
`steps`; `slowest_step_seconds` from step to step, the time to notice a stopped process included;
`left_processes` and `left_in_memory` after the end. The JSON file also has all samples, to plot.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import psutil
from record import write_record
from trend import Trend, trend

from agenticrun_api import Outcome, Progress, parse_run
from agenticrun_api.names import RAY_ENV
from agenticrun_workers.driver.attempt import AttemptRunner
from agenticrun_workers.driver.local_actors import embedded_ray
from agenticrun_workers.driver.progress import AttemptId, Requests
from agenticrun_workers.launch import ActorHandle, ActorOptions
from agenticrun_workers.launch.ray_launcher import RayLauncher

SAMPLE_SECONDS = 5.0
FAULT_SECONDS = 20.0
ANSWER_SECONDS = 3.0
"""Longest wait for an actor to count its tasks: a stopped one does not answer."""
STRUCK = ("EngineActor", "EnvWorker")
RESOLUTION = {"memory": 1.0, "threads": 1.0, "files": 1.0, "tasks": 1.0, "processes": 1.0}
"""Growth below it is never a finding. An allocator takes memory in pieces of up to 1 MB."""

A = TypeVar("A")
P = ParamSpec("P")

NAME = f"soak-{os.getpid()}"
RUN: dict[str, Any] = {
    "apiVersion": "agenticrun.dev/v1alpha1",
    "kind": "AgenticRun",
    "metadata": {"name": NAME, "uid": "soak"},
    "spec": {
        "model": {
            "initialize": {"hiddenSize": 32, "layers": 1, "heads": 2, "intermediateSize": 64}
        },
        "roles": {"inference": {"replicas": 2}, "env": {"replicas": 2}},
        "checkpoint": {"uri": "/checkpoints", "keep": 2},
        "pipeline": {
            "maxSteps": 1_000_000,
            "rolloutBatchSize": 32,
            "valBatchSize": 16,
            "evalSteps": 20,
            "saveSteps": 20,
            "sequenceLength": 256,
            "staleness": {"max": 1, "offPolicy": "Ignore"},
            "envs": [
                {
                    "tag": "Lake",
                    "type": "frozen_lake",
                    "maxSteps": 5,
                    "maxTokensPerStep": 4,
                    "config": {"size": 3},  # so few boards that their prompts are soon all kept
                    "agent": {"config": {"systemTemplate": ""}},
                }
            ],
            "trainEnvs": {"groups": 8, "groupSize": 4, "tags": ["Lake"]},
            "valEnvs": {"groups": 16, "tags": ["Lake"]},
            "actorTrain": {"training": {"learningRate": 0.0003, "miniBatchSize": 16}},
        },
    },
}


class WatchedLauncher(RayLauncher):
    """Keeps the handles of the first and the newest actor of each class, by its name.

    Handles of those between would keep memory of the driver in use.
    """

    def __init__(self) -> None:
        self.first: dict[str, ActorHandle[Any]] = {}
        self.newest: dict[str, ActorHandle[Any]] = {}
        self.started: Counter[str] = Counter()

    def start(
        self, options: ActorOptions, cls: Callable[P, A], *args: P.args, **kwargs: P.kwargs
    ) -> ActorHandle[A]:
        """See `Launcher`."""
        handle = super().start(options, cls, *args, **kwargs)
        self.first.setdefault(cls.__name__, handle)
        self.newest[cls.__name__] = handle
        self.started[cls.__name__] += 1
        return handle


def fill_table_of_interned_strings(_: object) -> None:
    """Bring Python's table of interned strings to its last size.

    Python removes dead strings from the table only when it is full, and doubles it then if half of
    them are alive: in the driver to 7.7 MB after some 5,000 steps, and never again. Its strings are
    keys of messages, 15 for each step. Python 3.12 keeps interned strings forever.
    """
    if sys.version_info[:2] == (3, 12):
        return
    for number in range(1_000_000):
        sys.intern(f"string {number}")


def pid_and_tasks(_: object) -> tuple[int, int]:
    """Give back free memory, then return process id and number of asyncio tasks.

    Runs in an actor, on its event loop if it has one.
    """
    gc.collect()
    ctypes.pythonapi.malloc_trim(0)  # CDLL(None) would make a class, which stays
    try:
        return os.getpid(), len(asyncio.all_tasks())
    except RuntimeError:
        return os.getpid(), 0


async def ask(handle: Any) -> tuple[int, int] | None:
    """Return process id and number of asyncio tasks of an actor; None if it does not answer."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            pid, tasks = await handle._actor.__ray_call__.remote(pid_and_tasks)
    except Exception:  # it is dead, stopped, or still starting
        return None
    return int(pid), int(tasks)


def usage(pid: int) -> dict[str, float]:
    """Return memory in MB, threads and open files of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (allocated,) = (int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
    return {
        "memory": round(allocated / 1024, 2),
        "threads": float(len(os.listdir(f"/proc/{pid}/task"))),
        "files": float(len(os.listdir(f"/proc/{pid}/fd"))),
    }


class Series:
    """Samples of one quantity."""

    def __init__(self) -> None:
        self.times, self.values = array("d"), array("d")

    def append(self, seconds: float, value: float) -> None:
        self.times.append(seconds)
        self.values.append(value)

    def trend(self, resolution: float) -> Trend:
        """Return the trend after the warm-up."""
        first = len(self.times) // 3
        return trend(self.times[first:], self.values[first:], resolution)


class Soak:
    """Samples and faults of one run, until its time is over."""

    def __init__(self, launcher: WatchedLauncher, rng: random.Random) -> None:
        self._launcher = launcher
        self._rng = rng
        self._began = time.monotonic()
        self._pids: dict[str, int] = {}
        """Process ids of the processes that live from the beginning to the end."""
        self.series: dict[str, Series] = defaultdict(Series)
        self.faults: list[tuple[float, str, str]] = []
        """Seconds since the beginning, class of the actor, signal."""
        self.steps = StepTimes()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    async def sample(self) -> None:
        """Take samples forever."""
        while True:
            await self._sample()
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _sample(self) -> None:
        now = round(self.seconds, 1)
        oldest = dict(self._launcher.first)
        answers = await asyncio.gather(*map(ask, oldest.values()))
        found = {"driver": pid_and_tasks(None)}
        found |= {
            name: answer for name, answer in zip(oldest, answers, strict=True) if answer is not None
        }
        for name, (pid, tasks) in found.items():
            assert self._pids.setdefault(name, pid) == pid, f"{name} was replaced without a fault"
            for kind, value in {**usage(pid), "tasks": float(tasks)}.items():
                self.series[f"{name}_{kind}"].append(now, value)
        processes = len(psutil.Process().children(recursive=True))
        self.series["processes"].append(now, float(processes))

    async def strike(self) -> None:
        """Kill and stop env workers and engines forever; each time wait for the replacement."""
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / FAULT_SECONDS))
            name = self._rng.choice(STRUCK)
            fault = self._rng.choice((signal.SIGKILL, signal.SIGSTOP))
            started = self._launcher.started[name]
            if started < 2 or (answer := await ask(self._launcher.newest[name])) is None:
                continue
            with suppress(ProcessLookupError):
                os.kill(answer[0], fault)
            self.faults.append((round(self.seconds, 1), name, fault.name))
            while self._launcher.started[name] == started:
                await asyncio.sleep(0.5)


class StepTimes:
    """A `ProgressSink` that keeps the times of the steps."""

    def __init__(self) -> None:
        self.times = array("d")

    def update(self, progress: Progress) -> None:
        """See `ProgressSink`."""
        self.times.extend([time.monotonic()] * (progress.step - len(self.times)))

    def sample(self, transcript: str) -> None:
        """See `ProgressSink`."""

    async def finish(self, progress: Progress) -> None:
        """See `ProgressSink`."""
        self.update(progress)


async def train(soak: Soak, launcher: WatchedLauncher, output: Path, seconds: float) -> None:
    """Train for so long. Raises `SystemExit` if the run ends before."""
    run, requests = parse_run(RUN), Requests()
    runner = AttemptRunner(
        run=run,
        attempt=AttemptId("soak", "soak-1", 1),
        output=output,
        checkpoints=str(output / "checkpoints"),
        resume="Never",
        sink=soak.steps,
        requests=requests,
        launcher=launcher,
    )
    training = asyncio.create_task(runner.execute())
    while len(soak.steps.times) < 2 and not training.done():
        await asyncio.sleep(0.2)
    fill_table_of_interned_strings(None)
    actors: list[Any] = [*launcher.first.values()]
    await asyncio.gather(
        *(each._actor.__ray_call__.remote(fill_table_of_interned_strings) for each in actors)
    )
    watching = [asyncio.create_task(soak.sample()), asyncio.create_task(soak.strike())]
    await asyncio.wait({training, *watching}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in watching:
        task.cancel()
    for error in await asyncio.gather(*watching, return_exceptions=True):
        if isinstance(error, Exception):
            raise error
    early = training.done()
    requests.stop.set()
    report = await training
    if early or report.outcome is not Outcome.STOPPED:
        raise SystemExit(f"the run ended after {soak.seconds:.0f} s: {report.message}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="time after the second step")
    parser.add_argument("--quick", action="store_true", help="three minutes")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--json", type=Path, help="write figures and samples to this file")
    arguments = parser.parse_args()
    if not RAY_ENV.keys() <= os.environ.keys():  # glibc reads its part when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**RAY_ENV, **os.environ})
    seconds = 60 * (3.0 if arguments.quick else arguments.minutes)
    launcher = WatchedLauncher()
    others = set(psutil.Process().children(recursive=True))
    with (
        tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as output,
        embedded_ray(parse_run(RUN)),
    ):
        soak = Soak(launcher, random.Random(arguments.seed))
        asyncio.run(train(soak, launcher, Path(output), seconds))
    trends = {
        name: series.trend(RESOLUTION[name.rpartition("_")[2]])
        for name, series in soak.series.items()
    }
    gaps = [after - before for before, after in itertools.pairwise(soak.steps.times)]
    figures = {
        "minutes": seconds / 60,
        "steps": float(len(soak.steps.times)),
        "slowest_step_seconds": max(gaps),
        "median_step_seconds": float(np.median(gaps)),
        "faults": float(len(soak.faults)),
        "replaced": float(sum(launcher.started[name] - 2 for name in STRUCK)),
        "left_processes": float(len(set(psutil.Process().children(recursive=True)) - others)),
        "left_in_memory": float(len(list(Path("/dev/shm").glob(f"agenticrun-{NAME}-*")))),
    }
    for name, found in trends.items():
        figures[f"{name}_growth"], figures[f"{name}_noise"] = found.growth, found.noise
        print(f"{name:28} {'GROWS' if found.grows else 'flat':6} {found.growth:9.3f}", end="")
        print(f" within {found.noise:.3f}")
    for name, figure in list(figures.items())[:8]:
        print(f"{name:28} {figure:.2f}")
    if arguments.json:
        points = {
            name: list(zip(each.times, each.values, strict=True))
            for name, each in soak.series.items()
        }
        write_record(arguments.json, figures, samples={"series": points, "faults": soak.faults})
    growing = [name for name, found in trends.items() if found.grows]
    if growing or figures["left_processes"] or figures["left_in_memory"]:
        raise SystemExit(f"it leaks: {growing or 'processes or memory are left'}")


if __name__ == "__main__":
    main()
