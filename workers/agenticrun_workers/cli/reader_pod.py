"""Reads the volume of a run without pods, through a pod that lives until the files are read.

The person creates the pod, with the rights of their kubectl. It has the image of the run's head,
which the nodes have, runs as the user who wrote the files, mounts them read-only and sleeps until
`kubectl exec` has read them. It has no label by which the operator finds the pods of runs.
It is deleted afterwards, also on Ctrl-C and on errors: mostly after some seconds, and after minutes
if its node pulls the image. If that fails, it ends on its own after `LIFE_SECONDS`, and goes with
the run.
"""

from __future__ import annotations

import json
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import typer

from agenticrun_api import AgenticRun, Role
from agenticrun_api.names import (
    API_VERSION,
    CHECKPOINT_DIR,
    GROUP,
    KIND,
    RAY_CONTAINER,
)
from agenticrun_api.pods import POD_USER, RESTRICTED, merged
from agenticrun_workers.cli.kubectl import Kubectl, SourceError

Manifest = dict[str, Any]

LABEL_READER = f"{GROUP}/reader"
"""Has the name of the run, for users."""
READER_CONTAINER = "reader"

START_SECONDS = 60.0
"""Patience with a pod that does not start."""
PULL_SECONDS = 300.0
"""Further patience with a node that pulls the image: the pod was scheduled to one without it."""
POLL_SECONDS = 0.5
_SCRATCH = "/reader-scratch"
"""Folder for a copy of what is read, until it is packed. A run may have its output below /tmp."""
LIFE_SECONDS = 1200
"""Lifetime of a pod that is not deleted before."""

_RESOURCES: Manifest = {
    "requests": {"cpu": "50m", "memory": "64Mi"},
    "limits": {"cpu": "1", "memory": "256Mi"},
}
_PLACE = frozenset({"nodeSelector", "tolerations", "affinity", "runtimeClassName", "schedulerName"})
"""Fields of podTemplate.spec that say which node can mount the volume."""
_IDENTITY = ("runAsUser", "runAsGroup", "supplementalGroups", "seLinuxOptions")
"""Fields of a security context that decide who can read the files."""
_HOPELESS = frozenset({"ErrImageNeverPull", "ImagePullBackOff", "InvalidImageName"})
_LOST = frozenset({"emptyDir", "ephemeral"})
"""Kinds of volumes that go with their pod."""
_HOST_LABEL = "kubernetes.io/hostname"
"""The label that picks one node."""


class Unreadable(SourceError):
    """The output cannot be read, and another try ends the same way."""


class MayNotCreatePods(Unreadable):
    """The person has no right to create pods in the run's namespace."""


@dataclass(frozen=True)
class OutputVolume:
    """The volume on which a run keeps its output folder."""

    volume: Manifest
    mount: Manifest

    @property
    def claim(self) -> str | None:
        """The name of the volume claim; None for a volume of another kind."""
        source = self.volume.get("persistentVolumeClaim") or {}
        return source.get("claimName")

    def __str__(self) -> str:
        return f"claim {self.claim}" if self.claim else f"volume {self.volume['name']}"


def output_volume(run: AgenticRun, output: Path) -> OutputVolume | None:
    """Return the volume with the output folder; None if it was lost with the pods.

    It is the claim in the run's status, or a volume that the user mounts in the driver's pod.

    Raises:
        Unreadable: it is a folder of a node (hostPath), and nothing says of which one.
    """
    # The status first: the spec may have changed since the run had pods.
    if claim := run.status.volume_claim:
        return OutputVolume(
            {"name": "output", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "output", "mountPath": CHECKPOINT_DIR, "readOnly": True},
        )
    driver = run.spec.roles.driver
    overlay = driver.overlay.spec
    (ray,) = _ray_container(overlay) or ({},)
    found = [*driver.volumes, *(overlay.get("volumes") or ())]
    volumes = {volume.get("name"): volume for volume in found}
    mounts = [*driver.volume_mounts, *(ray.get("volumeMounts") or ())]
    folders = {Path(str(mount.get("mountPath"))): mount for mount in mounts}
    above = next((path for path in (output, *output.parents) if path in folders), None)
    if above is None:
        return None
    mount = folders[above]  # of several mounts above a folder, the nearest one has it
    volume = volumes.get(mount.get("name"))
    # These go with their pod, and the output with them.
    if volume is None or volume.keys() & _LOST:
        return None
    if "hostPath" in volume:
        pinned = driver.node_selector | (overlay.get("nodeSelector") or {})
        if _HOST_LABEL not in pinned:
            parts = (str(volume["hostPath"].get("path")), str(mount.get("subPath") or ""))
            raise Unreadable(
                f"the output is in {Path(*parts, output.relative_to(above))} on the node where the "
                f"driver ran (hostPath): read it there. With {_HOST_LABEL} in "
                "spec.roles.driver.nodeSelector, a pod can read it"
            )
    return OutputVolume(volume, {**mount, "readOnly": True})


def reader_pod(run: AgenticRun, output: OutputVolume) -> Manifest:
    """Return the pod, with a name that no other pod has.

    Raises:
        SourceError: the status names no image.
    """
    driver, spec = run.spec.roles.driver, run.spec
    images = [role.image for role in run.status.roles if role.name == Role.DRIVER]
    # What the driver had: its node is likely to have the image already.
    image = next(filter(None, [*images, driver.image, spec.image]), None)
    if image is None:
        raise SourceError(f"the status of {run.metadata.name} names no image for a pod")
    place: Manifest = {
        "imagePullSecrets": [{"name": name} for name in spec.image_pull_secrets],
        "nodeSelector": driver.node_selector,
        "tolerations": driver.tolerations,
        "affinity": driver.affinity,
        "runtimeClassName": driver.runtime_class_name,
    }
    pod: Manifest = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": LIFE_SECONDS,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _identity(driver.overlay.spec),
        **{name: value for name, value in place.items() if value},
        "containers": [
            {
                "name": READER_CONTAINER,
                "image": image,
                # Any version that the node has is good enough to read files.
                "imagePullPolicy": "Never" if spec.image_pull_policy == "Never" else "IfNotPresent",
                "command": ["sleep", str(LIFE_SECONDS)],
                "resources": _RESOURCES,
                "securityContext": RESTRICTED | {"readOnlyRootFilesystem": True},
                "env": [{"name": "TMPDIR", "value": _SCRATCH}],
                "volumeMounts": [
                    {**output.mount, "name": "output"},
                    {"name": "scratch", "mountPath": _SCRATCH},
                ],
            }
        ],
        # Under a name of ours: the user's may be the other one.
        "volumes": [{**output.volume, "name": "output"}, {"name": "scratch", "emptyDir": {}}],
    }
    kept = _PLACE | {"imagePullSecrets"}
    theirs = {name: value for name, value in driver.overlay.spec.items() if name in kept}
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": run.metadata.name,
        "uid": run.metadata.uid,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            # Two people may read one run at the same time.
            "name": f"{run.metadata.name}-reader-{uuid4().hex[:6]}",
            "namespace": run.metadata.namespace,
            "labels": spec.labels | {LABEL_READER: run.metadata.name},
            "annotations": dict(spec.annotations),
            # With the run as owner it is deleted with it, should this program be killed.
            "ownerReferences": [owner],
        },
        "spec": merged(pod, theirs),
    }


def _identity(overlay: Mapping[str, Any]) -> Manifest:
    """Return the security context of a pod that reads what the driver wrote.

    There is no fsGroup: with one, the node would change the owner of every file on the volume.
    """
    (ray,) = _ray_container(overlay) or ({},)
    contexts = [part.get("securityContext") or {} for part in (overlay, ray)]
    found: Manifest = {"runAsUser": POD_USER, "runAsGroup": POD_USER}
    for context in contexts:
        found |= {name: context[name] for name in _IDENTITY if name in context}
    if found["runAsUser"] == 0:  # the pod may not be root, and root's files are not secret
        found["runAsUser"] = POD_USER
    if group := contexts[0].get("fsGroup"):
        found["supplementalGroups"] = [*found.get("supplementalGroups", ()), group]
    return {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **found}


def _ray_container(overlay: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what podTemplate says about the container with the driver, if anything."""
    containers = overlay.get("containers") or ()
    return [container for container in containers if container.get("name") == RAY_CONTAINER]


@contextmanager
def running_reader(kubectl: Kubectl, pod: Manifest, output: OutputVolume) -> Iterator[str]:
    """Create the pod, wait until it runs, yield its name, and delete it.

    Raises:
        MayNotCreatePods: the person has no right to.
        Unreadable: the claim is gone.
        SourceError: the pod does not run within `START_SECONDS`; with the reason.
    """
    if output.claim is not None:  # a pod would wait for a claim that does not exist
        try:
            claim = kubectl.json("persistentvolumeclaim", output.claim)
        except SourceError as error:
            # Other errors say nothing: one may be allowed to create pods, and not to read claims.
            if "(NotFound)" in str(error):
                raise Unreadable(f"{output} is gone, and the run's output with it") from None
        else:
            if claim["metadata"].get("deletionTimestamp"):
                raise Unreadable(f"{output} is being deleted, so no new pod can mount it")
    name = pod["metadata"]["name"]
    try:
        kubectl.create(pod)
    except (SourceError, KeyboardInterrupt) as error:
        # After Ctrl-C, or without an answer in time, the pod may be there.
        if "(Forbidden)" not in str(error):
            _delete(kubectl, name)
        if 'cannot create resource "pods"' in str(error):
            raise MayNotCreatePods(str(error)) from None
        raise
    try:
        _wait(kubectl, name, output)
        yield name
    finally:
        _delete(kubectl, name)


def _wait(kubectl: Kubectl, name: str, output: OutputVolume) -> None:
    end, pulls = time.monotonic() + START_SECONDS, False
    while True:
        pod = kubectl.json("pod", name)
        (state,) = _states(pod) or ({},)
        # Not its readiness: commands can be run in it as soon as it runs.
        if "running" in state:
            return
        late = time.monotonic() > end
        hopeless = (state.get("waiting") or {}).get("reason") in _HOPELESS
        if not late and not hopeless and pod["status"].get("phase") not in ("Failed", "Succeeded"):
            time.sleep(POLL_SECONDS)
            continue
        events = _events(kubectl, name)
        # A large image takes minutes, which is no failure.
        if late and not pulls and events and events[-1].get("reason") == "Pulling":
            typer.echo("its node pulls the image first, which may take minutes", err=True)
            end, pulls = time.monotonic() + PULL_SECONDS, True
            continue
        raise SourceError(
            f"{output} cannot be read: pod {name} does not start: {_obstacle(pod, state, events)}"
        )


def _states(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the state of the reader's container; others may have been injected beside it."""
    statuses = pod["status"].get("containerStatuses") or ()
    return [status["state"] for status in statuses if status["name"] == READER_CONTAINER]


def _events(kubectl: Kubectl, name: str) -> list[dict[str, Any]]:
    """Return the events of the pod, the newest last; none if the person may not read them."""
    with suppress(SourceError):
        found = kubectl.json("events", f"--field-selector=involvedObject.name={name}")["items"]
        return sorted(found, key=lambda event: event.get("lastTimestamp") or "")
    return []


def _obstacle(
    pod: Mapping[str, Any], state: Mapping[str, Any], events: list[dict[str, Any]]
) -> str:
    """Return why a pod does not run, in the words of the scheduler or the node."""
    status = pod["status"]
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason')}: {condition.get('message')}"
    ended: Mapping[str, Any] = state.get("waiting") or state.get("terminated") or {}
    warnings = [event for event in events if event.get("type") == "Warning"]
    if ended.get("message") and ended.get("reason") not in ("ContainerCreating", None):
        return f"{ended['reason']}: {ended['message']}"
    if warnings:
        return f"{warnings[-1].get('reason')}: {warnings[-1].get('message')}"
    where = pod["spec"].get("nodeName")
    said = status.get("message") or ended.get("reason") or status.get("reason")
    return said or (f"node {where} has not said why" if where else "no scheduler has looked at it")


def _delete(kubectl: Kubectl, name: str) -> None:
    """Delete the pod. Ctrl-C does not interrupt that."""
    with _ignoring_interrupts():
        try:
            kubectl.run(
                "delete", "pod", name, "--ignore-not-found", "--wait=false", timeout=START_SECONDS
            )
        except SourceError as error:
            typer.echo(
                f"pod {name} may be left ({error}); it ends within {LIFE_SECONDS // 60} minutes, "
                "and is deleted with the run",
                err=True,
            )


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C, here and in programs that are started."""
    # Python sets handlers of signals only in the main thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def commands_by_hand(pod: Manifest, output: Path, context: str | None) -> str:
    """Return shell commands that copy the output folder, for a user who may create pods.

    Args:
        pod: the pod that reads it.
        output: the output folder in the pod.
        context: kubectl's context, if the person named one.
    """
    kubectl = shlex.join(["kubectl", *([f"--context={context}"] if context else [])])
    metadata = pod["metadata"]
    run, folder = metadata["labels"][LABEL_READER], shlex.quote(str(output))
    name = f"-n {metadata['namespace']} {metadata['name']}"
    lines = (
        f"{kubectl} create -f - <<'EOF'\n{json.dumps(pod)}\nEOF",
        f"{kubectl} wait --for=condition=Ready --timeout=300s pod {name}",
        f"mkdir {run} && {kubectl} exec {name} -- tar -C {folder} --exclude './step-*' -c . "
        f"| tar -x -C {run}",
        f"{kubectl} delete pod {name}",
    )
    return "\n".join(lines)
