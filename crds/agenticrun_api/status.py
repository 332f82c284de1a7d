"""`status` of an AgenticRun. Only the operator writes it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from agenticrun_api.base import Model

ShortText = Annotated[str, Field(max_length=256)]
LongText = Annotated[str, Field(max_length=4096)]


def _rfc3339(text: str) -> str:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None or not 1970 <= moment.year <= 2200:
        raise ValueError("must be a time between 1970 and 2200 with a time zone")
    return text


Time = Annotated[
    str, Field(max_length=40, json_schema_extra={"format": "date-time"}), AfterValidator(_rfc3339)
]
"""RFC 3339 in UTC, whole seconds."""

MAX_METRICS = 64
MAX_METRIC_NAME = 96


class Phase(StrEnum):
    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def finished(self) -> bool:
        """True if the run has ended."""
        return self in (Phase.SUCCEEDED, Phase.FAILED)


class ConditionType(StrEnum):
    CLUSTER_PROVISIONED = "ClusterProvisioned"
    """The RayCluster and everything that its pods mount exist."""
    ROLES_READY = "RolesReady"
    """Every pod of every role is ready; if not, the message names the pod and the reason."""
    ACCEPTED = "Accepted"
    """False: the operator cannot read the spec, because the CRD is of another version. It leaves
    the run alone."""
    TRAINING = "Training"
    """The driver runs and sends progress snapshots."""
    COMPLETE = "Complete"
    FAILED = "Failed"


class Reason(StrEnum):
    """Reasons of conditions and names of events."""

    WAITING_FOR_PREVIOUS_RUN = "WaitingForPreviousRun"
    NAME_CONFLICT = "NameConflict"
    NO_ENGINE_IMAGE = "NoEngineImage"
    INVALID_CONFIG = "InvalidConfig"
    SPEC_READ = "SpecRead"
    CLUSTER_CREATING = "ClusterCreating"
    CLUSTER_CREATED = "ClusterCreated"
    CLUSTER_DELETED = "ClusterDeleted"
    PODS_PENDING = "PodsPending"
    PODS_READY = "PodsReady"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    UNSCHEDULABLE = "Unschedulable"
    CONTAINER_CRASHED = "ContainerCrashed"
    SUBMITTING = "Submitting"
    DRIVER_RUNNING = "DriverRunning"
    PROGRESS_UNAVAILABLE = "ProgressUnavailable"
    DRIVER_FAILED = "DriverFailed"
    DRIVER_LOST = "DriverLost"
    CLUSTER_LOST = "ClusterLost"
    RETRIES_EXHAUSTED = "RetriesExhausted"
    RUN_SUCCEEDED = "RunSucceeded"
    NOT_FINISHED = "NotFinished"


class Condition(Model):
    type: Annotated[str, Field(max_length=64)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Field(min_length=1, max_length=64)]
    message: Annotated[str, Field(max_length=1024)] = ""
    last_transition_time: Time
    observed_generation: int


class Metric(Model):
    """A number as a string, because Kubernetes clients do not handle floats consistently."""

    name: Annotated[str, Field(max_length=MAX_METRIC_NAME)]
    value: Annotated[str, Field(max_length=32)]


class RoleStatus(Model):
    name: Annotated[str, Field(max_length=32)]
    desired: int
    ready: int
    gpus: int
    """Number of GPUs that all pods of the role request together."""
    message: ShortText = ""


class RayClusterStatus(Model):
    name: ShortText
    incarnation: ShortText = ""
    """`<head pod uid>/<restarts of the head container>`. When it changes, Ray has lost its jobs."""


class JobStatus(Model):
    """The Ray job of the newest attempt. attempt and submissionId are stored before the job is
    submitted.
    """

    attempt: int
    submission_id: ShortText
    incarnation: ShortText = ""
    """The incarnation of the head that the attempt was submitted to."""
    status: ShortText = ""
    """Ray's job status: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED; empty before the
    submission."""
    end_time: Time | None = None
    """When the operator first saw that the attempt had ended or had made its final report."""


class CheckpointStatus(Model):
    step: int
    uri: Annotated[str, Field(max_length=1024)]
    time: Time


class AgenticRunStatus(Model):
    phase: Phase = Phase.PENDING
    observed_generation: int = 0
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    step: int | None = None
    max_steps: int | None = None
    progress: ShortText | None = None
    """Completed and total steps, for example `120/1000`."""
    reward: ShortText | None = None
    """Mean score of the newest step's trajectories."""
    tokens_per_second: ShortText | None = None
    staleness: ShortText | None = None
    eta: ShortText | None = None
    """Estimated remaining time, for example `12m`."""
    estimated_completion_time: Time | None = None
    last_step_time: Time | None = None
    policy_version: int | None = None
    activity: ShortText | None = None
    """Current activity of the driver: starting, warm-up, rollout, training, validation, checkpoint,
    stopping or finished."""
    metrics: Annotated[list[Metric], Field(max_length=MAX_METRICS)] = []
    roles: Annotated[list[RoleStatus], Field(max_length=8)] = []
    ray_cluster: RayClusterStatus | None = None
    job: JobStatus | None = None
    restarts: Annotated[int, Field(ge=0)] = 0
    next_retry_time: Time | None = None
    checkpoint: CheckpointStatus | None = None
    start_time: Time | None = None
    completion_time: Time | None = None
    message: LongText | None = None
    log_tail: LongText | None = None
    """The end of the driver's log, kept after a failure because the RayCluster is deleted."""
