"""Interfaces of the clients that the reconciler needs. The tests implement them with a fake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from agenticrun_api import AgenticRunStatus, LiveConfig, Progress, names
from agenticrun_operator.cluster.head import HeadAddress
from agenticrun_operator.cluster.kube import Propagation
from agenticrun_operator.observed import Job, NoJob, NoReport, Unreachable
from agenticrun_operator.resources import Event, Manifest


class Kube(Protocol):
    """The kube-apiserver. Every method raises `KubeUnavailable` if there is no usable answer."""

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """Return the object as the apiserver has it now, or None if it does not exist.

        Args:
            kind: its kind.
            namespace: its namespace; empty for a kind without namespaces.
            name: its name.

        Raises:
            NotServed: the kind's CRD is not installed.
            Denied: rights are missing.
        """
        ...

    async def list_run_keys(self) -> list[tuple[str, str]]:
        """Return (namespace, name) of all runs in the watched namespaces that can be listed."""
        ...

    async def list_pods(
        self, namespace: str, run_name: str, label: str = names.LABEL_RUN
    ) -> list[Manifest]:
        """Return the pods that have the run's name in this label."""
        ...

    async def list_policies(self, namespace: str, run_name: str) -> list[Manifest]:
        """Return the NetworkPolicies that have the run's name as a label.

        Raises:
            NotServed: the Kubernetes cluster has no NetworkPolicies.
            Denied: the right to read them is missing.
        """
        ...

    async def list_pod_warnings(self, namespace: str, pod_uid: str) -> list[Manifest]:
        """Return the events of type Warning on a pod."""
        ...

    async def queue_positions(self, namespace: str, queue: str) -> dict[str, int]:
        """Return the positions of the Workloads that wait in a LocalQueue, by name.

        Position 1 is the first of all that wait in its ClusterQueue. Kueue names 1,000 at most.

        Raises:
            NotServed: Kueue's visibility API is not installed.
            NotFound: Kueue does not know the queue.
            Denied: the right to read them is missing.
        """
        ...

    async def create(self, manifest: Manifest) -> None:
        """Create an object. Admission webhooks may take half a minute.

        Raises `AlreadyExists`, `Refused`, `TooLarge`, `Denied`, `WebhookUnavailable`, `NotServed`,
        `NamespaceGone`.
        """
        ...

    async def put(self, manifest: Manifest) -> Manifest:
        """Replace an object at its resourceVersion and return it as stored.

        Admission webhooks may take half a minute.

        Raises `Conflict`, `NotFound`, `Refused`, `TooLarge`, `Denied`, `WebhookUnavailable`.
        """
        ...

    async def put_status(self, manifest: Manifest) -> Manifest:
        """Replace the status of an object at its resourceVersion and return it as stored.

        Raises as `put`.
        """
        ...

    async def delete(
        self,
        kind: str,
        namespace: str,
        name: str,
        uid: str,
        force: bool = False,
        propagation: Propagation = "Background",
    ) -> None:
        """Delete the object with this uid. Do nothing if it no longer exists.

        Args:
            kind: its kind.
            namespace: its namespace.
            name: its name.
            uid: its uid.
            force: remove a pod without waiting until its kubelet has ended it.
            propagation: Foreground keeps the object until all that it owns is gone.

        Raises:
            Denied: rights are missing, or an admission policy prevents it.
            WebhookUnavailable: an admission webhook fails. Webhooks may take half a minute.
        """
        ...

    async def write_status(self, run: Manifest, status: AgenticRunStatus) -> Manifest:
        """Write the operator's part of the status and return the run as stored.

        Raises:
            Conflict: the run has changed since it was read.
            NotFound: the run does not exist.
            Refused: the CRD rejects a value.
            TooLarge: the run would be larger than etcd takes.
        """
        ...

    async def post_event(self, run: Manifest, event: Event) -> None:
        """Post an event on the run."""
        ...


class Head(Protocol):
    """The head pods of runs: Ray's job API and the reporter.

    If a head does not answer, `job` and `progress` return `Unreachable`; the other methods raise
    `HeadUnreachable`.
    """

    async def job(self, head: HeadAddress, submission_id: str) -> Job | NoJob | Unreachable:
        """Return the job; if it failed or was stopped, with the end of its log."""
        ...

    async def submit(
        self, head: HeadAddress, submission_id: str, attempt: int, replicas: Mapping[str, int]
    ) -> None:
        """Submit the driver. It is not an error if Ray already knows the submission id.

        Args:
            head: the head.
            submission_id: Ray's id of the job.
            attempt: the number of the attempt.
            replicas: pods by role, if they may differ from those of the mounted run.
        """
        ...

    async def stop(self, head: HeadAddress, submission_id: str) -> None:
        """Ask Ray to stop the job. It is not an error if the job has ended."""
        ...

    async def configure(self, head: HeadAddress, config: LiveConfig) -> None:
        """Send settings to the reporter. An older worker image ignores them."""
        ...

    async def request_stop(self, head: HeadAddress) -> None:
        """Tell the reporter to ask the driver to save a checkpoint and to end."""
        ...

    async def progress(
        self, head: HeadAddress, after: Progress | None = None
    ) -> Progress | NoReport | Unreachable:
        """Return the newest progress snapshot of any attempt.

        Args:
            head: the head.
            after: wait a few seconds at most until there is another snapshot than this one, or its
                driver falls silent.
        """
        ...
