"""What is to be done: the output of planning, frozen."""

from __future__ import annotations

from dataclasses import dataclass

from agenticrun_api import AgenticRunStatus
from agenticrun_operator.resources import Child, Event, Manifest


@dataclass(frozen=True)
class TokenToMake:
    """A secret to create with a fresh token under `key`, unless it exists. Planning is pure, so the token is made at apply."""

    name: str
    key: str


@dataclass(frozen=True)
class Delete:
    """An object to delete, if it still is the one that was seen."""

    child: Child
    uid: str


@dataclass(frozen=True)
class Submit:
    """Submit the job of `status.job`. Repeating it is harmless: Ray knows each submission id once."""

    submission_id: str
    attempt: int


@dataclass(frozen=True)
class Stop:
    """Stop a job that has outlived its final report."""

    submission_id: str


@dataclass(frozen=True)
class Plan:
    """Applied in the order of the fields. What follows the status only happens once it is stored (write-ahead)."""

    tokens: tuple[TokenToMake, ...] = ()
    create: tuple[Manifest, ...] = ()
    apply: tuple[Manifest, ...] = ()
    """Objects that exist and are ours: server-side apply."""
    status: AgenticRunStatus | None = None
    """None: nothing to write."""
    job: Submit | Stop | None = None
    delete: tuple[Delete, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None
    """Seconds; None: the next watch event will do."""
