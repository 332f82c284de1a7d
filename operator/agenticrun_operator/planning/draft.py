"""The status and plan in the making."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Literal

from agenticrun_api import AgenticRun, AgenticRunStatus, Condition, ConditionType, Phase, Reason
from agenticrun_operator.planning.plan import Delete, Plan, Stop, Submit, TokenToMake
from agenticrun_operator.planning.times import format_time, parse_time
from agenticrun_operator.resources import Event, Manifest

SOFT_WRITE_SECONDS = 10.0
"""Changes that are neither a step nor a phase nor a condition are written at most this often."""
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
    """Return a condition as it is written to the status.

    Args:
        before: the condition of this type so far; the transition time moves only with the status.
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
    """Collects what planning decides about one run. Lives for one call of `plan`."""

    def __init__(self, run: AgenticRun, now: datetime):
        self.run = run
        self.now = now
        self.status = run.status
        self.tokens: list[TokenToMake] = []
        self.create: list[Manifest] = []
        self.apply: list[Manifest] = []
        self.delete: list[Delete] = []
        self.job: Submit | Stop | None = None
        self._events: list[Event] = []
        self._requeue: float | None = None

    def set(self, **fields: Any) -> None:
        """Replace fields of the status."""
        self.status = self.status.model_copy(update=fields)

    def condition(
        self,
        kind: ConditionType,
        status: ConditionStatus,
        reason: Reason | str,
        message: str = "",
    ) -> None:
        """Set a condition; see `new_condition`."""
        before = self.find(kind)
        after = new_condition(
            kind, status, reason, message, self.now, self.run.metadata.generation, before
        )
        conditions = [after if item.type == kind.value else item for item in self.status.conditions]
        self.set(conditions=conditions if before else [*conditions, after])

    def find(self, kind: ConditionType) -> Condition | None:
        return next((item for item in self.status.conditions if item.type == kind.value), None)

    def is_true(self, kind: ConditionType) -> bool:
        found = self.find(kind)
        return found is not None and found.status == "True"

    def seconds_since_transition(self, kind: ConditionType) -> float:
        """How long the condition has had its status; 0 when it has none."""
        found = self.find(kind)
        return (self.now - parse_time(found.last_transition_time)).total_seconds() if found else 0.0

    def phase(self, phase: Phase, message: str | None = None) -> None:
        self.set(phase=phase, message=message[:MAX_TEXT] if message else None)

    def event(self, reason: Reason | str, message: str, warning: bool = False) -> None:
        self._events.append(
            Event(reason, message[:MAX_CONDITION_MESSAGE], "Warning" if warning else "Normal")
        )

    def look_again(self, seconds: float) -> None:
        """Ask to be reconciled after at most this long."""
        self._requeue = seconds if self._requeue is None else min(seconds, self._requeue)

    def finish(self, last_write: datetime | None) -> Plan:
        """The plan; without a status when there is nothing to write, or nothing that cannot wait."""
        self.set(observed_generation=self.run.metadata.generation)
        status: AgenticRunStatus | None = self.status
        before = self.run.status
        if self.status == before:
            status = None
        elif last_write is not None and _hard(self.status) == _hard(before):
            wait = timedelta(seconds=SOFT_WRITE_SECONDS) - (self.now - last_write)
            if wait > timedelta(0):
                status = None
                self.look_again(wait.total_seconds())
        return Plan(
            tokens=tuple(self.tokens),
            create=tuple(self.create),
            apply=tuple(self.apply),
            status=status,
            job=self.job,
            delete=tuple(self.delete),
            events=tuple(self._events),
            requeue_after=self._requeue,
        )


def _hard(status: AgenticRunStatus) -> dict[str, Any]:
    return {name: value for name, value in status if name not in _SOFT}
