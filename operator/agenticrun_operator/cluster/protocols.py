"""What the reconciler needs of a cluster. The real clients and the tests' fake both fit."""

from __future__ import annotations

from typing import Protocol

from agenticrun_api import AgenticRunStatus, Progress
from agenticrun_operator.cluster.head import HeadAddress
from agenticrun_operator.observed import Job, NoJob, NoReport, Unreachable
from agenticrun_operator.resources import Event, Manifest


class Kube(Protocol):
    """The kube-apiserver. Every method raises `KubeUnavailable` when it does not answer as it should."""

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """A live read; None when there is no such object."""
        ...

    async def list_run_keys(self) -> list[tuple[str, str]]:
        """(namespace, name) of all runs in the namespaces that are served."""
        ...

    async def list_pods(self, namespace: str, run_name: str) -> list[Manifest]:
        """The pods with the run's name on their label."""
        ...

    async def create(self, manifest: Manifest) -> None:
        """Raises `AlreadyExists`, `Refused`."""
        ...

    async def apply(self, manifest: Manifest, seen: Manifest) -> None:
        """Server-side apply onto the object as it was seen. Raises `Conflict`, `Refused`."""
        ...

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Delete in the background the very object that was seen; nothing happens if it is gone."""
        ...

    async def write_status(self, run: Manifest, status: AgenticRunStatus) -> Manifest:
        """Replace our part of the status if the run is still as it was read. Returns the run as stored. Raises `Conflict`, `NotFound`."""
        ...

    async def post_event(self, run: Manifest, event: Event) -> None:
        """An event on the run."""
        ...


class Head(Protocol):
    """The head pods of runs: Ray's job API and the reporter. Asking returns `Unreachable`, acting raises `HeadUnreachable`."""

    async def job(self, head: HeadAddress, submission_id: str) -> Job | NoJob | Unreachable:
        """The job, with the end of its log when it has ended badly."""
        ...

    async def submit(self, head: HeadAddress, submission_id: str, attempt: int) -> None:
        """Submit the driver. A submission id that Ray knows already is no error."""
        ...

    async def stop(self, head: HeadAddress, submission_id: str) -> None:
        """Ask Ray to stop the job; no error if it has ended."""
        ...

    async def progress(self, head: HeadAddress) -> Progress | NoReport | Unreachable:
        """The newest snapshot of any attempt."""
        ...
