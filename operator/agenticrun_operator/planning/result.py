"""The output of planning: actions, and the status, conditions and events made of all decisions.

Conditions are observations. They are written once, at the end of a plan, and no decision reads
one. What must be remembered between two looks has a field of its own in the status.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from agenticrun_api import AgenticRunStatus, Condition, ConditionType, LiveConfig, Phase, Reason
from agenticrun_api.status import RoleStatus
from agenticrun_operator.planning import times
from agenticrun_operator.resources import Child, Event, Manifest

SOFT_WRITE_SECONDS = 10.0
"""Minimum interval between status writes that change only soft fields and messages."""
STEP_WRITE_SECONDS = 2.0
"""Minimum interval between status writes that also change the fields of a step."""
_STEP = frozenset({"step", "progress", "policy_version"})
_SOFT = frozenset(
    {
        "reward",
        "tokens_per_second",
        "staleness",
        "eta",
        "estimated_completion_time",
        "last_step_time",
        "activity",
        "message",
        "metrics",
    }
)
MAX_CONDITION_MESSAGE = 1024
MAX_TEXT = 4096

_REPORTED = (
    "step",
    "max_steps",
    "progress",
    "reward",
    "tokens_per_second",
    "staleness",
    "eta",
    "estimated_completion_time",
    "last_step_time",
    "policy_version",
    "activity",
    "metrics",
    "restarted_at_step",
    "checkpoint",
    "log_tail",
)
"""Fields of the status whose values come from the pods of the run."""
_RAY_STATES = ("", "PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED")
_REASON = re.compile("[A-Z][A-Za-z0-9]{0,63}")
_NOT_STORED = "the apiserver refuses the text: see the event StatusRefused"

_RESOLVES_ALONE = frozenset(
    {
        Reason.CLUSTER_CREATING,
        Reason.CLUSTER_DELETED,
        Reason.CONTAINER_NOT_READY,
        Reason.NODE_LOST,
        Reason.PODS_PENDING,
        Reason.QUEUED,
        Reason.RESCALING,
        Reason.WAITING_FOR_PREVIOUS_RUN,
    }
)
"""Reasons for a condition to be False that need no human action: the operator or Kubernetes is
already handling it.

Not Unschedulable and StartupDeadlineExceeded: the run tries again, but the cluster may never have
room for it.
"""

_HEAD_TROUBLE = frozenset({Reason.SUBMISSION_REFUSED, Reason.PROGRESS_UNAVAILABLE})
"""Reasons for Training to be False that need a user: no driver comes without one."""

ConditionStatus = Literal["True", "False", "Unknown"]


@dataclass(frozen=True)
class Delete:
    """An object to delete if it is still the one that was read (same uid)."""

    child: Child
    uid: str
    force: bool = False
    """Remove a pod at once, without the word of its kubelet."""
    foreground: bool = False
    """Keep the object until its own children are gone."""


@dataclass(frozen=True)
class Undeleted:
    """An object that stays although the operator has asked for its deletion."""

    child: Child
    reason: Reason
    message: str
    """Objects that stay, and why."""


@dataclass(frozen=True)
class Submit:
    """Submit the job of `status.job`. Repeating is safe: Ray accepts each submission id once."""

    submission_id: str
    attempt: int
    config: LiveConfig | None = None
    """Settings that have changed since the pods' configuration was written. They reach the reporter
    before the job is submitted."""
    replicas: dict[str, int] = field(default_factory=dict)
    """Replicas by role that may have changed since then. The driver gets them with the job."""


@dataclass(frozen=True)
class Configure:
    """Send changed settings to the driver. Repeating is safe: the newest generation wins."""

    config: LiveConfig


@dataclass(frozen=True)
class Stop:
    """Stop a job that still runs although its attempt is over."""

    submission_id: str


@dataclass(frozen=True)
class RequestStop:
    """Ask the driver of an attempt to save a checkpoint and to end."""

    submission_id: str


JobAction = Submit | Configure | RequestStop | Stop


@dataclass(frozen=True)
class Plan:
    """The actions of one reconciliation, applied in the order of the fields.

    The fields after `status` are applied only once the status is stored (write-ahead).
    """

    tokens: Manifest | None = None
    """The Secret with the run's tokens, to create unless it exists. If that is denied while the
    RayCluster exists, the rest of the plan still applies: a quota also denies what exists."""
    create: tuple[Manifest, ...] = ()
    update: tuple[Manifest, ...] = ()
    """NetworkPolicies to replace at the version that was read."""
    cluster: Manifest | None = None
    """The RayCluster with other numbers of pods, to store at the version that was read."""
    status: AgenticRunStatus | None = None
    """The status to write; None: no write."""
    delete: tuple[Delete, ...] = ()
    workload: Manifest | None = None
    """The Workload with other conditions, to store at the version that was read."""
    events: tuple[Event, ...] = ()
    job: JobAction | None = None
    requeue_after: float | None = None
    """Seconds until the next reconciliation; None: wait for a watch event."""

    def acts(self, phase: Phase) -> bool:
        """Return True if the plan does more than write what was seen.

        Args:
            phase: the phase of the run so far.
        """
        moves = self.status is not None and self.status.phase is not phase
        writes = self.create or self.update or self.cluster or self.tokens or self.workload
        return bool(moves or self.job or self.delete or writes)

    def without_reports(self, stored: AgenticRunStatus) -> AgenticRunStatus:
        """Return the status without what comes from the pods of the run, or from webhooks.

        Such fields keep the values that the apiserver accepted before.

        Args:
            stored: the status as it is stored.
        """
        assert self.status is not None
        status = self.status
        job, before = status.job, stored.job
        if job:
            same = before if before and before.submission_id == job.submission_id else None
            job = job.model_copy(
                update={
                    "version": same and same.version,
                    "report": same and same.report,
                    "disruption": job.disruption and ((same and same.disruption) or _NOT_STORED),
                    # Not empty, which means that Ray has not got the job.
                    "status": job.status if job.status in _RAY_STATES else "UNKNOWN",
                }
            )
        texts = {item.type: item.message for item in stored.conditions}
        conditions = [
            item.model_copy(
                update={
                    "message": item.message
                    if item.message == texts.get(item.type)
                    else _NOT_STORED,
                    "reason": item.reason if _REASON.fullmatch(item.reason) else "Unknown",
                }
            )
            for item in status.conditions
        ]
        reported = {name: getattr(stored, name) for name in _REPORTED}
        roles = [item.model_copy(update={"message": ""}) for item in status.roles]
        message = status.message if status.message == stored.message else _NOT_STORED
        return status.model_copy(
            update=reported
            | {"job": job, "conditions": conditions, "roles": roles, "message": message}
        )


@dataclass(frozen=True)
class Said:
    """The new content of a condition."""

    status: ConditionStatus
    reason: Reason | str
    message: str = ""
    event: Literal["Normal", "Warning"] | None = None
    """Post an event of this type when the status or the reason has changed."""
    event_text: str = ""
    """Text of the event, if it is not the message."""
    each_message: bool = False
    """Also post it when only the message has changed."""
    optional: bool = False
    """Only replaces a condition that the status has already."""
    keep_reason: bool = False
    """Leave a condition alone that has this status already: its reason says more."""


@dataclass(frozen=True)
class Result:
    """The changes of one decision. `first | second` joins two results.

    Where both set a field or a condition, the second counts; of two actions on the job, the first.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the status, without conditions."""
    conditions: Mapping[ConditionType, Said] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    tokens: Manifest | None = None
    create: tuple[Manifest, ...] = ()
    update: tuple[Manifest, ...] = ()
    cluster: Manifest | None = None
    delete: tuple[Delete, ...] = ()
    workload: Manifest | None = None
    undeleted: tuple[Undeleted, ...] = ()
    job: JobAction | None = None
    look_after: float | None = None
    """Seconds until the next look, at most."""

    def __or__(self, other: Result) -> Result:
        waits = [seconds for seconds in (self.look_after, other.look_after) if seconds is not None]
        return Result(
            fields={**self.fields, **other.fields},
            conditions={**self.conditions, **other.conditions},
            events=self.events + other.events,
            tokens=self.tokens or other.tokens,
            create=self.create + other.create,
            update=self.update + other.update,
            cluster=self.cluster or other.cluster,
            delete=self.delete + other.delete,
            workload=self.workload or other.workload,
            undeleted=self.undeleted + other.undeleted,
            job=self.job or other.job,
            look_after=min(waits, default=None),
        )


def warning(reason: Reason | str, message: str) -> Event:
    """Return an event that needs attention."""
    return Event(reason, message[:MAX_CONDITION_MESSAGE], "Warning")


def note(reason: Reason | str, message: str) -> Event:
    """Return an event that only informs."""
    return Event(reason, message[:MAX_CONDITION_MESSAGE])


def text(message: str | None) -> str | None:
    """Return a message in the length that the status stores; None if it is empty."""
    return message[:MAX_TEXT] if message else None


def finish(
    stored: AgenticRunStatus,
    result: Result,
    generation: int,
    now: datetime,
    last_write: datetime | None,
) -> Plan:
    """Return the plan. It has no status if nothing changed or the changes can wait.

    Args:
        stored: the status as it was written last.
        result: what all decisions change.
        generation: the run's generation.
        now: the current time.
        last_write: time of the last status write, or None to write at once.
    """
    before = {item.type: item for item in stored.conditions}
    said = {}
    for kind, each in result.conditions.items():
        old = before.get(kind.value)
        known = old is not None and old.status == each.status
        if not (each.optional and old is None) and not (each.keep_reason and known):
            said[kind] = each
    conditions = before | {
        kind.value: condition(kind, each, now, generation, before.get(kind.value))
        for kind, each in said.items()
    }
    status = stored.model_copy(update={**result.fields, "observed_generation": generation})
    kind = ConditionType.PROGRESSING
    has_ended = stored.phase.finished and stored.completion_time is not None
    ended = has_ended and status.phase.finished and kind.value in before
    if not ended and kind not in said:
        summed = summary(status, conditions)
        conditions[kind.value] = condition(kind, summed, now, generation, before.get(kind.value))
    status = status.model_copy(update={"conditions": in_order(conditions.values())})
    interval = _write_interval(stored, status)
    waited = (now - last_write).total_seconds() if last_write else None
    if interval is not None and waited is not None and waited < interval:
        result |= Result(look_after=interval - waited)
        interval = None
    written = None
    if interval is not None:
        written = status.model_copy(update={"last_update_time": times.format_time(now)})
    return Plan(
        tokens=result.tokens,
        create=result.create,
        update=result.update,
        cluster=result.cluster,
        status=written,
        job=result.job,
        delete=result.delete,
        workload=result.workload,
        events=(*result.events, *_events(said, before)),
        requeue_after=result.look_after,
    )


def condition(
    kind: ConditionType,
    said: Said,
    now: datetime,
    generation: int,
    before: Condition | None = None,
) -> Condition:
    """Return a condition for the status.

    Args:
        kind: its type.
        said: what it says.
        now: the current time.
        generation: the run's generation.
        before: the condition as it was written last. If its status is the same, its transition
            time is kept.
    """
    kept = before is not None and before.status == said.status
    reason, message = str(said.reason), said.message[:MAX_CONDITION_MESSAGE]
    if (
        before
        and kept
        and (reason, message, generation)
        == (before.reason, before.message, before.observed_generation)
    ):
        return before  # most looks change none: a new one would be checked, field by field
    return Condition(
        type=kind.value,
        status=said.status,
        reason=reason,
        message=message,
        last_transition_time=before.last_transition_time
        if before and kept
        else times.format_time(now),
        observed_generation=generation,
    )


def in_order(conditions: Iterable[Condition]) -> list[Condition]:
    """Return the conditions in the order of `ConditionType`, those of later releases last."""
    types = [kind.value for kind in ConditionType]
    return sorted(
        conditions,
        key=lambda item: types.index(item.type) if item.type in types else len(types),
    )


def summary(status: AgenticRunStatus, conditions: Mapping[str, Condition]) -> Said:
    """Return the condition Progressing, which sums up the others.

    Args:
        status: the new status, with the pods of each role.
        conditions: the new conditions, by type.
    """
    kinds = ConditionType
    states = {kind: conditions[kind.value].status for kind in kinds if kind.value in conditions}

    def because_of(kind: ConditionType, progresses: ConditionStatus) -> Said:
        found = conditions[kind.value]
        return Said(progresses, found.reason, found.message)

    if status.phase.finished:
        end = conditions.get(kinds.FAILED.value)
        return Said("False", end.reason if end else status.phase.value, end.message if end else "")
    waits = kinds.QUEUED if states.get(kinds.QUEUED) == "True" else kinds.SUSPENDED
    if states.get(waits) in ("True", "Unknown"):
        alone = conditions[waits.value].reason in _RESOLVES_ALONE
        return because_of(waits, "True" if alone else "False")
    if states.get(kinds.STALLED) == "True":
        return because_of(kinds.STALLED, "False")
    if states.get(kinds.TRAINING) == "True" and empty_role(status.roles):
        # No episode or no response can come: no step can end.
        return because_of(kinds.ROLES_READY, "False")
    if states.get(kinds.TRAINING) in ("True", "Unknown"):
        return because_of(kinds.TRAINING, states[kinds.TRAINING])
    pods = (kinds.CLUSTER_PROVISIONED, kinds.ROLES_READY)
    lacking = next((kind for kind in pods if states.get(kind) == "False"), None)
    alone = lacking is None or conditions[lacking.value].reason in _RESOLVES_ALONE
    trains = kinds.TRAINING if kinds.TRAINING in states else None
    if alone and trains and conditions[trains.value].reason in _HEAD_TROUBLE:
        # New pods may come on their own, but the operator may not reach their head either.
        return because_of(trains, "False")
    if known := lacking or trains:  # it starts, or waits for its restart
        return because_of(known, "True" if alone else "False")
    return Said("True", Reason.CLUSTER_CREATING)


def empty_role(roles: Iterable[RoleStatus]) -> RoleStatus | None:
    """Return a role that has no ready pod although it should have some; None if each has one."""
    return next((role for role in roles if role.desired and not role.ready), None)


def _events(said: Mapping[ConditionType, Said], before: Mapping[str, Condition]) -> Iterable[Event]:
    for kind, each in said.items():
        old = before.get(kind.value)
        changed = old is None or (old.status, old.reason) != (each.status, str(each.reason))
        if each.each_message:
            changed |= old is not None and old.message != each.message[:MAX_CONDITION_MESSAGE]
        if each.event and changed:
            words = each.event_text or each.message
            yield Event(each.reason, words[:MAX_CONDITION_MESSAGE], each.event)


def _write_interval(before: AgenticRunStatus, after: AgenticRunStatus) -> float | None:
    """Return the minimum seconds since the last write to write these changes.

    None: nothing has changed. 0: what has changed cannot wait.
    """
    old = dict(before)
    changed = {name for name, value in after if value != old[name]}
    if not changed:
        return None
    # The scheduler's words change with each event of a node, a quota's with each other run.
    if "conditions" in changed and _wordless(before) == _wordless(after):
        changed.discard("conditions")
    if "roles" in changed and _silent_roles(before) == _silent_roles(after):
        changed.discard("roles")
    if changed <= _SOFT:
        return SOFT_WRITE_SECONDS
    # The last step may be all that tells success if the final report is lost.
    is_last = after.step is not None and after.step == after.max_steps
    return STEP_WRITE_SECONDS if changed <= _SOFT | _STEP and not is_last else 0.0


def _wordless(status: AgenticRunStatus) -> list[tuple[str, str, str, int]]:
    return [
        (item.type, item.status, item.reason, item.observed_generation)
        for item in status.conditions
    ]


def _silent_roles(status: AgenticRunStatus) -> list[RoleStatus]:
    return [role.model_copy(update={"message": ""}) for role in status.roles]
