"""`status` of an AgenticRun. Only the operator writes it."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from agenticrun_api.base import CLEAN, MAX_NUMBER, Model, Number

ShortText = Annotated[str, Field(max_length=256), CLEAN]
LongText = Annotated[str, Field(max_length=4096), CLEAN]

_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST = datetime(2200, 12, 31, 23, 59, 59, tzinfo=UTC)


def _rfc3339(text: str) -> str:
    """Return a time in the notation that the CRD accepts. Python reads many others."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None or not _EARLIEST <= moment <= _LATEST:
        raise ValueError("must be a time between 1970 and 2200 with a time zone")
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


Time = Annotated[
    str, Field(max_length=40, json_schema_extra={"format": "date-time"}), AfterValidator(_rfc3339)
]
"""RFC 3339 in UTC, whole seconds."""

MAX_METRICS = 64
MAX_METRIC_NAME = 96


class Phase(StrEnum):
    PENDING = "Pending"
    QUEUED = "Queued"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def finished(self) -> bool:
        """True if the run has ended."""
        return self in (Phase.SUCCEEDED, Phase.FAILED)


class ConditionType(StrEnum):
    """Types of conditions, in the order in which the status has them."""

    ACCEPTED = "Accepted"
    """False: the operator cannot read the spec, because the CRD is of another version. It leaves
    the run alone. Unknown: the worker image is of a version that the operator does not support."""
    QUEUED = "Queued"
    """True: the run waits until Kueue admits it, and the message has the words of Kueue. False: it
    is admitted, is suspended, or has ended. Absent without spec.queue."""
    CLUSTER_PROVISIONED = "ClusterProvisioned"
    """The RayCluster and everything that its pods mount exist."""
    ROLES_READY = "RolesReady"
    """Every pod of every role is ready; if not, the message names the pod and the reason."""
    TRAINING = "Training"
    """The driver runs and sends progress snapshots."""
    PROGRESSING = "Progressing"
    """Sums up the others. True: the run gets on, or waits for what comes without help, such as its
    pods or a restart. False: it stands still, and the reason says why: it has ended, is suspended,
    stalls, or needs a user. Unknown: the operator cannot see it."""
    STALLED = "Stalled"
    """False: no stall is known; the reason is Progressing while the driver trains. True: the driver
    has brought no news for longer than spec.failurePolicy.stall allows. Absent before the first
    attempt has trained."""
    SUSPENDED = "Suspended"
    """Unknown: the run is being suspended, and there are pods still: spec.suspend is true, other
    replicas need other pods, another controller has suspended the RayCluster, or Kueue has evicted
    the run. True: there are none. False: it was resumed, or has ended. Absent until it is suspended
    for the first time."""
    COMPLETE = "Complete"
    FAILED = "Failed"


class Reason(StrEnum):
    """Reasons of conditions and names of events."""

    WAITING_FOR_PREVIOUS_RUN = "WaitingForPreviousRun"
    DELETION_STUCK = "DeletionStuck"
    NAME_CONFLICT = "NameConflict"
    CLAIM_REUSED = "ClaimReused"
    CLAIM_UNSUITABLE = "ClaimUnsuitable"
    CLAIM_PENDING = "ClaimPending"
    NO_ENGINE_IMAGE = "NoEngineImage"
    KUBERAY_MISSING = "KubeRayMissing"
    KUBERAY_TOO_OLD = "KubeRayTooOld"
    KUEUE_MISSING = "KueueMissing"
    QUEUED = "Queued"
    INADMISSIBLE = "Inadmissible"
    ADMITTED = "Admitted"
    EVICTED = "Evicted"
    DEACTIVATED = "Deactivated"
    NAMESPACE_GONE = "NamespaceGone"
    NETWORK_POLICIES_UNAVAILABLE = "NetworkPoliciesUnavailable"
    NETWORK_POLICIES_CHANGED = "NetworkPoliciesChanged"
    INVALID_CONFIG = "InvalidConfig"
    SPEC_READ = "SpecRead"
    VERSION_SKEW = "VersionSkew"
    DENIED = "Denied"
    WEBHOOK_UNAVAILABLE = "WebhookUnavailable"
    APISERVER_UNAVAILABLE = "ApiserverUnavailable"
    TOO_LARGE = "TooLarge"
    STATUS_REFUSED = "StatusRefused"
    CLUSTER_CREATING = "ClusterCreating"
    CLUSTER_CREATED = "ClusterCreated"
    CLUSTER_DELETED = "ClusterDeleted"
    CLUSTER_SUSPENDED = "ClusterSuspended"
    CLUSTER_REPAIRED = "ClusterRepaired"
    CLUSTER_EDITED = "ClusterEdited"
    PODS_PENDING = "PodsPending"
    PODS_DENIED = "PodsDenied"
    PODS_NOT_CREATED = "PodsNotCreated"
    PODS_READY = "PodsReady"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    MOUNT_FAILED = "MountFailed"
    UNSCHEDULABLE = "Unschedulable"
    CONTAINER_CRASHED = "ContainerCrashed"
    CONTAINER_NOT_READY = "ContainerNotReady"
    CODE_UNAVAILABLE = "CodeUnavailable"
    CODE_DIFFERS = "CodeDiffers"
    LABELS_MISSING = "LabelsMissing"
    NODE_LOST = "NodeLost"
    STARTUP_DEADLINE_EXCEEDED = "StartupDeadlineExceeded"
    SUBMITTING = "Submitting"
    SUBMISSION_REFUSED = "SubmissionRefused"
    DRIVER_RUNNING = "DriverRunning"
    PROGRESS_UNAVAILABLE = "ProgressUnavailable"
    TOKENS_UNKNOWN = "TokensUnknown"
    TOKENS_REFUSED = "TokensRefused"
    HEAD_UNPROVED = "HeadUnproved"
    DRIVER_SILENT = "DriverSilent"
    NO_PROGRESS = "NoProgress"
    PROGRESSING = "Progressing"
    CONFIGURED = "Configured"
    DRIVER_FAILED = "DriverFailed"
    DRIVER_LOST = "DriverLost"
    CLUSTER_LOST = "ClusterLost"
    DISRUPTED = "Disrupted"
    DISRUPTIONS_EXHAUSTED = "DisruptionsExhausted"
    STOPPED = "Stopped"
    RESCALING = "Rescaling"
    NOT_RESCALED = "NotRescaled"
    SCALED = "Scaled"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    RETRIES_EXHAUSTED = "RetriesExhausted"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    CHECKPOINTS_LOST = "CheckpointsLost"
    STATUS_REPAIRED = "StatusRepaired"
    RUN_DELETED = "RunDeleted"
    RUN_SUCCEEDED = "RunSucceeded"
    NOT_FINISHED = "NotFinished"


class Condition(Model):
    """One aspect of the run's state, as of Kubernetes' standard conditions."""

    type: Annotated[str, Field(max_length=64)]
    """Accepted, Queued, ClusterProvisioned, RolesReady, Training, Progressing, Stalled, Suspended,
    Complete or Failed."""
    status: Literal["True", "False", "Unknown"]
    """State of the condition."""
    reason: Annotated[str, Field(min_length=1, max_length=64), CLEAN]
    """Cause of the status, as one word in CamelCase."""
    message: Annotated[str, Field(max_length=1024), CLEAN] = ""
    """Cause of the status, as a sentence."""
    last_transition_time: Time
    """When `status` changed last."""
    observed_generation: Number
    """Generation of the run that the condition is about."""


class Metric(Model):
    """A number as a string, because Kubernetes clients do not handle floats consistently."""

    name: Annotated[str, Field(max_length=MAX_METRIC_NAME)]
    """Name of the metric, as in docs/metrics.md."""
    value: Annotated[str, Field(max_length=32)]
    """Newest value."""


class RoleStatus(Model):
    """Pods of one role."""

    name: Annotated[str, Field(max_length=32)]
    """Name of the role."""
    desired: Number
    """Pods that the role is to have: those of the spec, or fewer if its queue admits fewer."""
    ready: Number
    """Pods that are ready."""
    joining: Number = 0
    """Engines or env workers that start, or wait for a pod."""
    leaving: Number = 0
    """Engines or env workers that end because fewer are wanted."""
    gpus: Number
    """Number of GPUs that all pods of the role request together."""
    image: Annotated[str, Field(max_length=1024)] | None = None
    """Image of the role's pods since the run started, whatever the operator's version is now."""
    message: ShortText = ""
    """Cause if not all pods are ready."""


class RayClusterStatus(Model):
    """The RayCluster of the run."""

    name: ShortText
    """Name of the RayCluster."""
    uid: ShortText = ""
    """uid of the RayCluster, which identifies it without labels and owner."""
    replicas: Annotated[dict[str, Number], Field(max_length=8)] = {}
    """Pods that the operator last gave to each role that can have another number. It puts other
    numbers in the RayCluster back."""


class Outcome(StrEnum):
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"


class FinalReport(Model):
    """The driver's report on the end of an attempt."""

    outcome: Outcome
    """Succeeded; Failed; Stopped: an orderly stop on request, with a checkpoint."""
    reason: Annotated[str, Field(min_length=1, max_length=64), CLEAN]
    """Cause, as one word in CamelCase."""
    message: LongText
    """Cause, as a sentence."""
    retryable: bool
    """False if another attempt would end the same way."""
    time: Time
    """Time of the report, by the clock of the driver."""


class JobStatus(Model):
    """The Ray job of the newest attempt. attempt and submissionId are stored before the job is
    submitted.
    """

    attempt: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    """Number of the attempt, from 1."""
    submission_id: ShortText
    """Ray's id of the job."""
    # Do not rename it: helm does not upgrade a CRD. An older one would drop another name, and the
    # operator would take every attempt for lost.
    incarnation: ShortText = ""
    """Opaque id of the start of the head that got the attempt. After another start, Ray has lost
    the attempt."""
    version: ShortText | None = None
    """Version of AgenticRun in the worker image, as the driver reports it."""
    status: ShortText = ""
    """Ray's job status: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED; empty before the
    submission."""
    end_time: Time | None = None
    """When the operator first saw that the attempt had ended or had made its final report."""
    unknown_since: Time | None = None
    """Since when the operator does not know that the driver trains; absent while it knows."""
    newest_pod_time: Time | None = None
    """Creation of the newest head, trainer, reference or critic pod that the attempt began with. A
    newer pod replaces one of them."""
    disruption: ShortText = ""
    """The pod that the platform took from the attempt, and how. The attempt ends disrupted, not
    failed."""
    failed_pod: ShortText = ""
    """The pod that its node has ended for the pod's own fault, such as too much storage. The
    attempt ends failed, although KubeRay replaces the pod."""
    observed_generation: Number | None = None
    """Generation of the run that the driver's settings are from."""
    stop_requested_time: Time | None = None
    """When the driver was asked to stop."""
    report: FinalReport | None = None
    """The driver's final report, once the operator has read it."""


class StopCause(StrEnum):
    """Why a run has to release its pods."""

    SUSPEND = "Suspend"
    """spec.suspend is true."""
    CLUSTER_SUSPENDED = "ClusterSuspended"
    """Another controller, such as a queue, has suspended the RayCluster."""
    RESCALE = "Rescale"
    """Other replicas need other pods."""
    QUEUE = "Queue"
    """Kueue has not admitted the run, or has evicted it."""
    DEADLINE = "Deadline"
    """activeDeadlineSeconds is over."""


class StopStatus(Model):
    """The stop of a run that has to release its pods."""

    cause: StopCause
    """Cause of the stop."""
    since: Time
    """When the operator first saw that the run has to stop."""


class PodsStatus(Model):
    """All pods of the run together."""

    ready: bool
    """True if every pod of every role is ready."""
    since: Time
    """When the operator first saw `ready` so."""


class ObstacleStatus(Model):
    """The obstacle before the objects of the run, or before its driver."""

    reason: Annotated[str, Field(max_length=64)]
    """Reason of the condition ClusterProvisioned; or ProgressUnavailable, of Training: the head is
    ready, but does not answer."""
    since: Time
    """When the operator first met it."""


class CheckpointStatus(Model):
    """The newest complete checkpoint."""

    step: Number
    """Step after which it was saved."""
    uri: Annotated[str, Field(max_length=1024), CLEAN]
    """Its folder or object-storage address."""
    time: Time
    """When it was complete."""


class AgenticRunStatus(Model):
    """State of the run. Only the operator writes it."""

    phase: Phase = Phase.PENDING
    """Stage of the run's life."""
    observed_generation: Number = 0
    """Newest generation of the run that the operator has handled."""
    last_update_time: Time | None = None
    """When the operator last wrote this status: at least every 10 s while steps come."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    """Conditions of the run. docs/troubleshooting.md explains their reasons."""
    step: Number | None = None
    """Completed training steps."""
    max_steps: Number | None = None
    """Training steps of the run."""
    progress: ShortText | None = None
    """Completed and total steps, for example `120/1000`."""
    reward: ShortText | None = None
    """Mean score of the newest step's trajectories."""
    tokens_per_second: ShortText | None = None
    """Prompt and response tokens of the newest step per second, without the time of validation."""
    staleness: ShortText | None = None
    """Mean number of policy versions that the newest step's trajectories were behind."""
    eta: ShortText | None = None
    """Estimated remaining time, for example `12m`."""
    estimated_completion_time: Time | None = None
    """Estimated time at which the last step is done."""
    last_step_time: Time | None = None
    """When the newest step was done."""
    policy_version: Number | None = None
    """Version of the trained weights."""
    activity: ShortText | None = None
    """Current activity of the driver: starting, warm-up, rollout, training, validation, checkpoint,
    stopping or finished."""
    metrics: Annotated[list[Metric], Field(max_length=MAX_METRICS)] = []
    """The most important metrics of the newest step. All are in metrics.jsonl."""
    roles: Annotated[list[RoleStatus], Field(max_length=8)] = []
    """Pods of each role."""
    env_replicas: Number | None = None
    """Number of env pods that are ready, for `kubectl scale` and HorizontalPodAutoscalers."""
    env_selector: Annotated[str, Field(max_length=512)] | None = None
    """Labels of the env pods, for HorizontalPodAutoscalers."""
    ray_cluster: RayClusterStatus | None = None
    job: JobStatus | None = None
    restarts: Number = 0
    """Restarts of the driver, after failures and orderly stops, without suspensions."""
    failures_without_progress: Number = 0
    """Failures since the last new step. Above failurePolicy.maxRestarts, the run fails."""
    restarted_at_step: Number | None = None
    """The furthest step that the run had reached at a restart."""
    disruptions: Number = 0
    """Attempts that the platform ended: drains, evictions (also by Kueue), preemptions, lost nodes,
    deleted pods. They are neither restarts nor failures. Suspensions do not count."""
    disruptions_without_progress: Number = 0
    """Disruptions since the last new step. The wait before the next attempt grows with it, up to 10
    minutes."""
    stopping: StopStatus | None = None
    """Set while the run releases its pods or waits without them."""
    obstacle: ObstacleStatus | None = None
    """Set while the objects of the run cannot be created, or its head does not answer."""
    pods: PodsStatus | None = None
    startup_timeouts: Number = 0
    """Times in a row that the pods were given back: not ready within
    failurePolicy.startupDeadlineSeconds, or the head did not answer."""
    next_retry_time: Time | None = None
    """When a waiting run restarts or tries again to get pods. In the past for a suspended run."""
    volume_claim: Annotated[str, Field(max_length=253)] | None = None
    """PersistentVolumeClaim with the run's checkpoints."""
    checkpoint: CheckpointStatus | None = None
    start_time: Time | None = None
    """When the operator created the objects of the run. New after a suspension, and after pods were
    given back before the first attempt."""
    completion_time: Time | None = None
    """When the run ended."""
    message: LongText | None = None
    """Current action or obstacle of the run, or its last error."""
    log_tail: LongText | None = None
    """The end of the driver's log, kept after a failure because the RayCluster is deleted."""
