"""The parts of a training loop, put together once for each attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agenticrun_api import AgenticRun, Pipeline
from agenticrun_workers.driver.checkpoints import CheckpointStore, DriverState, SaveModule
from agenticrun_workers.driver.engine_time import MeasuredEngines
from agenticrun_workers.driver.evaluation import Validator
from agenticrun_workers.driver.metrics import Metrics
from agenticrun_workers.driver.parity import ParityCheck
from agenticrun_workers.driver.progress import ProgressReporter, Requests
from agenticrun_workers.driver.run_actors import RunActors
from agenticrun_workers.driver.samples import SampleWriter
from agenticrun_workers.driver.shared_devices import SharedDevices
from agenticrun_workers.driver.step import Trainers
from agenticrun_workers.driver.trace import TraceSession
from agenticrun_workers.driver.warmup import Warmup
from agenticrun_workers.reporting.trackers import Tracker, build_trackers, custom_tracker
from agenticrun_workers.rollout.controller import Batch, RolloutController
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.rollout.recording import record_or_replay
from agenticrun_workers.trainer.own_functions import check_own_functions
from agenticrun_workers.types import RolloutPosition
from agenticrun_workers.weights.sync import SyncReport, WeightSync


class Trainer(Trainers, Protocol):
    """The trainer ranks, as the loop uses them; `TrainerGroup` explains each call."""

    @property
    def savers(self) -> Mapping[str, SaveModule]: ...

    @property
    def weights(self) -> WeightSync: ...

    async def freeze_reference(self) -> None: ...

    async def stretch_schedules(self, step: int, max_steps: int) -> None: ...


class Actors(Protocol):
    """The actors of the attempt, as the loop uses them; `RunActors` explains each member."""

    @property
    def idle_seconds(self) -> float: ...

    async def discard(self, results: list[EpisodeResult], /) -> None: ...

    async def metrics(self) -> Metrics: ...


class Rollout(Protocol):
    """A source of batches: the rollout controller, or a recording."""

    @property
    def position(self) -> RolloutPosition: ...

    def advance(self, version: int, engine_version: int) -> None: ...

    async def batch(self) -> Batch: ...


class Engines(MeasuredEngines, Protocol):
    """The inference engines, as the loop uses them; see `EnginePool`."""

    async def update_weights(
        self,
        weights: WeightSync,
        version: int,
        handover: Callable[[], Awaitable[None]] | None = None,
    ) -> SyncReport: ...


@dataclass
class LoopParts:
    """The collaborators of the loop."""

    pipeline: Pipeline
    trainers: Trainer
    engines: Engines
    actors: Actors
    rollout: Rollout
    validator: Validator
    warmup: Warmup
    checkpoints: CheckpointStore | None
    trackers: list[Tracker]
    samples: SampleWriter
    progress: ProgressReporter
    requests: Requests
    devices: SharedDevices | None = None
    """Set where engines and trainers use the same GPUs in turn."""
    restarted: bool = False
    """True for a later attempt of a run."""
    failures: list[asyncio.Future[None]] = field(default_factory=list)
    """Each fails when actors of the run die and cannot be replaced."""
    parity: ParityCheck | None = None
    """Compares engines and trainer after the first weight sync."""
    trace: TraceSession | None = None
    """Records steps that `agenticrun trace` asks for."""


def check_plugins(run: AgenticRun) -> None:
    """Check the user's losses, estimators and tracker, which needs no actor.

    Raises:
        InvalidConfig: one of them cannot be used.
    """
    check_own_functions(run.spec.pipeline)
    custom_tracker(run)


@asynccontextmanager
async def loop_parts(
    run: AgenticRun,
    output: Path,
    actors: RunActors,
    state: DriverState | None,
    *,
    checkpoints: CheckpointStore | None,
    progress: ProgressReporter,
    requests: Requests,
    restarted: bool,
    failures: list[asyncio.Future[None]],
) -> AsyncIterator[LoopParts]:
    """Make the parts of a loop. Traces, rollout and trackers end with the `with` block.

    Args:
        run: the run.
        output: the output folder.
        actors: of the attempt.
        state: the driver's state in the checkpoint that the trainers have loaded; None for a fresh
            run.
        checkpoints, progress, requests, restarted, failures: see `LoopParts`.
    """
    pipeline, tracking = run.spec.pipeline, run.spec.tracking
    trainers, engines, envs = actors.trainers, actors.pools.engines, actors.pools.envs
    first = state.step if state else 0
    samples = SampleWriter(output, tracking, pipeline)
    controller = RolloutController.of(
        pipeline,
        envs,
        discard=actors.discard,
        position=state.position if state else RolloutPosition(),
        transcripts=tracking.sample_logs,
        frames=samples.frames,
    )
    rollout = await record_or_replay(pipeline, controller, actors.stores, first)
    trackers = await asyncio.to_thread(
        build_trackers, run, output, first, lambda: progress.max_steps
    )
    trace = TraceSession(output, run.metadata.name, actors.traced, actors.counters)
    parts = LoopParts(
        pipeline=pipeline,
        trainers=trainers,
        engines=engines,
        actors=actors,
        rollout=rollout,
        validator=Validator(
            envs, pipeline, resumed=state, transcripts=tracking.sample_logs, frames=samples.frames
        ),
        warmup=Warmup(envs, trainers, pipeline, actors.discard),
        checkpoints=checkpoints,
        trackers=trackers,
        samples=samples,
        progress=progress,
        requests=requests,
        devices=SharedDevices(trainers, engines) if run.spec.colocated else None,
        restarted=restarted,
        failures=failures,
        trace=trace,
        parity=ParityCheck(trainers, engines, pipeline),
    )
    try:
        with trace.recorder.main:
            yield parts
    finally:
        # Before the actors end: the recordings of their processes are collected here.
        await trace.close()
        await rollout.stop()
        for tracker in trackers:
            await asyncio.to_thread(tracker.close)
