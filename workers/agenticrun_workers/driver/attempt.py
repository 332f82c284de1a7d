"""One attempt of a run, on a RayCluster and in local mode alike."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from agenticrun_api import Activity, AgenticRun, FinalReport, InvalidRun, Outcome, Reason
from agenticrun_api.base import clean_text
from agenticrun_api.names import ExitCode
from agenticrun_workers.driver.checkpoints import CheckpointNotSaved, CheckpointStore
from agenticrun_workers.driver.evaluation import Validator
from agenticrun_workers.driver.guards import GuardTripped
from agenticrun_workers.driver.loop import Loop, LoopParts, checkpoint_status, position_of
from agenticrun_workers.driver.metrics import success_of
from agenticrun_workers.driver.parity import ParityCheck
from agenticrun_workers.driver.pools import ActorPools
from agenticrun_workers.driver.progress import AttemptId, ProgressReporter, Requests, StopRequested
from agenticrun_workers.driver.samples import SampleWriter
from agenticrun_workers.driver.start_up import running_actors
from agenticrun_workers.driver.trace import TraceSession
from agenticrun_workers.driver.trainer_group import SharedDevices
from agenticrun_workers.driver.warmup import Warmup
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.launch import ActorDied, Launcher
from agenticrun_workers.reporting.client import ProgressSink, rfc3339
from agenticrun_workers.reporting.run_folder import RunFolder
from agenticrun_workers.reporting.trackers import build_trackers, custom_tracker
from agenticrun_workers.rollout.controller import RolloutController
from agenticrun_workers.rollout.recording import record_or_replay
from agenticrun_workers.trainer.own_functions import check_own_functions

log = logging.getLogger(__name__)

MAX_MESSAGE = 4096


@dataclass(frozen=True)
class AttemptRunner:
    """Starts the actors, resumes from a checkpoint, trains, and reports the outcome.

    Args:
        output: folder of metrics.jsonl and TensorBoard's events.
        checkpoints: path or URI of the run's checkpoints; None saves nothing.
        resume: the value of `spec.checkpoint.resume`.
        launcher: starts the actors.
        code: folder of the user's modules, in local mode.
    """

    run: AgenticRun
    attempt: AttemptId
    output: Path
    checkpoints: str | None
    resume: str
    sink: ProgressSink
    requests: Requests
    launcher: Launcher
    code: Path | None = None

    async def execute(self) -> FinalReport:
        """Train to the last step and report the outcome to the sink.

        Cancelling this ends the attempt at once, without saving.

        Returns:
            the report, also after a failure: this raises nothing.
        """
        progress = ProgressReporter(
            self.sink,
            self.attempt,
            self.run.spec.pipeline.max_steps,
            self.run.metadata.generation,
        )
        progress.activity(Activity.STARTING, "starting actors")
        try:
            # Checks that need no actor come first: a wrong setting should not cost a start-up.
            await asyncio.to_thread(
                RunFolder(self.output).record_attempt, self.run, self.attempt.number, self.code
            )
            await asyncio.to_thread(check_own_functions, self.run.spec.pipeline)
            await asyncio.to_thread(custom_tracker, self.run)
            message = await self._train(progress)
            report = _report(Outcome.SUCCEEDED, Reason.RUN_SUCCEEDED, message, retryable=False)
        # The second Ctrl-C in a terminal. The first one, like a stop request of the operator, is a
        # `StopRequested`, and saves.
        except asyncio.CancelledError:
            report = _report(
                Outcome.STOPPED,
                Reason.STOPPED,
                f"interrupted after {progress.step} steps, without saving",
                retryable=True,
            )
        except Exception as error:  # every failure becomes a report
            report = report_of(error, progress.step)
            log.log(
                logging.INFO if report.outcome is Outcome.STOPPED else logging.ERROR,
                "%s",
                report.message,
                exc_info=None if isinstance(error, CheckpointNotSaved) else error,
            )
        await progress.finish(report)
        return report

    async def _train(self, progress: ProgressReporter) -> str:
        spec = self.run.spec
        keep = spec.storage.keep if spec.storage else 1
        store = (
            CheckpointStore(self.checkpoints, self.run.metadata.uid or "local", keep)
            if self.checkpoints
            else None
        )
        async with AsyncExitStack() as running:
            # A stop request during the start-up must not wait for pods that may never come.
            actors = await self.requests.unless_stopped(
                running.enter_async_context(
                    running_actors(self.run, self.launcher, self.requests.changed.set)
                )
            )
            engines, envs = actors.pools.engines, actors.pools.envs
            # Replicas may change while a checkpoint is restored, which takes minutes for large
            # models.
            following = asyncio.create_task(_follow_replicas(actors.pools, self.requests, progress))
            # Before the actors end, or it would start engines and env workers while they do.
            running.callback(following.cancel)
            restored = (
                await store.restore(
                    self.resume, actors.trainers.loaders, restarted=self.attempt.number > 1
                )
                if store
                else None
            )
            if store:
                await actors.trainers.reserve_snapshots()
            state = restored[1] if restored else None
            if restored:
                progress.resumed(restored[1].step, checkpoint_status(restored[0]))
            samples = SampleWriter(self.output, spec.tracking, spec.pipeline)
            controller = RolloutController.of(
                spec.pipeline,
                envs,
                discard=actors.discard,
                position=position_of(state),
                transcripts=spec.tracking.sample_logs,
                frames=samples.frames,
            )
            rollout = await record_or_replay(
                spec.pipeline, controller, actors.stores, state.step if state else 0
            )
            trackers = await asyncio.to_thread(
                build_trackers,
                self.run,
                self.output,
                state.step if state else 0,
                lambda: progress.max_steps,
            )
            trace = TraceSession(
                self.output, self.run.metadata.name, actors.traced, actors.counters
            )
            parts = LoopParts(
                pipeline=spec.pipeline,
                trainers=actors.trainers,
                engines=engines,
                actors=actors,
                rollout=rollout,
                validator=Validator(
                    envs,
                    spec.pipeline,
                    transcripts=spec.tracking.sample_logs,
                    frames=samples.frames,
                ),
                warmup=Warmup(envs, actors.trainers, spec.pipeline, actors.discard),
                checkpoints=store,
                trackers=trackers,
                samples=samples,
                progress=progress,
                requests=self.requests,
                devices=SharedDevices(actors.trainers, engines) if spec.colocated else None,
                restarted=self.attempt.number > 1,
                failures=[*actors.failures, following],
                trace=trace,
                parity=ParityCheck(actors.trainers, engines, spec.pipeline),
            )
            loop = Loop(parts, state)
            try:
                with trace.recorder.main:
                    await loop.run()
            finally:
                # Before the actors end: the recordings of their processes are collected here.
                await trace.close()
                await rollout.stop()
                for tracker in trackers:
                    await asyncio.to_thread(tracker.close)
        return summary(progress.step, progress.max_steps, loop)


async def _follow_replicas(
    pools: ActorPools, requests: Requests, progress: ProgressReporter
) -> None:
    """Keep as many engines and env workers as the operator has asked for last, and report them."""
    while True:
        requests.changed.clear()
        if requests.config is not None:
            pools.resize(requests.config.replicas)
        progress.pools(pools.status)
        await requests.changed.wait()


async def fail_early(sink: ProgressSink, attempt: AttemptId, error: Exception) -> FinalReport:
    """Report an attempt that failed before its `AttemptRunner` existed."""
    report = report_of(error, 0)
    await ProgressReporter(sink, attempt, 0).finish(report)
    return report


def report_of(error: BaseException, step: int) -> FinalReport:
    """Translate an exception into the outcome of the run.

    Args:
        step: completed training steps.
    """
    if isinstance(error, StopRequested) and error.leaving_pod:
        return _report(
            Outcome.STOPPED,
            Reason.DISRUPTED,
            f"pod {error.leaving_pod} is being removed: the driver stopped after {step} steps",
            retryable=True,
        )
    if isinstance(error, StopRequested):
        return _report(
            Outcome.STOPPED,
            Reason.STOPPED,
            f"stopped on request after {step} steps",
            retryable=True,
        )
    # Another attempt would fail in the same way, so the run ends.
    if isinstance(error, InvalidConfig | InvalidRun):
        return _report(Outcome.FAILED, Reason.INVALID_CONFIG, str(error), retryable=False)
    if isinstance(error, GuardTripped):
        return _report(Outcome.FAILED, "GuardTripped", str(error), retryable=False)
    # Retried: another attempt may find room, and loses only the steps since the last save.
    if isinstance(error, CheckpointNotSaved):
        message = f"in step {step}: {error}"
        return _report(Outcome.FAILED, "TrainingFailed", message, retryable=True)
    # The message goes into a condition of the run; the log has the whole error.
    line = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, ActorDied):
        return _report(
            Outcome.FAILED,
            "WorkerLost",
            f"in step {step}: an actor that training needs is gone: {line}",
            retryable=True,
        )
    return _report(
        Outcome.FAILED,
        "TrainingFailed",
        f"in step {step}: {type(error).__name__}: {line}",
        retryable=True,
    )


def exit_code(report: FinalReport) -> ExitCode:
    """Return the exit code of a process that ends with this report."""
    if report.outcome is Outcome.SUCCEEDED:
        return ExitCode.SUCCEEDED
    if report.outcome is Outcome.STOPPED:
        return ExitCode.STOPPED
    return ExitCode.FAILED if report.retryable else ExitCode.INVALID_CONFIG


def summary(steps: int, max_steps: int, loop: Loop) -> str:
    """Return the message of a run that succeeded."""
    parts = [f"trained {steps} step{'s' * (steps != 1)}"]
    # The step that ran when maxSteps was lowered is completed, and counts.
    if steps > max_steps:
        parts.append(f"maxSteps was lowered to {max_steps}, which ended the run")
    success = success_of(loop.last_validation)
    if success is not None:
        baselines = ", ".join(
            f"{name} {value:.2f}" for name, value in sorted(loop.baselines.items())
        )
        parts.append(f"validation success {success:.2f}" + (f" ({baselines})" if baselines else ""))
    parts += [note for note in (loop.early_end, loop.evicted) if note]
    return "; ".join(parts)


def _report(outcome: Outcome, reason: str, message: str, *, retryable: bool) -> FinalReport:
    return FinalReport(
        outcome=outcome,
        reason=reason,
        message=clean_text(message)[:MAX_MESSAGE],
        retryable=retryable,
        time=rfc3339(time.time()),
    )
