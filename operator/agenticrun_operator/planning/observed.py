"""What is seen of a run's world: the input of planning, frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from agenticrun_api import Progress, Reason, Role
from agenticrun_operator.resources import Child, Manifest

LIVE_JOB = frozenset({"PENDING", "RUNNING"})


@dataclass(frozen=True)
class Problem:
    """Why a pod is not ready, in one line."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class Pod:
    """One pod of a run."""

    name: str
    uid: str
    run_uid: str
    role: Role
    ready: bool
    deleting: bool = False
    ip: str | None = None
    incarnation: str | None = None
    """`<pod uid>/<restarts of the Ray container>`, once that container has started."""
    problem: Problem | None = None


@dataclass(frozen=True)
class Job:
    """A Ray job, as the head tells."""

    status: str
    """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
    message: str = ""
    exit_code: int | None = None
    log_tail: str = ""
    """The end of the log; only of a job that has ended badly."""

    @property
    def live(self) -> bool:
        return self.status in LIVE_JOB


@dataclass(frozen=True)
class NoJob:
    """The head answers, and knows no such job."""


@dataclass(frozen=True)
class NoReport:
    """The reporter answers, and no driver has told it anything."""


@dataclass(frozen=True)
class Unreachable:
    """It could not be asked, or the answer could not be used."""

    why: str


@dataclass(frozen=True)
class Observed:
    """Everything that one reconciliation has read."""

    children: Mapping[Child, Manifest | None] = field(default_factory=dict)
    """The children that were looked at, whoever owns them; None: does not exist. While a run trains, only the RayCluster is looked at."""
    pods: tuple[Pod, ...] = ()
    """Every pod with the run's name on its label, those of an earlier run of that name included."""
    job: Job | NoJob | Unreachable = Unreachable("there is no head pod to ask")
    """The job of `status.job.submissionId`."""
    progress: Progress | NoReport | Unreachable = Unreachable("there is no head pod to ask")
    missing_code: str | None = None
    """The name of spec.code.configMap, when there is no such ConfigMap."""
    job_trouble: str | None = None
    """Why the last submission or stop failed."""
    last_status_write: datetime | None = None
    """When this operator last wrote the run's status."""

    def child(self, kind: str, name: str) -> Manifest | None:
        """A child that was looked at and exists."""
        return self.children.get(Child(kind, name))

    def head(self, run_uid: str) -> Pod | None:
        """The run's own head pod; of two, the one that is not being deleted."""
        heads = [pod for pod in self.pods if pod.run_uid == run_uid and pod.role is Role.DRIVER]
        return min(heads, key=lambda pod: pod.deleting, default=None)
