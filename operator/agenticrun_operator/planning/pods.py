"""From pod manifests to facts: which role, ready or not, and if not, why not in one line."""

from __future__ import annotations

from collections.abc import Iterator

from agenticrun_api import Reason, Role
from agenticrun_api.names import LABEL_ROLE, LABEL_RUN_UID
from agenticrun_operator.planning.observed import Pod, Problem
from agenticrun_operator.resources import RAY_CONTAINER, Manifest, is_deleting

_PULL_FAILURES = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "RegistryUnavailable",
    }
)
_CONFIG_FAILURES = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)
_PLAIN_WAITING = frozenset({"ContainerCreating", "PodInitializing"})


def read_pod(manifest: Manifest) -> Pod:
    """One pod that carries the label of a run."""
    metadata, status = manifest["metadata"], manifest.get("status", {})
    labels = metadata["labels"]
    ready = any(
        item["type"] == "Ready" and item["status"] == "True"
        for item in status.get("conditions", ())
    )
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        run_uid=labels.get(LABEL_RUN_UID, ""),
        role=Role(labels[LABEL_ROLE]),
        ready=ready,
        deleting=is_deleting(manifest),
        ip=status.get("podIP"),
        incarnation=_incarnation(metadata["uid"], status),
        problem=None if ready else _problem(manifest),
    )


def _incarnation(uid: str, status: Manifest) -> str | None:
    for container in status.get("containerStatuses", ()):
        if container["name"] == RAY_CONTAINER and container.get("containerID"):
            return f"{uid}/{container['restartCount']}"
    return None


def _problem(pod: Manifest) -> Problem | None:
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return Problem(
                Reason.UNSCHEDULABLE,
                f"cannot be scheduled: {_one_line(condition.get('message', ''))}",
            )
    images: dict[str, str] = {
        item["name"]: item["image"]
        for key in ("initContainers", "containers")
        for item in pod.get("spec", {}).get(key, ())
    }
    for container in _container_statuses(pod):
        if found := _container_problem(container, images[container["name"]]):
            return found
    return None


def _container_statuses(pod: Manifest) -> Iterator[Manifest]:
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses", ())
    yield from status.get("containerStatuses", ())


def _container_problem(container: Manifest, image: str) -> Problem | None:
    waiting = container.get("state", {}).get("waiting") or {}
    reason, message = waiting.get("reason", ""), _one_line(waiting.get("message", ""))
    if reason in _PULL_FAILURES:
        return Problem(Reason.IMAGE_PULL_FAILED, f"cannot pull image {image}: {message or reason}")
    if reason in _CONFIG_FAILURES:
        return Problem(
            Reason.CONTAINER_CRASHED,
            f"container {container['name']} cannot start: {message or reason}",
        )
    ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get(
        "terminated"
    )
    if ended and ended.get("exitCode", 0) != 0:
        detail = _one_line(ended.get("message", "")) or ended.get("reason", "")
        return Problem(
            Reason.CONTAINER_CRASHED,
            f"container {container['name']} ended with exit code {ended['exitCode']}: {detail}",
        )
    if reason and reason not in _PLAIN_WAITING:
        return Problem(
            Reason.PODS_PENDING, f"container {container['name']} waits: {message or reason}"
        )
    return None


def _one_line(text: str, limit: int = 400) -> str:
    return " ".join(text.split())[:limit]
