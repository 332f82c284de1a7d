"""The draft in which planning collects the new status and the plan."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal

from agenticrun_api import AgenticRun, AgenticRunStatus, Condition, ConditionType, Phase, Reason
from agenticrun_operator.planning.plan import Delete, JobAction, Plan
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import Event, Manifest

SOFT_WRITE_SECONDS = 10.0
"""Minimum interval between status writes that change only the fields in `_SOFT`."""
STEP_WRITE_SECONDS = 2.0
"""Minimum interval between status writes that change nothing but `_SOFT` and `_OF_A_STEP`."""
_OF_A_STEP = frozenset({"step", "progress", "policy_version"})
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

REPEAT_SECONDS = 30.0
"""Time after which a request without effect is repeated."""
MAX_CONDITION_MESSAGE = 1024
MAX_TEXT = 4096

_COMES_BY_ITSELF = frozenset(
    {
        Reason.CLUSTER_CREATING,
        Reason.CLUSTER_DELETED,
        Reason.NODE_LOST,
        Reason.PODS_PENDING,
        Reason.WAITING_FOR_PREVIOUS_RUN,
    }
)
"""Reasons of conditions that are not True, and need nobody: the operator or Kubernetes is at it.

Not Unschedulable and StartupDeadlineExceeded: the run tries again, but nothing says that the
cluster will ever have room for it.
"""

ConditionStatus = Literal["True", "False", "Unknown"]


def new_condition(
    kind: ConditionType,
    status: ConditionStatus,
    reason: Reason | str,
    message: str,
    now: datetime,
    generation: int,
    before: Condition | None = None,
) -> Condition:
    """Return a condition for the status.

    Args:
        before: the previous condition of this type. If its status is the same, its transition time
            is kept.
    """
    moved = before is None or before.status != status
    return Condition(
        type=kind.value,
        status=status,
        reason=str(reason),
        message=message[:MAX_CONDITION_MESSAGE],
        last_transition_time=format_time(now)
        if moved or before is None
        else before.last_transition_time,
        observed_generation=generation,
    )


class Draft:
    """Collects the decisions about one run during one call of `plan`."""

    def __init__(self, run: AgenticRun, now: datetime):
        self.run = run
        self.now = now
        self.status = run.status
        self.tokens: Manifest | None = None
        self.create: list[Manifest] = []
        self.cluster: Manifest | None = None
        self.delete: list[Delete] = []
        self.job: JobAction | None = None
        self.suspending = False
        """True if the attempt is to end and the pods are to go, and no restart follows."""
        self._events: list[Event] = []
        self._requeue: float | None = None

    def set(self, **fields: Any) -> None:
        """Replace fields of the status."""
        self.status = self.status.model_copy(update=fields)

    def update_job(self, **fields: Any) -> None:
        """Replace fields of the job's status."""
        assert self.status.job is not None
        self.set(job=self.status.job.model_copy(update=fields))

    def no_pods(self) -> None:
        """Set the number of ready pods of each role to 0."""
        nothing = {"ready": 0, "joining": 0, "leaving": 0, "message": ""}
        roles = [item.model_copy(update=nothing) for item in self.status.roles]
        self.set(roles=roles)

    def condition(
        self,
        kind: ConditionType,
        status: ConditionStatus,
        reason: Reason | str,
        message: str = "",
    ) -> None:
        """Set a condition; see `new_condition`."""
        before = self.find(kind)
        generation = self.run.metadata.generation
        after = new_condition(kind, status, reason, message, self.now, generation, before)
        others = [item for item in self.status.conditions if item.type != kind.value]
        self.set(conditions=in_order([*others, after]))

    def find(self, kind: ConditionType) -> Condition | None:
        """Return the condition of this type, or None."""
        return next((item for item in self.status.conditions if item.type == kind.value), None)

    def is_true(self, kind: ConditionType) -> bool:
        """Return True if the condition exists and its status is True."""
        found = self.find(kind)
        return found is not None and found.status == "True"

    def phase(self, phase: Phase, message: str | None = None) -> None:
        """Set the phase and the message of the status."""
        self.set(phase=phase, message=message[:MAX_TEXT] if message else None)

    def event(self, reason: Reason | str, message: str, warning: bool = False) -> None:
        """Add an event on the run."""
        self._events.append(
            Event(reason, message[:MAX_CONDITION_MESSAGE], "Warning" if warning else "Normal")
        )

    def look_again(self, seconds: float) -> None:
        """Request the next reconciliation after at most this many seconds."""
        self._requeue = seconds if self._requeue is None else min(seconds, self._requeue)

    def may_repeat(self, asked: datetime | None) -> bool:
        """Return True if a request was not sent before, or long enough ago; else look again then.

        Args:
            asked: the time at which it was sent last; None: never.
        """
        left = REPEAT_SECONDS - (self.now - asked).total_seconds() if asked else 0.0
        if left > 0:
            self.look_again(left)
        return left <= 0

    def finish(self, last_write: datetime | None) -> Plan:
        """Return the plan. It has no status if nothing changed or the changes can wait.

        Args:
            last_write: time of the last status write, or None to write at once.
        """
        if not self.run.status.phase.finished or not self.find(ConditionType.PROGRESSING):
            self.condition(ConditionType.PROGRESSING, *_sum_up(self.status))
        self.set(observed_generation=self.run.metadata.generation)
        status: AgenticRunStatus | None = self.status
        interval = _write_interval(self.run.status, self.status)
        if interval is None:
            status = None
        elif last_write is not None:
            wait = interval - (self.now - last_write).total_seconds()
            if wait > 0:
                status = None
                self.look_again(wait)
        if status:
            status = status.model_copy(update={"last_update_time": format_time(self.now)})
        return Plan(
            tokens=self.tokens,
            create=tuple(self.create),
            cluster=self.cluster,
            status=status,
            job=self.job,
            delete=tuple(self.delete),
            events=tuple(self._events),
            requeue_after=self._requeue,
        )


def _sum_up(status: AgenticRunStatus) -> tuple[ConditionStatus, str, str]:
    """Return the status, reason and message of the condition Progressing."""
    kinds = ConditionType
    found = {item.type: item for item in status.conditions}
    states = {kind: found[kind].status for kind in kinds if kind in found}

    def because_of(
        kind: ConditionType, progresses: ConditionStatus
    ) -> tuple[ConditionStatus, str, str]:
        return progresses, found[kind].reason, found[kind].message

    if status.phase.finished:
        end = found.get(kinds.FAILED)
        return "False", end.reason if end else status.phase.value, end.message if end else ""
    if states.get(kinds.SUSPENDED) in ("True", "Unknown"):
        rescales = found[kinds.SUSPENDED].reason == Reason.RESCALING
        return because_of(kinds.SUSPENDED, "True" if rescales else "False")
    if states.get(kinds.STALLED) == "True":
        return because_of(kinds.STALLED, "False")
    if states.get(kinds.TRAINING) in ("True", "Unknown"):
        return because_of(kinds.TRAINING, states[kinds.TRAINING])
    for kind in (kinds.CLUSTER_PROVISIONED, kinds.ROLES_READY):
        if states.get(kind) == "False":
            return because_of(kind, "True" if found[kind].reason in _COMES_BY_ITSELF else "False")
    if kinds.TRAINING in found:  # it starts, or waits for its restart
        refused = found[kinds.TRAINING].reason == Reason.SUBMISSION_REFUSED
        return because_of(kinds.TRAINING, "False" if refused else "True")
    return "True", Reason.CLUSTER_CREATING, ""


def in_order(conditions: Iterable[Condition]) -> list[Condition]:
    """Return the conditions in the order of `ConditionType`, those of later releases last."""
    types = [kind.value for kind in ConditionType]
    return sorted(
        conditions,
        key=lambda item: types.index(item.type) if item.type in types else len(types),
    )


def _write_interval(before: AgenticRunStatus, after: AgenticRunStatus) -> float | None:
    """Return the minimum seconds since the last write to write these changes.

    None: nothing has changed. 0: what has changed cannot wait.
    """
    old = dict(before)
    changed = {name for name, value in after if value != old[name]}
    if not changed:
        return None
    if changed <= _SOFT:
        return SOFT_WRITE_SECONDS
    # The last step may be all that tells success if the final report is lost.
    is_last = after.step is not None and after.step == after.max_steps
    return STEP_WRITE_SECONDS if changed <= _SOFT | _OF_A_STEP and not is_last else 0.0
