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
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from agenticrun_api import Activity
from agenticrun_workers.driver.checkpoints import DriverState
from agenticrun_workers.driver.credit import CreditAssigner
from agenticrun_workers.driver.guards import GuardTripped, GuardWatch
from agenticrun_workers.driver.metrics import Metrics, Stopwatch
from agenticrun_workers.driver.parts import LoopParts
from agenticrun_workers.driver.progress import StopRequested
from agenticrun_workers.driver.step import TrainingStep, select_groups
from agenticrun_workers.driver.step_reporter import StepReporter
from agenticrun_workers.errors import InvalidConfig, ScheduleEnded
from agenticrun_workers.rollout.controller import Batch
from agenticrun_workers.tracing import span
from agenticrun_workers.trainer.batch import optimizer_steps_per_batch
from agenticrun_workers.weights.sync import SyncReport

log = logging.getLogger(__name__)

T = TypeVar("T")

FAILED_SAVE_SECONDS = 60.0
"""Time that a run that fails leaves the ranks to write a checkpoint to its end."""


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
        kept = resume or DriverState(step=0, next_group=0, again=())
        self._stopwatch = Stopwatch()
        self._guards = GuardWatch(self._pipeline.guards, kept.guards)
        self._report = StepReporter(parts, self._stopwatch, self._guards)
        self._training_step = TrainingStep(
            self._pipeline,
            parts.trainers,
            CreditAssigner(self._pipeline, kept.kl_coef, kept.reward_moments),
            self._stopwatch,
        )
        self._schedule = kept.schedule or self._schedule_plan()
        """The plan that the schedules of the learning rates were last made for."""
        self._synced: int | None = None
        """The policy version of the engines; None before the first sync of this attempt."""
        self._sync: SyncReport | None = None
        """The weight sync of this step, if it had one."""
        self._saving: asyncio.Task[None] | None = None
        """Publishes the last checkpoint; None once the loop has seen its end."""
        self._saved_seconds: float | None = None
        """Seconds from a save to its publication, if that was in this step."""
        self.early_end: str | None = None
        """Why there are fewer steps than `maxSteps`, if there are."""
        self.evicted = ""
        """Environments that are left out because they fail, with their errors; empty if none."""

    @property
    def validation(self) -> Metrics:
        """The val/... metrics of the last validation."""
        return self._parts.validator.last

    @property
    def baselines(self) -> Metrics:
        """val/<tag>/random_success, random_errors and warmup_success, measured once."""
        return self._parts.validator.baselines

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
            learned, filtered = await self._train(batch)
        self._step += 1
        # Logged before it is saved: a resumed run must not miss the metrics of a step it has.
        await self._report.step(
            self._step, batch, learned, filtered, self._sync, self._saved_seconds
        )
        # A step without a sync or a checkpoint must not report the last one again.
        self._sync = self._saved_seconds = None
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
        plan, max_steps = self._schedule_plan(), self._pipeline.max_steps
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

                async def next_step() -> Metrics | None:
                    return await anext(taken, None)

                while (metrics := await self._guarded(next_step())) is not None:
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
                await self._guarded(self._parts.validator.random_baseline())
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
                async with self._report.engine_time.syncing():
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
            self._report.measured(self._step, metrics)
        if error is not None:
            raise error

    async def _validate_if_due(self) -> None:
        if not self._parts.validator.due(self._step):
            return
        self._parts.progress.activity(Activity.VALIDATION)
        with self._stopwatch.phase("val"):
            results = await self._guarded(self._parts.validator.run())
        self._parts.samples.write(self._step, results, validation=True)
        self._report.measured(self._step, self._parts.validator.record(self._step, results))

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

    async def _train(self, batch: Batch) -> tuple[Metrics, int]:
        """Train on a batch; the policy becomes version step + 1.

        A stop request waits until the step ends, so that no finished trajectory is lost.

        Returns:
            the metrics of the training, and the number of groups that a filter left out.
        """
        self._parts.progress.activity(Activity.TRAINING)
        await self._trainers_compute()
        await self._check_parity()
        groups = select_groups(self._pipeline, batch.groups)
        learned = await self._training_step.train(groups, self._step + 1)
        with self._stopwatch.phase("train"):
            # After the last optimizer step, which reads the trajectories from the stores.
            await self._parts.actors.discard(batch.results)
        return learned, len(batch.groups) - len(groups)

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
        state = DriverState.at(
            self._parts.rollout.position,
            self._step,
            best_success=self._parts.validator.best,
            baselines=self._parts.validator.baselines,
            kl_coef=self._training_step.credit.kl_coef,
            reward_moments=self._training_step.credit.moments,
            guards=self._guards.state,
            schedule=self._schedule,
        )
        begin = time.perf_counter()
        with self._stopwatch.phase("checkpoint"):
            publishes = await self._parts.checkpoints.save(state, self._parts.trainers.savers)

        async def publish() -> None:
            saved = await publishes
            self._saved_seconds = time.perf_counter() - begin
            self._parts.progress.checkpoint(saved.status)

        self._saving = asyncio.create_task(publish())

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

    def _schedule_plan(self) -> list[int]:
        """Return what decides when the schedules of the learning rates end."""
        pipeline = self._pipeline
        return [pipeline.max_steps, pipeline.critic_warmup, optimizer_steps_per_batch(pipeline)]
