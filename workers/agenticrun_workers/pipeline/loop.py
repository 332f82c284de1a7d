"""The training loop. It reads like the algorithm:

    for each step v:
        give the engines the weights of version v
        validate, where due
        roll out a batch (the gate of version v opens)
        advantages from the group's scores
        train on it: version v + 1
        log, save

With `staleness.max = 0` the gate lets exactly one batch begin per version, which is the synchronous algorithm; with more,
rollout goes on while this loop trains.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from agenticrun_api import Activity, Pipeline
from agenticrun_api.status import CheckpointStatus
from agenticrun_workers.pipeline.advantages import compute_advantages
from agenticrun_workers.pipeline.batch_plan import RankJob, plan_batch
from agenticrun_workers.pipeline.board import ProgressBoard
from agenticrun_workers.pipeline.checkpoints import Checkpoint, CheckpointStore, DriverState
from agenticrun_workers.pipeline.metrics import Metrics, rollout_metrics, success_of
from agenticrun_workers.pipeline.requests import Requests, StopRequested
from agenticrun_workers.pipeline.validation import Validator, warmup_success
from agenticrun_workers.pipeline.warmup import Warmup
from agenticrun_workers.reporting.metrics_log import Tracker
from agenticrun_workers.rollout.controller import Batch, Discard, RolloutController

T = TypeVar("T")


class Trainer(Protocol):
    """What the loop asks of the trainer ranks."""

    @property
    def ranks(self) -> int: ...

    async def train(self, jobs: list[RankJob]) -> Metrics: ...

    def export_weights(self) -> Any: ...

    async def save(self, folder: Path) -> None: ...


class Engines(Protocol):
    """What the loop asks of the engines."""

    async def update_weights(self, weights: Any, version: int) -> None: ...


@dataclass
class LoopParts:
    """Everything that the loop drives."""

    pipeline: Pipeline
    trainers: Trainer
    engines: Engines
    rollout: RolloutController
    validator: Validator
    warmup: Warmup
    discard: Discard
    checkpoints: CheckpointStore | None
    trackers: list[Tracker]
    board: ProgressBoard
    requests: Requests
    failures: list[asyncio.Future[None]] = field(default_factory=list)
    """Each fails when a part of the run cannot be kept alive."""


class Loop:
    """One attempt, from its checkpoint (or the beginning) to the last step.

    Args:
        resume: the driver's state of the checkpoint that the trainers have loaded; None for a fresh run.
    """

    def __init__(self, parts: LoopParts, resume: DriverState | None) -> None:
        self._parts = parts
        self._fresh = resume is None
        self._step = resume.step if resume else 0
        self._best = resume.best_success if resume else None
        self._baselines = dict(resume.baselines) if resume else {}
        self._seconds: dict[str, float] = {}
        self.last_validation: Metrics = {}
        """The newest val/... metrics."""

    @property
    def baselines(self) -> Metrics:
        """val/<tag>/random_success and val/<tag>/warmup_success."""
        return self._baselines

    async def run(self) -> None:
        """Train to the end. Raises `StopRequested` after saving if asked to stop."""
        max_steps = self._parts.pipeline.max_steps
        try:
            if self._fresh:
                await self._warm_up()
            self._parts.board.started()
            while self._step < max_steps:
                with self._timed("step"):
                    await self._sync_weights()
                    await self._validate_if_due()
                    batch = await self._roll_out()
                    metrics = await self._train(batch)
                self._step += 1
                self._log(batch, metrics)
                await self._save_if_due()
            await self._sync_weights()
            await self._validate_if_due()
            await self._save()
        except StopRequested:
            self._parts.board.activity(Activity.STOPPING)
            if not self._fresh:
                await self._save()
            raise

    async def _warm_up(self) -> None:
        """Supervised steps before step 0 of a fresh run, and what the random policy scores for comparison."""
        self._parts.board.activity(Activity.WARMUP)
        steps = self._parts.pipeline.warmup.steps if self._parts.pipeline.warmup else 0
        done = 0
        async for metrics in self._parts.warmup.steps():
            self._parts.requests.check_stop()
            done += 1
            self._parts.board.metrics(metrics)
            self._parts.board.activity(Activity.WARMUP, f"warm-up step {done} of {steps}, loss {metrics['warmup/loss']:.3f}")
        if self._parts.validator.enabled:
            self._baselines = await self._guarded(self._parts.validator.random_baseline())
        self._fresh = False

    async def _sync_weights(self) -> None:
        with self._timed("sync"):
            await self._parts.engines.update_weights(self._parts.trainers.export_weights(), self._step)

    async def _validate_if_due(self) -> None:
        if not self._parts.validator.due(self._step):
            return
        self._parts.board.activity(Activity.VALIDATION)
        with self._timed("val"):
            metrics = await self._guarded(self._parts.validator.run())
        if self._step == 0:
            self._baselines |= warmup_success(metrics)
        self.last_validation = metrics
        success = success_of(metrics)
        if success is not None:
            self._best = success if self._best is None else max(success, self._best)
            metrics = {**metrics, "val/success/best": self._best}
        metrics = {**self._baselines, **metrics}
        for tracker in self._parts.trackers:
            tracker.log(self._step, metrics)
        self._parts.board.metrics(metrics)

    async def _roll_out(self) -> Batch:
        self._parts.board.activity(Activity.ROLLOUT)
        self._parts.rollout.advance(self._step)
        with self._timed("rollout"):
            return await self._guarded(self._parts.rollout.batch())

    async def _train(self, batch: Batch) -> Metrics:
        """Advantages, then all optimizer steps of this batch."""
        self._parts.board.activity(Activity.TRAINING)
        with self._timed("train"):
            advantages = compute_advantages(self._parts.pipeline, batch.results)
            jobs = plan_batch(self._parts.pipeline, batch.groups, advantages.per_trajectory, self._parts.trainers.ranks, self._step + 1)
            metrics = await self._parts.trainers.train(jobs)
            await self._parts.discard(batch.results)
        return {
            **rollout_metrics(batch, self._step),
            **metrics,
            "group/zero_variance_share": advantages.zero_variance_share,
            "group/degenerate": float(advantages.degenerate),
        }

    def _log(self, batch: Batch, metrics: Metrics) -> None:
        seconds, self._seconds = self._seconds, {}
        working = seconds["step"] - seconds.get("val", 0.0)
        metrics |= {f"time/{phase}": value for phase, value in seconds.items()}
        metrics |= {
            "weight_sync/seconds": seconds["sync"],
            "system/tps": (metrics["tokens/prompt"] + metrics["tokens/response"]) / working,
        }
        for tracker in self._parts.trackers:
            tracker.log(self._step, metrics)
        self._parts.board.step_done(self._step, metrics)
        for transcript in (result.transcript for result in batch.results if result.transcript):
            self._parts.board.sample(transcript)

    async def _save_if_due(self) -> None:
        asked = self._parts.requests.take_checkpoint()
        every = self._parts.pipeline.save_steps
        if asked or (every and self._step % every == 0 and self._step < self._parts.pipeline.max_steps):
            await self._save()

    async def _save(self) -> None:
        if self._parts.checkpoints is None:
            return
        self._parts.board.activity(Activity.CHECKPOINT)
        position = self._parts.rollout.position
        state = DriverState(self._step, position.next_group, position.again, self._best, self._baselines)
        with self._timed("checkpoint"):
            saved = await self._parts.checkpoints.save(state, self._parts.trainers.save)
        self._parts.board.checkpoint(checkpoint_status(saved))

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, a stop request, or a part of the run that cannot be kept alive."""
        return await self._parts.requests.unless_stopped(work, self._parts.failures)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - begin


def checkpoint_status(checkpoint: Checkpoint) -> CheckpointStatus:
    """As a snapshot tells it."""
    return CheckpointStatus(step=checkpoint.step, uri=str(checkpoint.folder), time=checkpoint.time)
