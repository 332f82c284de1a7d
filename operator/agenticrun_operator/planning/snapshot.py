"""Fields of the status that a driver's progress snapshot gives."""

from __future__ import annotations

from datetime import timedelta
from itertools import islice
from typing import Any

from agenticrun_api import Activity, Progress
from agenticrun_api.status import Metric
from agenticrun_operator.planning import times

STATUS_METRICS = 16
"""Maximum number of metrics in the status, because every status write goes to all watchers. The
reporter serves all metrics."""


def snapshot_fields(progress: Progress) -> dict[str, Any]:
    """Return the fields of the status that a progress snapshot gives.

    They depend on the snapshot alone, not on the clock, so an unchanged snapshot causes no status
    write. The numbers of a driver that is starting or could not start (max_steps is 0) have no
    meaning yet: it has not read the checkpoint it resumes from. The last attempt's numbers stay.
    """
    no_end: dict[str, Any] = {"eta": None, "estimated_completion_time": None}
    if progress.activity is Activity.STARTING or progress.max_steps == 0:
        return {"activity": progress.activity.value} | no_end
    fields: dict[str, Any] = {
        "step": progress.step,
        "max_steps": progress.max_steps,
        "progress": f"{progress.step}/{progress.max_steps}",
        "policy_version": progress.policy_version,
        "activity": progress.activity.value,
        "reward": _number(progress.reward, "{:.3f}"),
        "tokens_per_second": _number(progress.tokens_per_second, "{:.0f}"),
        "staleness": _number(progress.staleness, "{:.2f}"),
        "last_step_time": times.format_time(times.parse_time(progress.last_step_time))
        if progress.last_step_time
        else None,
        "metrics": [
            Metric(name=name, value=f"{value:.6g}")
            for name, value in sorted(islice(progress.metrics.items(), STATUS_METRICS))
        ],
    }
    if progress.checkpoint:
        fields["checkpoint"] = progress.checkpoint
    remaining = progress.max_steps - progress.step
    if progress.seconds_per_step is None or progress.last_step_time is None or remaining <= 0:
        return fields | no_end
    seconds = min(remaining * progress.seconds_per_step, timedelta(days=3650).total_seconds())
    end = times.parse_time(progress.last_step_time) + timedelta(seconds=seconds)
    return fields | {
        "eta": times.format_span(seconds),
        "estimated_completion_time": times.format_time(end),
    }


def _number(value: float | None, template: str) -> str | None:
    """Format a number for a status column. A diverged run's 1e300 must still fit."""
    return None if value is None else template.format(value) if abs(value) < 1e9 else f"{value:.3g}"
