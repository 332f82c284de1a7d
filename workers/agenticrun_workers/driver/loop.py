"""The training loop of one attempt.

    for each step v:
        sync weights: engines load version v         every modelUpdateFrequency steps
        validate                                     every evalSteps
        roll out a batch                             the gate opens for version v
        train on it (driver/step.py)                 Colocated: the engines sleep; version v + 1
        check the guards and log                     sample episodes every loggingSteps
        save a checkpoint                            every saveSteps; training continues
                                                     while the ranks write it

With `staleness.max = 0` the gate starts exactly one batch per version, which is the synchronous
algorithm. With more, rollout continues while this loop trains.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from agenticrun_api import Activity, Pipeline
from agenticrun_api.status import CheckpointStatus
from agenticrun_workers.driver.checkpoints import (
    Checkpoint,
    CheckpointStore,
    DriverState,
    SaveModule,
)
from agenticrun_workers.driver.engine_time import EngineTime, MeasuredEngines
from agenticrun_workers.driver.evaluation import Validator, warmup_success
from agenticrun_workers.driver.guards import GuardTripped, GuardWatch
from agenticrun_workers.driver.metrics import (
    Metrics,
    Stopwatch,
    rollout_metrics,
    success_of,
    sync_metrics,
    timing_metrics,
    validation_metrics,
)
from agenticrun_workers.driver.parity import ParityCheck
from agenticrun_workers.driver.progress import ProgressReporter, Requests, StopRequested
from agenticrun_workers.driver.samples import SampleWriter
from agenticrun_workers.driver.step import Trainers, TrainingStep, select_groups
from agenticrun_workers.driver.trace import TraceSession
from agenticrun_workers.driver.trainer_group import SharedDevices
from agenticrun_workers.driver.warmup import Warmup
from agenticrun_workers.errors import InvalidConfig, ScheduleEnded
from agenticrun_workers.reporting.trackers import Tracker
from agenticrun_workers.rollout.controller import Batch, RolloutPosition
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.tracing import count, span
from agenticrun_workers.trainer.batch import optimizer_steps_per_batch
from agenticrun_workers.weights.sync import SyncReport, WeightSync

log = logging.getLogger(__name__)

T = TypeVar("T")

FAILED_SAVE_SECONDS = 60.0
"""Time that a run that fails leaves the ranks to write a checkpoint to its end."""


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


class Loop:
    """One attempt, from its checkpoint or the beginning to the last step.

    Args:
        resume: the driver's state in the checkpoint that the trainers have loaded; None for a
            fresh run.
    """

    def __init__(self, parts: LoopParts, resume: DriverState | None) -> None:
        self._parts = parts
        self._pipeline = parts.pipeline
        self._fresh = resume is None
        self._step = resume.step if resume else 0
        self._best = resume.best_success if resume else None
        self._baselines = dict(resume.baselines) if resume else {}
        kept: Mapping[str, Any] = resume.parts if resume else {}
        self._stopwatch = Stopwatch()
        self._training_step = TrainingStep(
            self._pipeline,
            parts.trainers,
            kept.get(KL_PART),
            self._stopwatch,
            kept.get(MOMENTS_PART, {}),
        )
        self._guards = GuardWatch(self._pipeline.guards, kept.get(GUARDS_PART))
        self._schedule: list[int] = kept.get(SCHEDULE_PART, schedule_plan(self._pipeline))
        """The plan that the schedules of the learning rates were last made for."""
        self._synced: int | None = None
        """The policy version of the engines; None before the first sync of this attempt."""
        self._sync: SyncReport | None = None
        """The weight sync of this step, if it had one."""
        self._saving: asyncio.Task[None] | None = None
        """Publishes the last checkpoint; None once the loop has seen its end."""
        self._saved_seconds: float | None = None
        """Seconds from a save to its publication, if that was in this step."""
        self._engine_time = EngineTime(parts.engines, parts.actors)
        self.early_end: str | None = None
        """Why there are fewer steps than `maxSteps`, if there are."""
        self.evicted = ""
        """Environments that are left out because they fail, with their errors; empty if none."""
        self.last_validation: Metrics = {}
        """The val/... metrics of the last validation."""

    @property
    def baselines(self) -> Metrics:
        """Return val/<tag>/random_success, random_errors and warmup_success, measured once."""
        return self._baselines

    async def run(self) -> None:
        """Train to the last step.

        Raises:
            InvalidConfig: the first attempt resumes where more steps would learn nothing.
            InvalidConfig: engines compute another model than the trainers.
            StopRequested: a stop was requested; the state has been saved.
            GuardTripped: an alarm is up, and `guards.action` is Fail.
        """
        try:
            await self._begin_or_end_trace()
            if self._fresh:
                await self._begin()
            await self._plan_schedules()
            # A restarted attempt has made its steps and ends as Succeeded. A first attempt that has
            # nothing to learn is a mistake in the settings.
            if self.early_end and not self._parts.restarted:
                raise InvalidConfig("spec.pipeline.maxSteps", self.early_end)
            self._parts.progress.started()
            while True:
                # `maxSteps` may change while the run trains, so it is read before each step.
                while await self._has_steps():
                    await self._run_step()
                await self._sync_weights_if_due()
                await self._validate_if_due()
                await self._save_whole()
                if not await self._has_steps():  # maxSteps may have been raised while saving
                    return
        except StopRequested:
            self._parts.progress.activity(Activity.STOPPING)
            # A stop during the warm-up saves nothing: it is not a state that a run resumes from.
            if not self._fresh:
                await self._outlast_saving()
                await self._save_whole()
            raise
        except GuardTripped:
            await self._outlast_saving()
            raise
        except Exception:
            # Not for long: ranks that wait in vain for a lost one answer nothing.
            await self._outlast_saving(FAILED_SAVE_SECONDS)
            raise
        finally:
            if self._saving is not None:
                self._saving.cancel()

    async def _run_step(self) -> None:
        with self._stopwatch.phase("step"):
            await self._sync_weights_if_due()
            await self._validate_if_due()
            batch = await self._roll_out()
            metrics = await self._train(batch)
        self._step += 1
        # Logged before it is saved: a resumed run must not miss the metrics of a step it has.
        await self._log(batch, metrics)
        if self._saving is not None and self._saving.done():
            # A stop goes first: it saves again, which may succeed.
            if self._saving.exception():
                self._parts.requests.check_stop()
            await self._finish_saving()
        await self._save_if_due()
        await self._begin_or_end_trace()
        # Last: a run that a guard ends has logged and saved the step that tripped it.
        self._guards.enforce()

    async def _begin_or_end_trace(self) -> None:
        if self._parts.trace:
            await self._parts.trace.between_steps(self._step)

    async def _has_steps(self) -> bool:
        """Take changed settings over, and return True if there are steps left."""
        config = self._parts.requests.config
        # The pools' numbers are in the same message; they are followed elsewhere.
        if config is not None and config.generation > self._parts.progress.generation:
            self._pipeline = config.applied_to(self._pipeline)
            self._guards.configure(self._pipeline.guards)
            await self._plan_schedules()
            self._parts.validator.configure(self._pipeline)
            self._parts.progress.configured(config)
            log.info(
                "settings of generation %d: maxSteps %d, evalSteps %d, saveSteps %d, guards %s",
                config.generation,
                config.max_steps,
                config.eval_steps,
                config.save_steps,
                config.guards.to_dict(),
            )
        return self._step < self._pipeline.max_steps

    async def _plan_schedules(self) -> None:
        """Stretch the schedules of the learning rates if the number of steps has changed.

        If they have ended, the run ends after this step.
        """
        self.early_end = None
        plan, max_steps = schedule_plan(self._pipeline), self._pipeline.max_steps
        if plan == self._schedule:
            return
        try:
            await self._parts.trainers.stretch_schedules(self._step, max_steps)
            # Only if it succeeded: the checkpoint says what the schedules were made for.
            self._schedule = plan
        except ScheduleEnded as error:
            self.early_end = (
                f"the run ends at step {self._step}, not at maxSteps {max_steps}: {error}, so more "
                "steps would learn nothing. To train on, start a new run from the checkpoint "
                "(checkpoint.resume: FromPreviousRun, or its folder) with lrSchedulerType: constant"
            )
            log.warning("%s", self.early_end)
            self._parts.progress.activity(Activity.TRAINING, self.early_end)
            # Validation, checkpoint and report at the last step then happen as at a planned end.
            self._pipeline = self._pipeline.model_copy(update={"max_steps": self._step})
            self._parts.validator.configure(self._pipeline)

    async def _begin(self) -> None:
        """Prepare a fresh run: supervised warm-up, frozen reference, success of random play."""
        self._parts.progress.activity(Activity.WARMUP)
        steps = self._pipeline.warmup.steps if self._pipeline.warmup else 0
        done = 0
        with span("warmup"):
            # A stop request must end the warm-up's episodes before the actors end.
            async with aclosing(self._parts.warmup.steps()) as taken:
                while (metrics := await self._guarded(_next(taken))) is not None:
                    done += 1
                    self._parts.progress.metrics(metrics)
                    message = f"warm-up step {done} of {steps}, loss {metrics['warmup/loss']:.3f}"
                    if failed := metrics.get("warmup/discarded"):
                        message += f", {failed:.0f} episodes failed"
                    self._parts.progress.activity(Activity.WARMUP, message)
        # After the warm-up: the KL penalty should measure what RL changes, not what the warm-up
        # taught.
        await self._parts.trainers.freeze_reference()
        if self._parts.validator.enabled:
            with span("random_baseline"):
                self._baselines = await self._guarded(self._parts.validator.random_baseline())
        # From here on a checkpoint is a state that training can resume from.
        self._fresh = False

    async def _sync_weights_if_due(self) -> None:
        """Sync at the interval of the spec, and before each validation."""
        due = self._step % self._pipeline.model_update_frequency == 0 or self._parts.validator.due(
            self._step
        )
        # The engines of a new attempt have no weights, whatever the interval says.
        if self._synced is None or (due and self._synced != self._step):
            # The time until a pod is removed is for the save, and its node's engines leave as well.
            self._parts.requests.check_stop()
            with self._stopwatch.phase("sync"):
                await self._trainers_compute()
                # With shared devices the trainers leave when all is written, and the engines come
                # back.
                handover = self._parts.devices.to_engines if self._parts.devices else None
                async with self._engine_time.syncing():
                    self._sync = await self._parts.engines.update_weights(
                        self._parts.trainers.weights, self._step, handover
                    )
            first, self._synced = self._synced is None, self._step
            if first and self._parts.parity:
                await self._guarded(self._parts.parity.sample())
                # With shared devices the engines have them now: the trainers compare in the next
                # step.
                if not self._parts.devices:
                    await self._check_parity()

    async def _check_parity(self) -> None:
        """Compare engines and trainer, once after the first sync. The trainers have the devices."""
        if self._parts.parity is None:
            return
        metrics, error = await self._guarded(self._parts.parity.compare())
        if metrics:
            for tracker in self._parts.trackers:
                tracker.log(self._step, metrics)
            self._parts.progress.metrics(metrics)
        if error is not None:
            raise error

    async def _validate_if_due(self) -> None:
        if not self._parts.validator.due(self._step):
            return
        self._parts.progress.activity(Activity.VALIDATION)
        with self._stopwatch.phase("val"):
            results = await self._guarded(self._parts.validator.run())
        metrics = validation_metrics(results)
        self._parts.samples.write(self._step, results, validation=True)
        # Before the first RL step: what the warm-up alone has taught.
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
        self._parts.progress.metrics(metrics)

    async def _roll_out(self) -> Batch:
        self._parts.progress.activity(Activity.ROLLOUT)
        assert self._synced is not None
        # `synced`, not `step`: between two syncs the engines have an older policy.
        self._parts.rollout.advance(self._step, self._synced)
        with self._stopwatch.phase("rollout"):
            batch = await self._guarded(self._parts.rollout.batch())
        without = ", ".join(f"{tag} ({error})" for tag, error in batch.evicted.items())
        self.evicted = f"without environments that fail: {without}" if without else ""
        self._parts.progress.note(self.evicted)
        return batch

    async def _train(self, batch: Batch) -> Metrics:
        """Train on a batch; the policy becomes version step + 1.

        A stop request waits until the step ends, so that no finished trajectory is lost.
        """
        self._parts.progress.activity(Activity.TRAINING)
        await self._trainers_compute()
        await self._check_parity()
        groups = select_groups(self._pipeline, batch.groups)
        learned = await self._training_step.train(groups, self._step + 1)
        with self._stopwatch.phase("train"):
            # After the last optimizer step, which reads the trajectories from the stores.
            await self._parts.actors.discard(batch.results)
        metrics = {**rollout_metrics(batch, self._step), **learned}
        metrics["group/filtered"] += len(batch.groups) - len(groups)
        metrics["rollout/truncated_sampling"] = float(
            self._pipeline.actor_infer.generating.allow_truncated_sampling
        )
        return metrics

    async def _log(self, batch: Batch, metrics: Metrics) -> None:
        engines = await self._engine_time.metrics()
        seconds = self._stopwatch.reset()
        metrics |= timing_metrics(seconds, metrics["tokens/prompt"] + metrics["tokens/response"])
        metrics |= sync_metrics(self._sync, lora=self._pipeline.actor_train.lora is not None)
        if self._parts.devices:
            metrics["system/handovers"] = float(self._parts.devices.handovers)
        if self._saved_seconds is not None:
            metrics["checkpoint/seconds"] = self._saved_seconds
        # A step without a sync or a checkpoint must not report the last one again.
        self._sync = self._saved_seconds = None
        metrics["rollout/aborted_tokens"] += engines.pop("rollout/aborted_tokens")
        metrics |= engines | await self._parts.actors.metrics()
        for name in TRACED_METRICS:
            count(name, metrics[name])
        watched = self._guards.observe(metrics)
        metrics |= watched.metrics
        for tracker in self._parts.trackers:
            tracker.log(self._step, metrics)
        self._parts.progress.step_done(self._step, metrics)
        for message in watched.messages:
            log.warning("%s", message)
            self._parts.progress.activity(Activity.TRAINING, message)
        if self._parts.samples.due(self._step):
            self._parts.samples.write(self._step, batch.results)
        for transcript in (result.transcript for result in batch.results if result.transcript):
            self._parts.progress.sample(transcript)

    async def _save_if_due(self) -> None:
        asked = self._parts.requests.take_checkpoint()
        every = self._pipeline.save_steps
        # The last step is saved by `run`, after validation.
        if asked or (every and self._step % every == 0 and self._step < self._pipeline.max_steps):
            await self._save()

    async def _save_whole(self) -> None:
        """Save, and wait until the checkpoint is published."""
        await self._save()
        await self._finish_saving()

    async def _save(self) -> None:
        if self._parts.checkpoints is None:
            return
        self._parts.progress.activity(Activity.CHECKPOINT)
        with self._stopwatch.phase("checkpoint"):
            await self._finish_saving()
        # Ranks save from their devices.
        await self._trainers_compute()
        # Taken before the save, while no batch is being served.
        position = self._parts.rollout.position
        state = DriverState(
            step=self._step,
            next_group=position.next_group,
            again=position.pending_groups,
            best_success=self._best,
            baselines=self._baselines,
            parts={
                KL_PART: self._training_step.kl_coef,
                MOMENTS_PART: self._training_step.reward_moments,
                GUARDS_PART: self._guards.state,
                SCHEDULE_PART: self._schedule,
                REQUEUED_PART: position.requeued_groups,
            },
        )
        begin = time.perf_counter()
        with self._stopwatch.phase("checkpoint"):
            publishes = await self._parts.checkpoints.save(state, self._parts.trainers.savers)
        self._saving = asyncio.create_task(self._report_saved(publishes, begin))

    async def _report_saved(self, publishes: Awaitable[Checkpoint], begin: float) -> None:
        saved = await publishes
        self._saved_seconds = time.perf_counter() - begin
        self._parts.progress.checkpoint(checkpoint_status(saved))

    async def _finish_saving(self) -> None:
        """Wait until the last checkpoint is published, or raise why it cannot be."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await saving

    async def _outlast_saving(self, timeout: float | None = None) -> None:
        """Wait for the end of the last save, at most so many seconds; log why it failed."""
        if self._saving is None:
            return
        self._parts.progress.activity(Activity.CHECKPOINT)
        done, _ = await asyncio.wait([self._saving], timeout=timeout)
        if done:
            saving, self._saving = self._saving, None
            if error := saving.exception():
                log.warning("a checkpoint was not saved: %s", error)

    async def _trainers_compute(self) -> None:
        """Give the trainers the devices, where engines share them."""
        if self._parts.devices:
            with self._stopwatch.phase("handover"):
                await self._parts.devices.to_trainers()

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`; raise if a stop is requested or a part of the run fails first."""
        return await self._parts.requests.unless_stopped(work, self._parts.failures)


async def _next(metrics: AsyncIterator[Metrics]) -> Metrics | None:
    """Return None at the end."""
    return await anext(metrics, None)


TRACED_METRICS = ("staleness/mean", "staleness/max", "rollout/queue_depth")
"""Metrics of steps that are counters in a trace."""
KL_PART, GUARDS_PART, SCHEDULE_PART, REQUEUED_PART = "kl_coef", "guards", "schedule", "requeued"
MOMENTS_PART = "reward_moments"
"""Keys of `DriverState.parts`."""


def position_of(state: DriverState | None) -> RolloutPosition:
    """Return where rollout continues; at its beginning without a checkpoint."""
    if state is None:
        return RolloutPosition()
    requeued = tuple(state.parts.get(REQUEUED_PART, ()))  # absent before 0.2
    return RolloutPosition(state.next_group, state.again, requeued)


def schedule_plan(pipeline: Pipeline) -> list[int]:
    """Return what decides when the schedules of the learning rates end."""
    return [pipeline.max_steps, pipeline.critic_warmup, optimizer_steps_per_batch(pipeline)]


def checkpoint_status(checkpoint: Checkpoint) -> CheckpointStatus:
    """Describe a checkpoint for a progress snapshot."""
    return CheckpointStatus(step=checkpoint.step, uri=str(checkpoint.folder), time=checkpoint.time)
