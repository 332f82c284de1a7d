"""Reports of steps: their metrics go to trackers, progress, guards, samples and traces."""

from __future__ import annotations

import logging

from agenticrun_api import Activity
from agenticrun_workers.driver.engine_time import EngineTime
from agenticrun_workers.driver.guards import GuardWatch
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


class StepReporter:
    """Collects the metrics of each step and reports them.

    Args:
        parts: of the loop.
        stopwatch: has measured the phases of the step.
        guards: watch the metrics.
    """

    def __init__(self, parts: LoopParts, stopwatch: Stopwatch, guards: GuardWatch) -> None:
        self._parts = parts
        self._stopwatch = stopwatch
        self._guards = guards
        self.engine_time = EngineTime(parts.engines, parts.actors)

    def measured(self, step: int, metrics: Metrics) -> None:
        """Report metrics other than a step's."""
        for tracker in self._parts.trackers:
            tracker.log(step, metrics)
        self._parts.progress.metrics(metrics)

    async def step(
        self,
        step: int,
        batch: Batch,
        learned: Metrics,
        filtered: int,
        sync: SyncReport | None,
        saved_seconds: float | None,
    ) -> None:
        """Report a step.

        Args:
            step: completed training steps.
            batch: what rollout has served for it.
            learned: the metrics of the training.
            filtered: number of the batch's groups that it was not trained on.
            sync: the weight sync of this step, if it had one.
            saved_seconds: seconds from a save to its publication, if that was in this step.
        """
        parts, pipeline = self._parts, self._parts.pipeline
        metrics = {**rollout_metrics(batch, step - 1), **learned}
        metrics["group/filtered"] += filtered
        metrics["rollout/truncated_sampling"] = float(
            pipeline.actor_infer.generating.allow_truncated_sampling
        )
        engines = await self.engine_time.metrics()
        seconds = self._stopwatch.reset()
        metrics |= timing_metrics(seconds, metrics["tokens/prompt"] + metrics["tokens/response"])
        metrics |= sync_metrics(sync, lora=pipeline.actor_train.lora is not None)
        if parts.devices:
            metrics["system/handovers"] = float(parts.devices.handovers)
        if saved_seconds is not None:
            metrics["checkpoint/seconds"] = saved_seconds
        metrics["rollout/aborted_tokens"] += engines.pop("rollout/aborted_tokens")
        metrics |= engines | await parts.actors.metrics()
        for name in TRACED_METRICS:
            count(name, metrics[name])
        watched = self._guards.observe(metrics)
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
