"""Asking a driver to stop, and when to give it up.

A driver that is asked to stop ends its step, saves a checkpoint and exits. Its time runs from the
moment at which its reporter took the request, never from when somebody wanted it: an operator that
was away, or a reporter that does not answer, must not cost a step.
"""

from __future__ import annotations

from datetime import datetime

from agenticrun_api import Activity, ConditionType, Progress, Role
from agenticrun_operator.observed import Observed
from agenticrun_operator.planning.draft import Draft
from agenticrun_operator.planning.plan import Configure, JobAction, RequestStop
from agenticrun_operator.planning.times import format_time, parse_time

UNREACHABLE_SECONDS = 120.0
"""Time for a head that does not answer to say what its attempt does, or to take a request."""
MAX_STEP_SECONDS = 1800.0
"""Longest time that a driver gets to end its step, or to save, before its grace period begins."""
SAVE_SILENCE_SECONDS = 300.0
"""Time without a snapshot that a driver may spend on saving a checkpoint."""
_SAVES = (Activity.STOPPING, Activity.CHECKPOINT, Activity.VALIDATION)


def request_stop(draft: Draft, observed: Observed, since: datetime) -> None:
    """Ask the driver to stop, unless it has the request or something else is to be done first."""
    job = draft.status.job
    assert job is not None
    if draft.job is None and job.report is None:
        request(draft, observed, RequestStop(job.submission_id), since)


def request(
    draft: Draft,
    observed: Observed,
    action: Configure | RequestStop,
    since: datetime | None = None,
) -> None:
    """Send a request to the driver, which may take a whole step to follow it.

    It is repeated after a while only, in case the reporter has lost it.

    Args:
        draft: the draft.
        observed: the observed state.
        action: the request.
        since: when the request was first wanted; one that was sent before is an earlier one.
    """
    last, sent_at = observed.last_action or (None, None)
    sent = last == action and sent_at is not None and (since is None or sent_at >= since)
    if draft.may_repeat(sent_at if sent else None) and may_act(draft, observed, action):
        draft.job = action


def may_act(draft: Draft, observed: Observed, action: JobAction) -> bool:
    """Return True unless the head refused such an action last, and it is too early to repeat."""
    trouble = observed.job_trouble
    return (
        trouble is None
        or not isinstance(action, type(trouble.action))
        or draft.now >= trouble.retry_at
    )


def is_out_of_time(
    draft: Draft, observed: Observed, progress: Progress | None, since: datetime
) -> bool:
    """Return True if the driver has had the time to stop, or nobody can ask it.

    It gets the time to end its step, and then its grace period to save a checkpoint. A driver that
    says that it saves one gets longer.

    Args:
        draft: the draft.
        observed: the observed state.
        progress: the attempt's snapshot, or None if there is none now.
        since: when the stop was first wanted.
    """
    asked = _asked_at(draft, observed, since)
    if asked is None:
        trouble = observed.job_trouble
        if trouble is None or not isinstance(trouble.action, RequestStop):
            return False
        return (draft.now - max(trouble.since, since)).total_seconds() >= UNREACHABLE_SECONDS
    waited = (draft.now - asked).total_seconds()
    grace = draft.run.spec.grace_seconds(Role.DRIVER)
    if progress is None:
        return waited > grace and _seconds_unknown(draft) >= UNREACHABLE_SECONDS
    step = progress.seconds_per_step or 0.0
    if progress.activity in _SAVES and (progress.silent_seconds or 0.0) <= SAVE_SILENCE_SECONDS:
        step = MAX_STEP_SECONDS
    return waited > grace + min(step, MAX_STEP_SECONDS)


def _asked_at(draft: Draft, observed: Observed, since: datetime) -> datetime | None:
    """Return when the reporter took the request, which status.job keeps; None: not yet."""
    job = draft.status.job
    assert job is not None
    if job.stop_requested_time and parse_time(job.stop_requested_time) >= since:
        return parse_time(job.stop_requested_time)
    last, sent_at = observed.last_action or (None, None)
    if last != RequestStop(job.submission_id) or sent_at is None or sent_at < since:
        return None
    draft.update_job(stop_requested_time=format_time(sent_at))
    return sent_at


def _seconds_unknown(draft: Draft) -> float:
    """Return for how long it is not known that the driver trains."""
    training = draft.find(ConditionType.TRAINING)
    if training is None or training.status == "True":
        return 0.0
    return (draft.now - parse_time(training.last_transition_time)).total_seconds()
