"""Folds a driver's progress into the status."""

from __future__ import annotations

from datetime import timedelta
from itertools import islice

from agenticrun_api import Activity, AgenticRun, Progress
from agenticrun_api.status import Metric
from agenticrun_operator.observed import NoReport, Unreachable
from agenticrun_operator.planning.draft import Draft
from agenticrun_operator.planning.times import format_span, format_time, parse_time

STATUS_METRICS = 16
"""How many of a snapshot's metrics the status tells: every write of it goes to all watchers. The reporter serves the others."""


def own_progress(run: AgenticRun, progress: Progress | NoReport | Unreachable) -> Progress | None:
    """The progress, if it is of this run's newest attempt."""
    job = run.status.job
    if not isinstance(progress, Progress) or job is None:
        return None
    mine = (run.metadata.uid, job.submission_id, job.attempt)
    return (
        progress if (progress.run_uid, progress.submission_id, progress.attempt) == mine else None
    )


def apply_snapshot(draft: Draft, progress: Progress) -> None:
    """Everything here depends on the snapshot alone, never on the clock: no news, no write.

    A driver that starts has not yet read the checkpoint it goes on from, and one that could not start (without steps to make) never
    will: their numbers mean nothing, so the last attempt's stand.
    """
    if progress.activity is Activity.STARTING or progress.max_steps == 0:
        draft.set(activity=progress.activity.value, eta=None, estimated_completion_time=None)
        return
    draft.set(
        step=progress.step,
        max_steps=progress.max_steps,
        progress=f"{progress.step}/{progress.max_steps}",
        policy_version=progress.policy_version,
        activity=progress.activity.value,
        reward=_number(progress.reward, "{:.3f}"),
        tokens_per_second=_number(progress.tokens_per_second, "{:.0f}"),
        staleness=_number(progress.staleness, "{:.2f}"),
        last_step_time=format_time(parse_time(progress.last_step_time))
        if progress.last_step_time
        else None,
        metrics=[
            Metric(name=name, value=f"{value:.6g}")
            for name, value in sorted(islice(progress.metrics.items(), STATUS_METRICS))
        ],
    )
    if progress.checkpoint:
        draft.set(checkpoint=progress.checkpoint)
    remaining = progress.max_steps - progress.step
    if progress.seconds_per_step is None or progress.last_step_time is None or remaining <= 0:
        draft.set(eta=None, estimated_completion_time=None)
        return
    seconds = min(remaining * progress.seconds_per_step, timedelta(days=3650).total_seconds())
    end = parse_time(progress.last_step_time) + timedelta(seconds=seconds)
    draft.set(eta=format_span(seconds), estimated_completion_time=format_time(end))


def _number(value: float | None, template: str) -> str | None:
    """Short for the values that training has; a diverged run's 1e300 must still fit into a column."""
    return None if value is None else template.format(value) if abs(value) < 1e9 else f"{value:.3g}"
