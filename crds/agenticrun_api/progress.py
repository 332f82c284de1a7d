"""The progress snapshot, a JSON document from the driver to the reporter to the operator.

The operator reads it with `GET /progress`. It comes from pods where user code runs, so the operator
parses it strictly and rejects unknown fields, too many metrics, long names and values that are not
finite.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, FiniteFloat

from agenticrun_api.algorithm import Guards
from agenticrun_api.base import CLEAN, Count, Model, Number, Positive
from agenticrun_api.masking import mask_secrets
from agenticrun_api.names import Role
from agenticrun_api.pipeline import LIVE_FIELDS, Pipeline
from agenticrun_api.roles import ELASTIC
from agenticrun_api.run import AgenticRun
from agenticrun_api.status import (
    MAX_METRIC_NAME,
    MAX_METRICS,
    CheckpointStatus,
    FinalReport,
    ShortText,
    Time,
)

MAX_PROGRESS_BYTES = 65_536
_CHECKED = frozenset(
    {"run_uid", "submission_id", "time", "last_step_time", "activity", "outcome", "metrics"}
)
"""Fields of a snapshot that can hold no secret: they are compared or parsed."""
SHORT_TEXT = 256
"""Length of the texts that most snapshots repeat. What is masked in them is remembered."""
_mask_short = lru_cache(maxsize=8192)(mask_secrets)
AnyModel = TypeVar("AnyModel", bound=Model)


class Activity(StrEnum):
    STARTING = "starting"
    WARMUP = "warm-up"
    ROLLOUT = "rollout"
    TRAINING = "training"
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"
    STOPPING = "stopping"
    FINISHED = "finished"


MAX_VACANT_PODS = 256


class PoolStatus(Model):
    """The engines or the env workers of a run, as the driver has them."""

    replicas: Positive
    """Pods that they are meant for."""
    serving: Number = 0
    """Running engines or env workers, including the leaving ones."""
    joining: Number = 0
    """Engines or env workers that are starting or waiting for a pod."""
    leaving: Number = 0
    """Engines or env workers that are being removed and have not ended yet."""
    vacant: Annotated[list[ShortText], Field(max_length=MAX_VACANT_PODS)] = []
    """Pods where some ran and none runs now."""
    fixed: ShortText = ""
    """Why their number cannot change while the driver runs; empty if it can."""


def _before_2190(time: str) -> str:
    """Return the time of a step. The end of the run is estimated from it, up to ten years later."""
    if time >= "2190":
        raise ValueError("must be a time before 2190")
    return time


class Progress(Model):
    """A progress snapshot of one attempt."""

    version: ShortText | None = None
    """Version of AgenticRun in the worker image."""
    run_uid: ShortText
    submission_id: ShortText
    attempt: Number
    sequence: Number
    """Increases with every snapshot of an attempt."""
    activity: Activity
    step: Number
    """Completed training steps, over all attempts."""
    max_steps: Number
    policy_version: Number
    time: Time
    """When the driver sent this."""
    silent_seconds: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Time since the driver last sent a snapshot, even an unchanged one. The reporter adds it, by
    its own clock."""
    idle_seconds: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Time since a snapshot brought news. The reporter adds it, by its own clock."""
    last_step_time: Annotated[Time, AfterValidator(_before_2190)] | None = None
    seconds_per_step: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Median of the newest steps, including validation and checkpoints."""
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
    """The headline metrics of the newest step, the most important first. All are in
    metrics.jsonl."""
    checkpoint: CheckpointStatus | None = None
    message: Annotated[str, Field(max_length=1024), CLEAN] = ""
    observed_generation: Number | None = None
    """Generation of the run that the driver's settings are from. None: the driver cannot change
    them."""
    pools: Annotated[dict[Role, PoolStatus], Field(max_length=len(ELASTIC))] | None = None
    """By role, once they have started. Also None if the driver cannot change their number."""
    final: FinalReport | None = None

    def masked(self) -> Progress:
        """Return the snapshot without secrets, which the reports of user code may quote."""
        return _masked(self)


def _masked(model: AnyModel) -> AnyModel:
    """Return what a driver has reported without secrets."""
    changes: dict[str, object] = {}
    for name, value in model:
        if name in _CHECKED:
            continue
        if isinstance(value, str):
            masked: object = _masked_text(value)
        elif isinstance(value, Model):
            masked = _masked(value)
        elif isinstance(value, dict):
            masked = {
                key: _masked(item) if isinstance(item, Model) else item
                for key, item in value.items()
            }
        elif isinstance(value, list):
            masked = [_masked_text(item) for item in value]
        else:
            continue
        if masked != value:
            changes[name] = masked
    return model.model_copy(update=changes) if changes else model


def _masked_text(text: str) -> str:
    """Return a text without secrets that is no longer, because fields of the status have limits."""
    mask = _mask_short if len(text) <= SHORT_TEXT else mask_secrets
    return mask(text)[: len(text)]


class LiveConfig(Model):
    """The settings that may change while the run trains.

    They take effect after the current step, `replicas` at once. The schedules of the learning rates
    are stretched to other `max_steps`.
    """

    generation: Number
    """Generation of the run that they are from."""
    max_steps: Positive
    eval_steps: Count
    save_steps: Count
    guards: Guards
    replicas: Annotated[dict[Role, Positive], Field(max_length=len(ELASTIC))] = {}
    """The pods that the run has or is to have, by role; empty before 0.2."""

    @classmethod
    def of(cls, run: AgenticRun) -> LiveConfig:
        """Return the settings of a run."""
        pipeline = run.spec.pipeline
        return cls(
            generation=run.metadata.generation,
            replicas={Role(name): number for name, number in run.spec.roles.elastic.items()},
            **{name: getattr(pipeline, name) for name in LIVE_FIELDS},
        )

    def applied_to(self, pipeline: Pipeline) -> Pipeline:
        """Return the pipeline with these settings."""
        return pipeline.model_copy(update={name: getattr(self, name) for name in LIVE_FIELDS})


PodName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?$", max_length=253)
]


QUIET_SECONDS = 3.0
"""Time without a post after which a driver may be dead. It posts every second."""
MAX_HOLD_SECONDS = 30.0
BEAT_SECONDS = 3.0
"""A reporter that holds a question sends a space at least this often: it is alive."""


class ProgressQuery(Model):
    """The query of `GET /progress` of one who knows a snapshot and waits for news."""

    submission_id: ShortText
    sequence: Number
    wait_seconds: Annotated[FiniteFloat, Field(ge=0, le=MAX_HOLD_SECONDS)]
    """The reporter answers after this time at the latest."""


class Leaving(Model):
    """Tells the reporter that a pod of the run is being removed (`reporting/leave.py`)."""

    pod: PodName


class LeaveAnswer(Model):
    """The reporter's answer to a pod that is being removed."""

    driver_runs: bool
    """True: a driver runs that can still save."""
    report_unread: bool
    """True: the attempt has made its final report, and the operator has not read it yet."""


class Commands(Model):
    """The reporter's answer to a snapshot: the requests that it has received since it started."""

    stop: bool = False
    """Save a checkpoint, send the final report and exit with ExitCode.STOPPED."""
    leaving_pod: PodName | None = None
    """The pod that is being removed, if that is why `stop` is true."""
    checkpoint: int = 0
    """Checkpoints requested so far; an increase requests one now."""
    config: LiveConfig | None = None
    """The newest settings, if they were sent since the RayCluster was created."""
