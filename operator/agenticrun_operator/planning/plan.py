"""The output of planning: frozen descriptions of the actions to take."""

from __future__ import annotations

from dataclasses import dataclass, field

from agenticrun_api import AgenticRunStatus, LiveConfig
from agenticrun_operator.resources import Child, Event, Manifest


@dataclass(frozen=True)
class Delete:
    """An object to delete if it is still the one that was read (same uid)."""

    child: Child
    uid: str
    force: bool = False
    """Remove a pod at once, without the word of its kubelet."""


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
    RayCluster exists, the rest of the plan goes on: a quota also denies what exists already."""
    create: tuple[Manifest, ...] = ()
    cluster: Manifest | None = None
    """The RayCluster with other numbers of pods, to store at the version that was read."""
    status: AgenticRunStatus | None = None
    """The status to write; None: no write."""
    delete: tuple[Delete, ...] = ()
    events: tuple[Event, ...] = ()
    job: JobAction | None = None
    requeue_after: float | None = None
    """Seconds until the next reconciliation; None: wait for a watch event."""
