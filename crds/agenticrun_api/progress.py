"""What the driver tells the reporter, and the reporter tells the operator. One JSON document, `GET /progress`.

It comes from pods where user code runs, so the operator parses it strictly: unknown fields, too many metrics, long names and
values that are not finite are refused.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, FiniteFloat

from agenticrun_api.base import Model
from agenticrun_api.status import MAX_METRIC_NAME, MAX_METRICS, CheckpointStatus, ShortText, Time

MAX_PROGRESS_BYTES = 65_536

Number = Annotated[int, Field(ge=0, le=2**53)]
"""Fits every JSON reader."""


class Activity(StrEnum):
    STARTING = "starting"
    WARMUP = "warm-up"
    ROLLOUT = "rollout"
    TRAINING = "training"
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"
    STOPPING = "stopping"
    FINISHED = "finished"


class Outcome(StrEnum):
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"


class FinalReport(Model):
    """How an attempt ended, in the driver's own words."""

    outcome: Outcome
    reason: Annotated[str, Field(min_length=1, max_length=64)]
    """CamelCase, for a condition."""
    message: Annotated[str, Field(max_length=4096)]
    retryable: bool
    time: Time


class Progress(Model):
    """A snapshot of one attempt."""

    run_uid: ShortText
    submission_id: ShortText
    attempt: Number
    sequence: Number
    """Grows with every snapshot of an attempt."""
    activity: Activity
    step: Number
    """Completed training steps, over all attempts."""
    max_steps: Number
    policy_version: Number
    time: Time
    """When the driver sent this."""
    last_step_time: Time | None = None
    seconds_per_step: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Median of the newest steps, validation and checkpoints included."""
    reward: FiniteFloat | None = None
    tokens_per_second: FiniteFloat | None = None
    staleness: FiniteFloat | None = None
    metrics: Annotated[
        dict[
            Annotated[str, Field(max_length=MAX_METRIC_NAME, pattern=r"^[A-Za-z0-9_./@<>-]+$")],
            FiniteFloat,
        ],
        Field(max_length=MAX_METRICS),
    ] = {}
    """The newest step's most telling numbers, the most telling first. The whole set is in metrics.jsonl."""
    checkpoint: CheckpointStatus | None = None
    message: Annotated[str, Field(max_length=1024)] = ""
    final: FinalReport | None = None


class Commands(Model):
    """What the reporter answers to a driver's snapshot: what it has been asked for since it started."""

    stop: bool = False
    """Save a checkpoint, report, exit with ExitCode.STOPPED."""
    checkpoint: int = 0
    """How many checkpoints have been asked for; a change asks for one now."""
