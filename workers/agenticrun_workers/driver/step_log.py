"""The record of a step: what it measured goes to trackers, progress, guards, samples and traces."""

from __future__ import annotations

import logging

from agenticrun_api import Activity
from agenticrun_workers.driver.engine_time import EngineTime
from agenticrun_workers.driver.guards import GuardState, GuardWatch
from agenticrun_workers.driver.metrics import (
    Metrics,
    Stopwatch,
    rollout_metrics,
    sync_metrics,
    timing_metrics,
)
from agenticrun_workers.driver.parts import LoopParts
from agenticrun_workers.rollout.controller import Batch
from agenticrun_workers.tracing import count
from agenticrun_workers.weights.sync import SyncReport

log = logging.getLogger(__name__)

TRACED_METRICS = ("staleness/mean", "staleness/max", "rollout/queue_depth")
"""Metrics of steps that are counters in a trace."""


class StepLog:
    """Collects the metrics of each step.

    Args:
        parts: of the loop.
        guards: the state of the guards in a checkpoint; None at the start of a run.

    Attributes:
        sync: the weight sync of this step, if it had one.
        saved_seconds: seconds from a save to its publication, if that was in this step.
    """

    def __init__(self, parts: LoopParts, guards: GuardState | None) -> None:
        self._parts = parts
        self.stopwatch = Stopwatch()
        self.engine_time = EngineTime(parts.engines, parts.actors)
        self.guards = GuardWatch(parts.pipeline.guards, guards)
        self.sync: SyncReport | None = None
        self.saved_seconds: float | None = None

    def measured(self, step: int, metrics: Metrics) -> None:
        """Log metrics that are not those of a step."""
        for tracker in self._parts.trackers:
            tracker.log(step, metrics)
        self._parts.progress.metrics(metrics)

    async def step(self, step: int, batch: Batch, learned: Metrics) -> None:
        """Log a step.

        Args:
            step: completed training steps.
            batch: what it was trained on.
            learned: the metrics of the training, which replace the batch's of the same name.
        """
        parts, pipeline = self._parts, self._parts.pipeline
        metrics = {**rollout_metrics(batch, step - 1), **learned}
        metrics["rollout/truncated_sampling"] = float(
            pipeline.actor_infer.generating.allow_truncated_sampling
        )
        engines = await self.engine_time.metrics()
        seconds = self.stopwatch.reset()
        metrics |= timing_metrics(seconds, metrics["tokens/prompt"] + metrics["tokens/response"])
        metrics |= sync_metrics(self.sync, lora=pipeline.actor_train.lora is not None)
        if parts.devices:
            metrics["system/handovers"] = float(parts.devices.handovers)
        if self.saved_seconds is not None:
            metrics["checkpoint/seconds"] = self.saved_seconds
        # A step without a sync or a checkpoint must not report the last one again.
        self.sync = self.saved_seconds = None
        metrics["rollout/aborted_tokens"] += engines.pop("rollout/aborted_tokens")
        metrics |= engines | await parts.actors.metrics()
        for name in TRACED_METRICS:
            count(name, metrics[name])
        watched = self.guards.observe(metrics)
        metrics |= watched.metrics
        for tracker in parts.trackers:
            tracker.log(step, metrics)
        parts.progress.step_done(step, metrics)
        for message in watched.messages:
            log.warning("%s", message)
            parts.progress.activity(Activity.TRAINING, message)
        if parts.samples.due(step):
            parts.samples.write(step, batch.results)
        for transcript in (result.transcript for result in batch.results if result.transcript):
            parts.progress.sample(transcript)
