"""The end of an attempt: an exception, or the last step, becomes the outcome of the run."""

from __future__ import annotations

import asyncio
import logging
import time

from agenticrun_api import FinalReport, InvalidRun, Outcome, Reason
from agenticrun_api.base import clean_text
from agenticrun_api.names import ExitCode
from agenticrun_workers.driver.checkpoints import CheckpointNotSaved
from agenticrun_workers.driver.guards import GuardTripped
from agenticrun_workers.driver.loop import Loop
from agenticrun_workers.driver.metrics import success_of
from agenticrun_workers.driver.progress import AttemptId, ProgressReporter, StopRequested
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.launch import ActorDied
from agenticrun_workers.reporting.client import ProgressSink, rfc3339

log = logging.getLogger(__name__)

MAX_MESSAGE = 4096


def succeeded(loop: Loop, progress: ProgressReporter) -> FinalReport:
    """Return the report of a loop that made its last step."""
    message = summary(progress.step, progress.max_steps, loop)
    return _report(Outcome.SUCCEEDED, Reason.RUN_SUCCEEDED, message, retryable=False)


def ended_by(error: BaseException, step: int) -> FinalReport:
    """Log why an attempt has ended, unless the user has cancelled it, and return its report.

    Args:
        step: completed training steps.
    """
    report = report_of(error, step)
    if not isinstance(error, asyncio.CancelledError):
        log.log(
            logging.INFO if report.outcome is Outcome.STOPPED else logging.ERROR,
            "%s",
            report.message,
            exc_info=None if isinstance(error, CheckpointNotSaved) else error,
        )
    return report


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
    # The second Ctrl-C in a terminal. The first one, like a stop request of the operator, is a
    # `StopRequested`, and saves.
    if isinstance(error, asyncio.CancelledError):
        return _report(
            Outcome.STOPPED,
            Reason.STOPPED,
            f"interrupted after {step} steps, without saving",
            retryable=True,
        )
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
    success = success_of(loop.validation)
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
