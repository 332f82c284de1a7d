"""Attempts of the driver, one at a time: begin, follow, restart.

Write-ahead: the status holds an attempt's number, its submission id and the incarnation of the
head before the job is submitted, and each submission id is submitted to one incarnation only. Ray
refuses a submission id that it knows, and forgets ids only when the incarnation changes. So an
attempt runs at most once, even if the operator crashes at any point.

`follow` returns what is known of an attempt: `Continues`, `Succeeded` or `Over`. What follows from
an end depends on the situation: a restart (`restart`), or the end of a stop (`stopping`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

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
    names,
)
from agenticrun_api.names import submission_id
from agenticrun_api.roles import SAVES
from agenticrun_api.status import JobStatus, ObstacleStatus, RayClusterStatus
from agenticrun_api.version import __version__, is_supported
from agenticrun_operator import resources
from agenticrun_operator.observed import Job, NoJob, Pod, Problem, Unreachable
from agenticrun_operator.planning import children, pods, times
from agenticrun_operator.planning.disruption import head_replaced
from agenticrun_operator.planning.result import (
    MAX_TEXT,
    Configure,
    JobAction,
    RequestStop,
    Result,
    Said,
    Stop,
    Submit,
    empty_role,
    note,
    text,
    warning,
)
from agenticrun_operator.planning.state import SILENT_SECONDS, State

MAX_BACKOFF_SECONDS = 600.0
MANY_DISRUPTIONS = 3
"""Number of disruptions without a new step from which on each one is a Warning."""
POLL_SECONDS = 2.0
WATCHED_SECONDS = 23.0
"""Time between two looks at a run whose news bring looks of their own. With its spread it is longer
than `full_look_seconds`, so that each of them reads the objects."""
REPORT_PATIENCE_SECONDS = 60.0
"""Time to wait for the final report of an ended job before Ray's job status decides alone."""
EXIT_SECONDS = 30.0
"""Time a driver has to exit after its final report before its job or RayCluster is removed."""
HEAD_LOST_SECONDS = 120.0
"""Time that a head may be not ready and silent before it is given up."""
UNREACHABLE_SECONDS = 120.0
"""Time for a head that does not answer to do so before its pods are given back, or to take a
request."""
_TRAINING = (Phase.RUNNING, Phase.SUSPENDING)


@dataclass(frozen=True)
class Continues:
    """The attempt is not over."""

    result: Result


@dataclass(frozen=True)
class Succeeded:
    """The attempt has trained all steps."""

    message: str


@dataclass(frozen=True)
class Over:
    """The attempt has ended, or is given up."""

    reason: str
    message: str
    retryable: bool = True
    """False if another attempt would end the same way."""
    stopped: bool = False
    """True if the driver has saved a checkpoint and stopped in order."""
    disruption: str = ""
    """The act of the platform that ended the attempt; empty if the end is the run's own."""
    rebuild: str = ""
    """Why the RayCluster has to be built again; empty if it can be used."""


Verdict = Continues | Succeeded | Over


# -- follow ----------------------------------------------------------------------------------------


def follow(state: State) -> Verdict:
    """Return what is known of the attempt that is not over."""
    final = state.job.report
    if final and (final.outcome is Outcome.SUCCEEDED or not final.retryable):
        return _end_for_good(state, final)
    if head_replaced(state):
        waits = final is None and state.head is not None and state.head.incarnation
        if waits and _waits_for_report(state):
            return Continues(_report_awaited(state))
        lost = "the head of the RayCluster was replaced or restarted"
        return _over(state, Reason.CLUSTER_LOST, lost)
    match state.observed.job:
        case NoJob():
            if state.job.status:
                return _over(state, Reason.DRIVER_LOST, "Ray no longer knows the job")
            return Continues(_submit_again(state))
        case Unreachable():
            return _follow_unreachable(state)
        case Job() as seen:
            return _follow_live(state, seen) if seen.live else _follow_ended(state, seen)


def _end_for_good(state: State, final: FinalReport) -> Verdict:
    """Return a failure that is not retried, or the success.

    It is no success if maxSteps was raised too late for the driver to see it.
    """
    if final.outcome is not Outcome.SUCCEEDED:
        return Over(final.reason, final.message, retryable=False)
    progress = state.progress
    used = progress.observed_generation if progress else None
    steps = state.run.spec.pipeline.max_steps
    if progress and used is not None and state.status.checkpoint and progress.max_steps < steps:
        message = f"maxSteps was raised at the end: {final.message}"
        return Over(Reason.CONFIGURED, message, stopped=True)
    return Succeeded(final.message)


def _over(
    state: State,
    reason: Reason,
    message: str,
    *,
    retryable: bool = True,
    disruption: str = "",
    rebuild: str = "",
) -> Over:
    """Return the end of the attempt. Its final report, if there is one, names the cause."""
    final = state.job.report
    stopped = final is not None and final.outcome is Outcome.STOPPED
    if final and final.reason == Reason.DISRUPTED:
        disruption = disruption or final.message
    return Over(
        reason=final.reason if final else reason.value,
        message=final.message if final else state.job.failed_pod or message,
        retryable=final.retryable if final else retryable,
        stopped=stopped,
        disruption=state.job.disruption or disruption,
        rebuild=rebuild,
    )


def lost_head(state: State, job: JobStatus) -> str:
    """Return a sentence if the head that the attempt was submitted to is lost, else "".

    A head is lost if it is not ready and has long been silent. A silent head that is ready is a
    problem of the network to the operator. The time counts from the operator's own first
    observation, because the clocks of nodes differ.
    """
    head = state.head
    if head is None or head.ready or not head.was_given(job):
        return ""
    seen = (state.observed.job, state.observed.progress)
    if not all(isinstance(item, Unreachable) and not item.tokens for item in seen):
        return ""
    since = job.unknown_since if state.has_attempt else state.pods_since.since
    if since is None or state.seconds_since(since) < HEAD_LOST_SECONDS:
        return ""
    return (
        f"head pod {head.name} on node {head.node} has not answered or been ready for "
        f"{times.format_span(HEAD_LOST_SECONDS)}"
    )


def _follow_unreachable(state: State) -> Verdict:
    """Return what is known of an attempt of which Ray says nothing.

    A driver that the operator has seen is given up only with its head. If the answer to its
    submission was lost, it may never have reached Ray: it has as much time as pods have to become
    ready.
    """
    if lost := lost_head(state, state.job):
        head = state.head
        # A node that no longer answers takes its head; else what runs in the head hangs.
        node_lost = head and head.problem and head.problem.reason is Reason.NODE_LOST
        disruption = lost if node_lost or (head and head.deleting) else ""
        return _over(state, Reason.NODE_LOST, lost, disruption=disruption, rebuild=lost)
    limit = state.run.spec.failure_policy.startup_deadline_seconds
    confirmed = state.job.status or state.job.report or state.progress
    if state.unreachable and not confirmed and state.seconds_since(state.unreachable_since) > limit:
        lost = (
            "Ray has not confirmed the submission, and the head has not answered for "
            f"{times.format_span(limit)}: {state.unreachable.why}"
        )
        return _over(state, Reason.PROGRESS_UNAVAILABLE, lost, rebuild=lost)
    return Continues(Result()) if state.job.report else _report_training(state)


def report_unreachable(state: State) -> Result | None:
    """Report a head that is ready and does not answer, and remember since when; None if it answers.

    The same before the first attempt, between two and while one may train; then its driver may be
    well.
    """
    if state.unreachable is None:
        return None
    name = state.head.name if state.head else ""
    message = (
        f"head pod {name} is ready, but does not answer the operator: {state.unreachable.why}. A "
        "NetworkPolicy or firewall must let the operator reach its ports "
        f"{names.DASHBOARD_PORT} (Ray) and {names.REPORTER_PORT} (reporter)"
    )
    since = state.unreachable_since or state.now
    reason = Reason.PROGRESS_UNAVAILABLE
    said = Said("Unknown" if state.has_attempt else "False", reason, message)
    return Result(
        fields={
            "message": text(message),
            "obstacle": ObstacleStatus(reason=reason.value, since=times.format_time(since)),
        },
        conditions={ConditionType.TRAINING: said},
        look_after=POLL_SECONDS,
    )


def _waits_for_report(state: State) -> bool:
    """Return True while an ended attempt's final report may still come.

    The reporter has the report but does not answer, so the operator waits for a limited time.
    """
    unreachable = isinstance(state.observed.progress, Unreachable)
    return unreachable and state.seconds_since(state.job.end_time) < REPORT_PATIENCE_SECONDS


def _report_awaited(state: State) -> Result:
    why = state.observed.progress.why if isinstance(state.observed.progress, Unreachable) else ""
    message = f"the attempt has ended; its final report is not available: {why}"
    return Result(
        conditions={ConditionType.TRAINING: Said("Unknown", Reason.PROGRESS_UNAVAILABLE, message)},
        look_after=_poll_seconds(state.progress),
    )


def _submit_again(state: State) -> Result:
    """Submit an attempt that Ray does not know yet, and report if Ray has refused it."""
    trouble, submit = state.observed.job_trouble, _submission(state.run, state.job)
    result = Result(
        job=submit if may_act(state, submit) else None, look_after=_poll_seconds(state.progress)
    )
    if trouble is None or not isinstance(trouble.action, Submit):
        return result
    how_often = "once, at" if trouble.count == 1 else f"{trouble.count} times since"
    since = times.format_time(trouble.since)
    message = f"Ray has refused the submission {how_often} {since}: {trouble.message}"
    said = Said("False", Reason.SUBMISSION_REFUSED, message, event="Warning")
    return result | Result(conditions={ConditionType.TRAINING: said})


def _submission(run: AgenticRun, job: JobStatus) -> Submit:
    """Return the submission of an attempt, with what has changed since the pods were made.

    The settings in the pods have the replicas of the spec, and a queue may have admitted fewer.
    """
    changed = run.metadata.generation > 1
    return Submit(
        job.submission_id,
        job.attempt,
        LiveConfig.of(run) if changed else None,
        run.spec.roles.elastic if changed or run.spec.queue else {},
    )


def may_act(state: State, action: JobAction) -> bool:
    """Return True unless the head refused such an action last, and it is too early to repeat."""
    trouble = state.observed.job_trouble
    return (
        trouble is None
        or not isinstance(action, type(trouble.action))
        or state.now >= trouble.retry_at
    )


def stop_job(state: State, submission_id: str) -> Result:
    """Let Ray stop the job of an attempt that is over."""
    stop = Stop(submission_id)
    return Result(job=stop if may_act(state, stop) else None)


def request(state: State, action: Configure | RequestStop, since: datetime | None = None) -> Result:
    """Send a request to the driver, which may take a whole step to follow it.

    It is repeated after a while only, in case the reporter has lost it.

    Args:
        state: the state.
        action: the request.
        since: when the request was first wanted; a request that was sent before is an older one.
    """
    last, sent_at = state.observed.last_action or (None, None)
    sent = last == action and sent_at is not None and (since is None or sent_at >= since)
    wait = state.wait_to_repeat(sent_at if sent else None)
    if wait > 0:
        return Result(look_after=wait)
    # The next look sends it again if it is refused.
    return Result(job=action if may_act(state, action) else None, look_after=POLL_SECONDS)


def _follow_live(state: State, seen: Job) -> Verdict:
    job, final = state.job, state.job.report
    if final:  # it has failed and is about to exit
        said = Said("False", final.reason, final.message)
        result = Result(
            conditions={ConditionType.TRAINING: said}, look_after=_poll_seconds(state.progress)
        )
        if state.seconds_since(job.end_time) > EXIT_SECONDS:
            result |= stop_job(state, job.submission_id)
        return Continues(result)
    if seen.status != "RUNNING" or state.status.phase in _TRAINING:
        return _report_training(state)
    message = f"attempt {job.attempt} runs as Ray job {job.submission_id}"
    begun = Result(
        fields={"phase": Phase.RUNNING, "message": None},
        events=(note(Reason.DRIVER_RUNNING, message),),
    )
    verdict = _report_training(state.with_fields(dict(begun.fields)))
    return Continues(begun | verdict.result) if isinstance(verdict, Continues) else verdict


# -- report ----------------------------------------------------------------------------------------


def _report_training(state: State) -> Verdict:
    """Return what an attempt does that is not over, or its end if it stalls."""
    progress, seen = state.progress, state.observed.progress
    watched = state.observed.progress_watched
    result = Result(look_after=WATCHED_SECONDS if watched else _poll_seconds(progress))
    if tokens := token_trouble(state):
        return Continues(result | tokens)
    said, stall = None, ""
    if progress and state.is_silent:
        said = Said(
            "Unknown",
            Reason.DRIVER_SILENT,
            "the driver has sent nothing for more than "
            f"{times.format_span(SILENT_SECONDS)}: it is frozen or very busy, or dead "
            "together with Ray's dashboard",
        )
        stall = _stall_of(state, progress)
    elif progress:
        said = Said("True", Reason.DRIVER_RUNNING, f"attempt {progress.attempt}")
        result |= _configure(state, progress) | _message(state, progress)
        stall = _stall_of(state, progress)
    elif trouble := _head_trouble(state):
        said = Said("Unknown", trouble.reason, trouble.message)
    elif silent := report_unreachable(state):
        return Continues(result | silent)
    elif isinstance(seen, Unreachable):
        said = Said("Unknown", Reason.PROGRESS_UNAVAILABLE, seen.why)
    elif state.status.phase not in _TRAINING:
        said = Said("False", Reason.SUBMITTING, "waiting for the driver to start")
    else:
        said = Said("False", Reason.SUBMITTING, "waiting for the driver's first progress snapshot")
        stall = _late_start(state)
    result |= Result(conditions={ConditionType.TRAINING: said})
    if stall and state.run.spec.failure_policy.stall.action == "Restart":
        return Over(Reason.NO_PROGRESS, stall, disruption=state.job.disruption)
    if stall:
        stalled = Said("True", Reason.NO_PROGRESS, stall, event="Warning")
        shown = Result(fields={"message": text(stall)})
        return Continues(result | shown | Result(conditions={ConditionType.STALLED: stalled}))
    if progress:
        moves = Said("False", Reason.PROGRESSING)
        result |= Result(conditions={ConditionType.STALLED: moves})
    return Continues(result)


def token_trouble(state: State) -> Result | None:
    """Return what to report if the head and the operator have different tokens; None if not.

    Nothing else is concluded from it: the driver may be training.
    """
    seen = (state.observed.job, state.observed.progress)
    trouble = next((item for item in seen if isinstance(item, Unreachable) and item.tokens), None)
    if trouble is None:
        return None
    cluster = state.observed.child("RayCluster", state.name)
    gone = f"RayCluster {state.name}"
    if cluster and trouble.reason is Reason.TOKENS_REFUSED:
        gone = f"Secret {resources.secret_of(cluster)} and {gone}"
    message = (
        f"{trouble.why}. If that is not possible: set suspend: true, which saves a checkpoint and "
        f"needs no token once the pods are given up, or delete {gone}: it is built again, and the "
        "run resumes from its newest checkpoint. Steps since then are lost"
    )
    said = Said("Unknown", trouble.reason, message, event="Warning")
    return Result(fields={"message": text(message)}, conditions={ConditionType.TRAINING: said})


def _message(state: State, progress: Progress) -> Result:
    """Return the message of a run that trains: the driver's words, or the role without a pod."""
    missing = empty_role(state.roles.statuses)
    message = progress.message or None
    if missing and state.roles.problem:
        message = f"no step can end: {state.roles.problem.message}"
    return Result(fields={"message": text(message)})


def _configure(state: State, progress: Progress) -> Result:
    """Send the run's settings to the driver if it uses older ones."""
    job, used = state.job, progress.observed_generation
    if used is None or state.status.stopping:
        return Result()
    result = Result(fields={"job": job.model_copy(update={"observed_generation": used})})
    if used < state.run.metadata.generation:
        return result | request(state, Configure(LiveConfig.of(state.run)))
    if job.observed_generation in (None, used):
        return result
    message = f"the driver uses the settings of generation {used}: {progress.max_steps} steps"
    return result | Result(events=(note(Reason.CONFIGURED, message),))


def _head_trouble(state: State) -> Problem | None:
    """Return the problem of a head that does not answer and is not ready or being deleted."""
    head = state.head
    if head is None or not isinstance(state.observed.progress, Unreachable):
        return None
    if head.deleting:
        return Problem(Reason.PODS_PENDING, f"head pod {head.name} is being deleted")
    if head.ready:
        return None
    cause = head.problem or Problem(Reason.PODS_PENDING, "is not ready")
    return Problem(cause.reason, f"head pod {head.name} {cause.message}")


def _stall_of(state: State, progress: Progress) -> str:
    """Return how the driver stalls; empty if it does not."""
    policy = state.run.spec.failure_policy.stall
    limit = max(policy.min_seconds, policy.factor * (progress.seconds_per_step or 0.0))
    if (progress.idle_seconds or 0.0) <= limit:
        return ""
    return (
        f"no step and no other news for more than {times.format_span(limit)}, "
        f"while the activity was {progress.activity.value}"
    )


def _late_start(state: State) -> str:
    """Return a stall of a driver that never sends its first snapshot; empty if it may still.

    Its own start counts: the attempt may have waited for hours before it.
    """
    limit = state.run.spec.failure_policy.stall.min_seconds
    began = state.observed.job.start_time if isinstance(state.observed.job, Job) else None
    if began is None or state.now.timestamp() - began <= limit:
        return ""
    return f"no snapshot from the driver for more than {times.format_span(limit)}"


def _follow_ended(state: State, seen: Job) -> Verdict:
    """Return the end of an attempt whose job has ended, once its report is there or lost."""
    final = state.job.report
    if final is None and _waits_for_report(state):
        return Continues(_report_awaited(state))
    if final is None and seen.status == "SUCCEEDED":
        # Exit code 0 alone means success only after the last step.
        last, saved = state.run.spec.pipeline.max_steps, state.status.checkpoint
        step = state.status.step or 0
        if max(step, saved.step if saved else 0) >= last:
            return Succeeded(f"the driver ended after the last step ({last})")
        early = "without a final report and before the last step"
        message = f"the driver ended with exit code 0, but {early}: step {step} of {last}"
        return _over(state, Reason.DRIVER_FAILED, message)
    if final is None and seen.exit_code == names.ExitCode.STOPPED:
        message = "the driver stopped on request; its report is lost"
        return Over(Reason.STOPPED, message, stopped=True, disruption=state.job.disruption)
    retryable = seen.exit_code != names.ExitCode.INVALID_CONFIG
    reason = Reason.DRIVER_FAILED if retryable else Reason.INVALID_CONFIG
    return _over(state, reason, f"job {seen.status}: {seen.message}", retryable=retryable)


def _poll_seconds(progress: Progress | None) -> float:
    """Return the poll interval: half a step, but between 1 and 3 seconds."""
    if progress is None or progress.seconds_per_step is None:
        return POLL_SECONDS
    return min(max(progress.seconds_per_step / 2, 1.0), POLL_SECONDS * 1.5)


# -- begin -----------------------------------------------------------------------------------------


def begin(state: State) -> Result:
    """Begin the next attempt, unless something has to come first.

    It waits for the backoff, for the pods that training needs (`State.has_enough_pods`), for the
    end of the previous attempt, and for everything that may still write checkpoints.
    """
    previous, retry = state.status.job, state.status.next_retry_time
    if retry is not None and (wait := -state.seconds_since(retry)) > 0:
        return Result(look_after=wait)
    if previous and (lost := lost_head(state, previous)):
        return children.delete_cluster(state, f"the RayCluster is built again: {lost}")
    head = state.head
    if head is None or head.incarnation is None or not state.has_enough_pods:
        return Result()
    if trouble := token_trouble(state) or report_unreachable(state):
        return trouble
    if previous and isinstance(state.observed.job, Job) and state.observed.job.live:
        # On a new incarnation, too: the head may have restarted just before the job reached it.
        return stop_job(state, previous.submission_id) | Result(look_after=POLL_SECONDS)
    if other := next((pod for pod in state.observed.pods if _is_in_the_way(state, pod)), None):
        return _waits(f"waiting until pod {other.name} of the last attempt is deleted")
    if previous:
        for pod in state.pods:
            if pods.joined_earlier_head(pod, head, state.now):
                return _waits(f"waiting until pod {pod.name} joins the new head")
    attempt = previous.attempt + 1 if previous else 1
    uid = state.cluster["metadata"]["uid"] if state.cluster else ""
    job = JobStatus(
        attempt=attempt,
        submission_id=submission_id(state.name, state.run.metadata.uid, attempt),
        incarnation=str(head.incarnation),
        newest_pod_time=state.newest_pod_time,
    )
    conditions = {
        ConditionType.TRAINING: Said("False", Reason.SUBMITTING, f"submitting attempt {attempt}")
    }
    return Result(
        fields={
            "job": job,
            "ray_cluster": RayClusterStatus(name=state.name, uid=uid),
            "next_retry_time": None,
            "startup_timeouts": 0,
        },
        conditions=conditions,
        job=_submission(state.run, job),
        look_after=POLL_SECONDS,
    )


def _is_in_the_way(state: State, pod: Pod) -> bool:
    """Return True if no attempt may begin while this pod runs.

    The driver of another head may still write checkpoints. A pod that saves and is leaving would
    ask the new attempt to stop, too.
    """
    another_head = pod.role is Role.DRIVER and pod is not state.head
    leaving = pod.role in SAVES and pod.deleting
    return (another_head or leaving) and pods.may_run(pod, state.now)


def _waits(message: str) -> Result:
    said = Said("False", Reason.CLUSTER_LOST, message)
    return Result(conditions={ConditionType.TRAINING: said}, look_after=POLL_SECONDS)


def report_version(state: State) -> Result:
    """Report if this operator supports the version of the worker image.

    Another version may still train well, so it is only reported.
    """
    job = state.status.job
    version = job.version if job else None
    if version is None or is_supported(version):
        said = Said("True", Reason.SPEC_READ, optional=True)
        return Result(conditions={ConditionType.ACCEPTED: said})
    message = (
        f"the worker image has AgenticRun {version}, which operator {__version__} does not "
        "support: they may be one minor version apart"
    )
    said = Said("Unknown", Reason.VERSION_SKEW, message, event="Warning")
    return Result(conditions={ConditionType.ACCEPTED: said})


# -- restart ---------------------------------------------------------------------------------------


def end(state: State, over: Over, wait: float = 0.0) -> Result:
    """End the attempt. The next one may begin after `wait` seconds."""
    fields: dict[str, Any] = {
        "activity": None,
        "eta": None,
        "estimated_completion_time": None,
        "next_retry_time": times.format_time(state.now + timedelta(seconds=wait)),
    }
    said = Said("False", over.reason, over.message)
    stalled = Said("False", over.reason, over.message, optional=True)
    conditions = {ConditionType.TRAINING: said, ConditionType.STALLED: stalled}
    return Result(fields=fields, conditions=conditions) | log_tail(state)


def log_tail(state: State) -> Result:
    """Keep the end of the driver's log, which goes with the pods, unless the user forbids it."""
    seen = state.observed.job
    wanted = state.run.spec.failure_policy.keep_log_tail
    if not wanted or not isinstance(seen, Job) or not seen.log_tail:
        return Result()
    return Result(fields={"log_tail": seen.log_tail[-MAX_TEXT:]})


def restart(state: State, over: Over) -> tuple[Result, Over | None]:
    """Return the restart after the end of an attempt, and why the run fails instead, or None.

    Failures count from the newest progress on. Steps that a resumed attempt repeats are no
    progress: else a run that always fails at one step would restart for ever. What the platform
    does (`Over.disruption`) counts on its own, and only ends runs that have a limit for it.
    """
    status, policy, attempt = state.status, state.run.spec.failure_policy, state.job.attempt
    reached, before = status.step or 0, status.restarted_at_step
    further = before is None or reached > before
    failed = not over.stopped and not over.disruption
    failures = (0 if further else status.failures_without_progress) + failed
    disruptions = (0 if further else status.disruptions_without_progress) + bool(over.disruption)
    counted = Result(
        fields={
            "failures_without_progress": failures,
            "disruptions_without_progress": disruptions,
            "restarted_at_step": max(reached, before or 0),
        }
    )
    if failures > policy.max_restarts:
        message = (
            f"attempt {attempt} failed ({over.reason}) after {policy.max_restarts} restarts "
            f"without a new step: {over.message}"
        )
        return counted, Over(Reason.RETRIES_EXHAUSTED, message)
    most = policy.max_disruptions
    if over.disruption and most is not None and status.disruptions >= most:
        message = (
            f"attempt {attempt} was disrupted after {most} disruptions "
            f"(failurePolicy.maxDisruptions): {over.disruption}"
        )
        return counted, Over(Reason.DISRUPTIONS_EXHAUSTED, message)
    # A run may cause its own evictions, by filling a disk: the wait grows, so that it shows.
    doublings = max(0, (disruptions if over.disruption else failures) - 1)
    wait = times.backoff_seconds(doublings, policy.backoff_seconds, MAX_BACKOFF_SECONDS)
    summary = summarize(state, over)
    post = warning if failed or disruptions >= MANY_DISRUPTIONS else note
    reason = Reason.DISRUPTED if over.disruption else over.reason
    result = Result(
        fields={
            "restarts": status.restarts + (not over.disruption),
            "disruptions": status.disruptions + bool(over.disruption),
            "phase": Phase.RESTARTING,
            "message": text(summary),
        },
        events=(post(reason, f"{summary}; next attempt in {wait:.0f} s"),),
        look_after=wait,
    )
    return counted | end(state, over, wait) | result, None


def summarize(state: State, over: Over) -> str:
    """Return a sentence about the end of an attempt."""
    attempt = f"attempt {state.job.attempt}"
    if over.disruption:
        saved = " after it had saved a checkpoint" if over.stopped else ""
        return f"{attempt} was disrupted{saved}: {over.disruption}"
    return f"{attempt} {'ended' if over.stopped else 'failed'} ({over.reason}): {over.message}"
