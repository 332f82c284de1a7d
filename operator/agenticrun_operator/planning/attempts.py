"""Attempts of the driver, one at a time: submit, follow, fail, retry.

Write-ahead: the status holds an attempt's number, its submission id and the incarnation of the
head before the job is submitted, and each submission id is submitted to one incarnation only. Ray
refuses a submission id that it knows, and forgets ids only when the incarnation changes. So an
attempt runs at most once, even if the operator crashes at any point.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from agenticrun_api import (
    AgenticRun,
    ConditionType,
    FinalReport,
    LiveConfig,
    Outcome,
    Phase,
    Progress,
    Reason,
    Role,
)
from agenticrun_api.names import ExitCode
from agenticrun_api.status import JobStatus, RayClusterStatus
from agenticrun_operator.observed import Job, NoJob, Observed, Problem, Unreachable
from agenticrun_operator.planning import ending, lost_pods, startup, stopping
from agenticrun_operator.planning.draft import MAX_TEXT, Draft
from agenticrun_operator.planning.plan import Configure, Stop, Submit
from agenticrun_operator.planning.snapshot import apply_snapshot, own_progress
from agenticrun_operator.planning.times import backoff_seconds, format_span, format_time, parse_time
from agenticrun_operator.resources import secret_of

MAX_BACKOFF_SECONDS = 600.0
POLL_SECONDS = 2.0
SILENT_SECONDS = 7.0
"""Time without a snapshot after which the driver is said to be silent. It posts every second. With
a poll every 3 s at most, the status shows it within 10 s."""
_TRAINING = (Phase.RUNNING, Phase.SUSPENDING)
REPORT_PATIENCE_SECONDS = 60.0
"""Time to wait for the final report of an ended job before Ray's job status decides alone."""


def submission_id(run: AgenticRun, attempt: int) -> str:
    """Return the Ray submission id of an attempt, unique among all runs."""
    return f"{run.metadata.name}-{run.metadata.uid[:8]}-{attempt}"


def advance(draft: Draft, observed: Observed, roles_ready: bool) -> None:
    """Follow the current attempt, or begin the next one."""
    job = draft.status.job
    if job is None or not has_attempt(draft):
        _begin_when_possible(draft, observed, roles_ready)
        return
    _follow(draft, observed, job)
    deadline = ending.deadline(draft)
    if deadline and draft.now >= deadline and has_attempt(draft):
        stopping.request_stop(draft, observed, deadline)
        draft.set(message="activeDeadlineSeconds is over: the driver saves a checkpoint")


def has_attempt(draft: Draft) -> bool:
    """Return True if there is an attempt that is not over."""
    status = draft.status
    return status.job is not None and status.next_retry_time is None and not status.phase.finished


def stop(draft: Draft, observed: Observed, since: datetime, reason: Reason, *, force: bool) -> bool:
    """Follow the attempt of a run that is to be suspended, and ask its driver to stop.

    However it ends, it is not restarted; see `_fail`.

    Args:
        draft: the draft.
        observed: the observed state.
        since: when the run was first to be suspended.
        reason: the reason of the suspension.
        force: True to give the attempt up if its driver does not end in time.

    Returns:
        True while the driver may still save a checkpoint.
    """
    job = draft.status.job
    assert job is not None
    if isinstance(observed.job, NoJob) and not job.status:  # Ray has not got it
        _end(draft, reason, "the attempt has not begun")
        return False
    _follow(draft, observed, job)
    if draft.status.phase.finished or not has_attempt(draft):
        return False
    progress = own_progress(draft.run, observed.progress)
    if force and stopping.is_out_of_time(draft, observed, progress, since):
        late = "the driver has not stopped in time; its pods are deleted"
        draft.event(reason, late, warning=True)
        _end(draft, reason, late)
        return False
    stopping.request_stop(draft, observed, since)
    return True


def ends_at_deadline(draft: Draft, observed: Observed) -> bool:
    """Return True if the run's deadline is over and no attempt can still save a checkpoint.

    Before that, `advance` asks the driver to stop, which it does after the current step. A success,
    or a failure for good, counts more than the deadline.
    """
    deadline, job = ending.deadline(draft), draft.status.job
    if deadline is None or draft.now < deadline:
        return False
    if job is None or not has_attempt(draft):
        return True
    progress, final = _record(draft, observed, job)
    if final and (final.outcome is Outcome.SUCCEEDED or not final.retryable):
        return False
    live = isinstance(observed.job, Unreachable) or (
        isinstance(observed.job, Job) and observed.job.live
    )
    late = stopping.is_out_of_time(draft, observed, progress, deadline)
    return final is not None or not live or late


def _is_silent(progress: Progress) -> bool:
    return (progress.silent_seconds or 0.0) > SILENT_SECONDS


def _begin_when_possible(draft: Draft, observed: Observed, roles_ready: bool) -> None:
    previous = draft.status.job
    if draft.status.next_retry_time is not None:
        wait = (parse_time(draft.status.next_retry_time) - draft.now).total_seconds()
        if wait > 0:
            draft.look_again(wait)
            return
    if previous and (lost := lost_pods.lost_head(draft, observed, previous)):
        _rebuild_cluster(draft, observed, lost)
        return
    head = observed.head(draft.run.metadata.uid)
    if not roles_ready or head is None or head.incarnation is None:
        startup.check_deadline(draft, observed)
        return
    if _report_tokens(draft, observed):
        return
    if previous and not _is_over(draft, observed, previous):
        draft.look_again(POLL_SECONDS)
        _give_up_head(draft, observed)
        return
    others = (pod for pod in observed.pods if pod.role is Role.DRIVER and pod.uid != head.uid)
    other = next((pod for pod in others if lost_pods.may_run(pod, draft.now)), None)
    if other:  # its driver may still write checkpoints
        draft.condition(
            ConditionType.TRAINING,
            "False",
            Reason.CLUSTER_LOST,
            f"waiting until pod {other.name} of the last attempt is deleted",
        )
        draft.look_again(POLL_SECONDS)
        return
    early = (
        pod
        for pod in observed.own_pods(draft.run.metadata.uid)
        if previous and lost_pods.joined_earlier_head(pod, head, draft.now)
    )
    if worker := next(early, None):
        draft.condition(
            ConditionType.TRAINING,
            "False",
            Reason.CLUSTER_LOST,
            f"waiting until pod {worker.name} joins the new head",
        )
        draft.look_again(POLL_SECONDS)
        return
    attempt = previous.attempt + 1 if previous else 1
    job = JobStatus(
        attempt=attempt,
        submission_id=submission_id(draft.run, attempt),
        incarnation=str(head.incarnation),
    )
    cluster = RayClusterStatus(name=draft.run.metadata.name)
    draft.set(job=job, ray_cluster=cluster, next_retry_time=None, startup_timeouts=0)
    if draft.is_true(ConditionType.STALLED):
        draft.condition(ConditionType.STALLED, "False", Reason.PROGRESSING)
    draft.condition(
        ConditionType.TRAINING, "False", Reason.SUBMITTING, f"submitting attempt {attempt}"
    )
    draft.job = _submission(draft.run, job)
    draft.look_again(POLL_SECONDS)


def _is_over(draft: Draft, observed: Observed, previous: JobStatus) -> bool:
    """Return True if the previous attempt's job has ended; stop it if it has not.

    Checked on a new incarnation too: the head may have restarted just before the job reached it.
    """
    if isinstance(observed.job, Job) and observed.job.live:
        _stop_job(draft, observed, previous)
    return isinstance(observed.job, NoJob) or (
        isinstance(observed.job, Job) and not observed.job.live
    )


def _give_up_head(draft: Draft, observed: Observed) -> None:
    """Delete the RayCluster if its head cannot say that the previous attempt is over."""
    if not isinstance(observed.job, Unreachable):
        return
    ready = draft.find(ConditionType.ROLES_READY)
    since = [draft.status.next_retry_time, ready.last_transition_time if ready else None]
    asked = max(parse_time(time) for time in since if time)
    if (draft.now - asked).total_seconds() >= stopping.UNREACHABLE_SECONDS:
        _rebuild_cluster(draft, observed, f"its head does not answer: {observed.job.why}")


def _rebuild_cluster(draft: Draft, observed: Observed, why: str) -> None:
    """Delete the RayCluster, so that it is created again; without a word if it is to go anyway."""
    if draft.suspending:
        return
    if lost_pods.delete_cluster(draft, observed):
        message = f"the RayCluster is built again: {why}"
        draft.event(Reason.CLUSTER_LOST, message, warning=True)


def _follow(draft: Draft, observed: Observed, job: JobStatus) -> None:
    progress, final = _record(draft, observed, job)
    if final and final.outcome is Outcome.SUCCEEDED:
        if progress and draft.status.checkpoint and _was_extended(draft.run, progress):
            _fail(draft, observed, _extended(final), final.reason, final.message)
        else:
            ending.succeed(draft, final.message)
        return
    if final and not final.retryable:
        _fail(draft, observed, final, final.reason, final.message, retryable=False)
        return
    draft.look_again(_poll_seconds(progress))
    head = observed.head(draft.run.metadata.uid)
    if lost_pods.was_replaced(head, job):
        waits = final is None and head is not None and head.incarnation
        if waits and _waits_for_report(draft, observed):
            return
        _fail(
            draft,
            observed,
            final,
            Reason.CLUSTER_LOST,
            "the head of the RayCluster was replaced or restarted",
        )
    elif isinstance(observed.job, NoJob):
        _follow_unknown(draft, observed, job, final)
    elif lost := lost_pods.lost_head(draft, observed, job):
        _fail(draft, observed, final, Reason.NODE_LOST, lost)
        _rebuild_cluster(draft, observed, lost)
    elif isinstance(observed.job, Unreachable):
        if final is None:
            _report_training(draft, observed, progress)
    elif observed.job.live:
        _follow_live(draft, observed, observed.job, progress, final)
    elif final or not _waits_for_report(draft, observed):
        _conclude(draft, observed, observed.job, final)


def _follow_unknown(
    draft: Draft, observed: Observed, job: JobStatus, final: FinalReport | None
) -> None:
    """Submit a job that Ray does not know, unless Ray has known it before."""
    if job.status:
        _fail(draft, observed, final, Reason.DRIVER_LOST, "Ray no longer knows the job")
    else:
        _submit_again(draft, observed, job)


def _was_extended(run: AgenticRun, progress: Progress) -> bool:
    """Return True if maxSteps was raised too late for the driver to see it."""
    used = progress.observed_generation
    return used is not None and progress.max_steps < run.spec.pipeline.max_steps


def _extended(final: FinalReport) -> FinalReport:
    """Return the report of a driver that stopped where the run is to go on."""
    changes = {"outcome": Outcome.STOPPED, "reason": Reason.CONFIGURED.value, "retryable": True}
    return final.model_copy(
        update=changes | {"message": f"maxSteps was raised at the end: {final.message}"}
    )


def _record(
    draft: Draft, observed: Observed, job: JobStatus
) -> tuple[Progress | None, FinalReport | None]:
    """Copy what is known about the attempt into the status.

    Returns:
        The attempt's snapshot, and its final report, of which the status keeps a copy: the reporter
        may be lost between the report and the exit of the driver.
    """
    if isinstance(observed.job, Job):
        draft.update_job(status=observed.job.status)
    progress, final = own_progress(draft.run, observed.progress), job.report
    if progress:
        apply_snapshot(draft, progress)
        final = progress.final or final
    if final:
        draft.update_job(report=final)
    return progress, final


def _submit_again(draft: Draft, observed: Observed, job: JobStatus) -> None:
    """Submit an attempt that Ray does not know yet, and say if Ray has refused it."""
    trouble, submit = observed.job_trouble, _submission(draft.run, job)
    if stopping.may_act(draft, observed, submit):
        draft.job = submit
    if trouble is None or not isinstance(trouble.action, Submit):
        return
    times = "once, at" if trouble.count == 1 else f"{trouble.count} times since"
    message = (
        f"Ray has refused the submission {times} {format_time(trouble.since)}: {trouble.message}"
    )
    before = draft.find(ConditionType.TRAINING)
    if before is None or before.reason != Reason.SUBMISSION_REFUSED:
        draft.event(Reason.SUBMISSION_REFUSED, message, warning=True)
    draft.condition(ConditionType.TRAINING, "False", Reason.SUBMISSION_REFUSED, message)


def _submission(run: AgenticRun, job: JobStatus) -> Submit:
    """Return the submission of an attempt, with what has changed since the pods were made."""
    changed = run.metadata.generation > 1
    return Submit(
        job.submission_id,
        job.attempt,
        LiveConfig.of(run) if changed else None,
        run.spec.roles.elastic if changed else {},
    )


def _stop_job(draft: Draft, observed: Observed, job: JobStatus) -> None:
    """Let Ray stop the job of an attempt that is over."""
    stop_ = Stop(job.submission_id)
    if stopping.may_act(draft, observed, stop_):
        draft.job = stop_


def _waits_for_report(draft: Draft, observed: Observed) -> bool:
    """Return True while an ended attempt's final report may still come.

    The reporter has the report but does not answer, so the operator waits for a limited time.
    """
    if not isinstance(observed.progress, Unreachable):
        return False
    draft.condition(
        ConditionType.TRAINING,
        "Unknown",
        Reason.PROGRESS_UNAVAILABLE,
        f"the attempt has ended; its final report is not available: {observed.progress.why}",
    )
    return _seconds_since_end(draft, observed) < REPORT_PATIENCE_SECONDS


def _seconds_since_end(draft: Draft, observed: Observed) -> float:
    """Return the seconds since the attempt was first seen to have ended; 0 the first time."""
    job = draft.status.job
    assert job is not None
    if job.end_time is None:
        draft.update_job(end_time=observed.end_time or format_time(draft.now))
    end_time = draft.status.job.end_time if draft.status.job else None
    assert end_time is not None
    return (draft.now - parse_time(end_time)).total_seconds()


def _follow_live(
    draft: Draft,
    observed: Observed,
    seen: Job,
    progress: Progress | None,
    final: FinalReport | None,
) -> None:
    job = draft.status.job
    assert job is not None
    if final:  # it has failed and is about to exit
        draft.condition(ConditionType.TRAINING, "False", final.reason, final.message)
        if _seconds_since_end(draft, observed) > ending.EXIT_SECONDS:
            _stop_job(draft, observed, job)
        return
    if seen.status == "RUNNING" and draft.status.phase not in _TRAINING:
        draft.phase(Phase.RUNNING)
        draft.event(
            Reason.DRIVER_RUNNING, f"attempt {job.attempt} runs as Ray job {job.submission_id}"
        )
    _report_training(draft, observed, progress)


def _report_tokens(draft: Draft, observed: Observed) -> bool:
    """Set the condition if the head and the operator have different tokens. Return True then.

    Nothing else is concluded from it: the driver may be training.
    """
    seen = (observed.job, observed.progress)
    trouble = next((item for item in seen if isinstance(item, Unreachable) and item.tokens), None)
    if trouble is None:
        return False
    name = draft.run.metadata.name
    cluster = observed.child("RayCluster", name)
    remedy = f", or delete RayCluster {name}"
    if cluster and trouble.reason is Reason.TOKENS_REFUSED:
        remedy = f": delete Secret {secret_of(cluster)} and RayCluster {name}"
    message = (
        f"{trouble.why}{remedy}; it is built again, and the run resumes from its newest checkpoint"
    )
    before = draft.find(ConditionType.TRAINING)
    if before is None or before.reason != trouble.reason:
        draft.event(trouble.reason, message, warning=True)
    draft.condition(ConditionType.TRAINING, "Unknown", trouble.reason, message)
    draft.set(message=message)
    return True


def _configure(draft: Draft, observed: Observed, progress: Progress) -> None:
    """Send the run's settings to the driver if it uses older ones."""
    job, used = draft.status.job, progress.observed_generation
    if used is None or job is None or draft.suspending:
        return
    if used < draft.run.metadata.generation:
        stopping.request(draft, observed, Configure(LiveConfig.of(draft.run)))
    elif job.observed_generation not in (None, used):
        draft.event(
            Reason.CONFIGURED,
            f"the driver uses the settings of generation {used}: {progress.max_steps} steps",
        )
    draft.update_job(observed_generation=used)


def _report_training(draft: Draft, observed: Observed, progress: Progress | None) -> None:
    if _report_tokens(draft, observed):
        return
    if progress and _is_silent(progress):
        draft.condition(
            ConditionType.TRAINING,
            "Unknown",
            Reason.DRIVER_SILENT,
            f"the driver has sent nothing for more than {format_span(SILENT_SECONDS)}: "
            "it is frozen or very busy, or dead together with Ray's dashboard",
        )
        _report_stall(draft, observed, progress)
    elif progress:
        _configure(draft, observed, progress)
        draft.condition(
            ConditionType.TRAINING, "True", Reason.DRIVER_RUNNING, f"attempt {progress.attempt}"
        )
        draft.set(message=progress.message or None)
        _report_stall(draft, observed, progress)
    elif trouble := _head_trouble(draft, observed):
        draft.condition(ConditionType.TRAINING, "Unknown", trouble.reason, trouble.message)
    elif draft.status.phase not in _TRAINING:
        draft.condition(
            ConditionType.TRAINING, "False", Reason.SUBMITTING, "waiting for the driver to start"
        )
    elif isinstance(observed.progress, Unreachable):
        draft.condition(
            ConditionType.TRAINING, "Unknown", Reason.PROGRESS_UNAVAILABLE, observed.progress.why
        )
    else:
        draft.condition(
            ConditionType.TRAINING,
            "False",
            Reason.SUBMITTING,
            "waiting for the driver's first progress snapshot",
        )
        _report_late_start(draft, observed)


def _head_trouble(draft: Draft, observed: Observed) -> Problem | None:
    """Return the problem of a head that does not answer and is not ready or being deleted."""
    head = observed.head(draft.run.metadata.uid)
    if head is None or not isinstance(observed.progress, Unreachable):
        return None
    if head.deleting:
        return Problem(Reason.PODS_PENDING, f"head pod {head.name} is being deleted")
    if head.ready:
        return None
    cause = head.problem or Problem(Reason.PODS_PENDING, "is not ready")
    return Problem(cause.reason, f"head pod {head.name} {cause.message}")


def _report_stall(draft: Draft, observed: Observed, progress: Progress) -> None:
    """Set the condition Stalled, and end an attempt that has stalled if the run says so."""
    policy = draft.run.spec.failure_policy.stall
    limit = max(policy.min_seconds, policy.factor * (progress.seconds_per_step or 0.0))
    if (progress.idle_seconds or 0.0) <= limit:
        draft.condition(ConditionType.STALLED, "False", Reason.PROGRESSING)
        return
    _stall(
        draft,
        observed,
        f"no step and no other news for more than {format_span(limit)}, "
        f"while the activity was {progress.activity.value}",
    )


def _report_late_start(draft: Draft, observed: Observed) -> None:
    """Treat a driver that never sends its first snapshot as stalled.

    Its own start counts: the condition Training may have been False for hours before it.
    """
    limit = draft.run.spec.failure_policy.stall.min_seconds
    began = observed.job.start_time if isinstance(observed.job, Job) else None
    if began is not None and draft.now.timestamp() - began > limit:
        _stall(draft, observed, f"no snapshot from the driver for more than {format_span(limit)}")


def _stall(draft: Draft, observed: Observed, message: str) -> None:
    policy = draft.run.spec.failure_policy.stall
    if not draft.is_true(ConditionType.STALLED):
        draft.event(Reason.NO_PROGRESS, message, warning=True)
    draft.condition(ConditionType.STALLED, "True", Reason.NO_PROGRESS, message)
    draft.set(message=message)
    if policy.action == "Restart":
        _fail(draft, observed, None, Reason.NO_PROGRESS, message)


def _conclude(draft: Draft, observed: Observed, seen: Job, final: FinalReport | None) -> None:
    if final is None and seen.status == "SUCCEEDED":
        _conclude_without_report(draft, observed)
        return
    if final is None and seen.exit_code == ExitCode.STOPPED:
        final = FinalReport(
            outcome=Outcome.STOPPED,
            reason=Reason.STOPPED,
            message="the driver stopped on request; its report is lost",
            retryable=True,
            time=format_time(draft.now),
        )
    retryable = seen.exit_code != ExitCode.INVALID_CONFIG
    reason = Reason.DRIVER_FAILED if retryable else Reason.INVALID_CONFIG
    _fail(draft, observed, final, reason, f"job {seen.status}: {seen.message}", retryable)


def _conclude_without_report(draft: Draft, observed: Observed) -> None:
    """Decide whether exit code 0 alone means success: only after the last step."""
    last, saved = draft.run.spec.pipeline.max_steps, draft.status.checkpoint
    if max(draft.status.step or 0, saved.step if saved else 0) >= last:
        ending.succeed(draft, f"the driver ended after the last step ({last})")
        return
    _fail(
        draft,
        observed,
        None,
        Reason.DRIVER_FAILED,
        "the driver ended with exit code 0, but without a final report and before the last step: "
        f"step {draft.status.step or 0} of {last}",
    )


def _fail(
    draft: Draft,
    observed: Observed,
    final: FinalReport | None,
    reason: Reason | str,
    message: str,
    retryable: bool = True,
) -> None:
    """Handle a failed attempt: restart it or fail the run.

    The driver's final report, if there is one, takes precedence over `reason` and `message`.
    """
    job = draft.status.job
    assert job is not None
    cause, text = (final.reason, final.message) if final else (str(reason), message)
    retryable = final.retryable if final else retryable
    if isinstance(observed.job, Job) and observed.job.log_tail:
        draft.set(log_tail=observed.job.log_tail[-MAX_TEXT:])
    if not retryable:
        ending.fail(draft, cause, text)
        return
    stopped = final is not None and final.outcome is Outcome.STOPPED
    summary = f"attempt {job.attempt} {'ended' if stopped else 'failed'} ({cause}): {text}"
    if draft.suspending:
        if not stopped:
            draft.event(cause, summary, warning=True)
        _end(draft, cause, text)
        return
    _count(draft, failure=not stopped)
    policy, failures = draft.run.spec.failure_policy, draft.status.failures_without_progress
    if failures > policy.max_restarts:
        ending.fail(
            draft,
            Reason.RETRIES_EXHAUSTED,
            f"attempt {job.attempt} failed ({cause}) after {policy.max_restarts} restarts "
            f"without a new step: {text}",
        )
        return
    wait = backoff_seconds(max(0, failures - 1), policy.backoff_seconds, MAX_BACKOFF_SECONDS)
    draft.set(restarts=draft.status.restarts + 1)
    draft.phase(Phase.RESTARTING, summary)
    _end(draft, cause, text, wait)
    draft.event(cause, f"{summary}; next attempt in {wait:.0f} s", warning=not stopped)
    draft.look_again(wait)


def _end(draft: Draft, reason: Reason | str, message: str, wait: float = 0.0) -> None:
    """End the attempt. The next one may begin after `wait` seconds."""
    draft.set(
        activity=None,
        eta=None,
        estimated_completion_time=None,
        next_retry_time=format_time(draft.now + timedelta(seconds=wait)),
    )
    draft.condition(ConditionType.TRAINING, "False", reason, message)
    ending.end_stall(draft, reason, message)


def _count(draft: Draft, *, failure: bool) -> None:
    """Count a restart, as a failure or not. Failures count from the newest progress on.

    Steps that a resumed attempt repeats are no progress: else a run that always fails at one step
    would restart forever.
    """
    status = draft.status
    reached, before = status.step or 0, status.restarted_at_step
    further = before is None or reached > before
    failures = 0 if further else status.failures_without_progress
    draft.set(
        failures_without_progress=failures + failure,
        restarted_at_step=max(reached, before or 0),
    )


def _poll_seconds(progress: Progress | None) -> float:
    """Return the poll interval: half a step, but between 1 and 3 seconds."""
    if progress is None or progress.seconds_per_step is None:
        return POLL_SECONDS
    return min(max(progress.seconds_per_step / 2, 1.0), POLL_SECONDS * 1.5)
