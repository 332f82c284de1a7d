"""Pod specs of a run's roles, for the RayCluster."""

from __future__ import annotations

from dataclasses import dataclass

from agenticrun_api import AgenticRun, Role
from agenticrun_api.names import (
    ENV_NODE,
    ENV_POD_IP,
    ENV_POD_UID,
    ENV_RAY_TOKEN,
    HUB_CACHE_DIR,
    LABEL_SAVES,
    LEAVE_COMMAND,
    RAY_CONTAINER,
    RAY_ENV,
    REPORTER_COMMAND,
    REPORTER_CONTAINER,
    REPORTER_PORT,
)
from agenticrun_api.placement import placement
from agenticrun_api.pods import POD_USER, RESTRICTED, merged
from agenticrun_api.roles import SAVES, Resources, items
from agenticrun_operator.resources.code import code_containers, init_volumes
from agenticrun_operator.resources.images import WorkerImages
from agenticrun_operator.resources.metadata import Manifest, run_labels
from agenticrun_operator.resources.tokens import RAY_TOKEN_KEY
from agenticrun_operator.resources.volumes import pod_volumes

JOB_STOP_WAIT_SECONDS = 30
"""Time a stopped driver has to save before Ray kills it. Ray's default is 3."""
RAY_STOP_SECONDS = 2
"""Part of a pod's grace period that its preStop hook leaves for the end of Ray."""
RAY_AGENT_PORT = 52365
HUB_TOKEN = "HF_TOKEN"
"""Key of the Secret with the token for the Hugging Face Hub, and the variable with it."""

_ENV = {
    **RAY_ENV,
    "RAY_JOB_STOP_WAIT_TIME_S": str(JOB_STOP_WAIT_SECONDS),
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # Ray Serve's proxies need this time after SIGTERM; a pod of ours would keep its GPUs for it.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}
_REPORTER_VOLUMES = ("work", "run", "reporter-token")
POD_IP_VARIABLE = "AGENTICRUN_POD_IP"

_NOT_CONSOLIDATED = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
"""Annotations of pods that save, unless the user sets them: autoscalers that make a cluster smaller
leave these pods where they are."""


@dataclass(frozen=True)
class PodContext:
    """Values that the pods of all roles of a run get from outside its spec."""

    images: WorkerImages
    tokens: str
    """Name of the Secret with the run's tokens."""
    claim: Manifest | None = None
    """The user's own claim for checkpoints, if it was read."""


def head_pod(run: AgenticRun, context: PodContext, ports: dict[str, int]) -> Manifest:
    """Return the pod template of the head: Ray's head with the driver, and the reporter.

    The reporter is a native sidecar, so it keeps running when an attempt of the driver ends.
    """
    pod = _pod(run, Role.DRIVER, context, ports)
    pod["containers"][0]["env"].insert(0, _field(POD_IP_VARIABLE, "status.podIP"))
    settings = run.spec.roles.driver
    # As in all Ray containers: trainer pods have no other token to ask the reporter to leave.
    ray_token = {"name": context.tokens, "key": RAY_TOKEN_KEY}
    pod.setdefault("initContainers", []).append(
        {
            "name": REPORTER_CONTAINER,
            "image": context.images.of(run, Role.DRIVER),
            "imagePullPolicy": run.spec.image_pull_policy,
            "restartPolicy": "Always",
            "command": list(REPORTER_COMMAND),
            "env": [
                *settings.env,
                {"name": ENV_RAY_TOKEN, "valueFrom": {"secretKeyRef": ray_token}},
                _field(ENV_POD_UID, "metadata.uid"),
                _field(ENV_POD_IP, "status.podIP"),
            ],
            "readinessProbe": {
                "httpGet": {"path": "/healthz", "port": REPORTER_PORT},
                "periodSeconds": 1,
                "failureThreshold": 5,
            },
            "resources": context.images.reporter.to_dict(),
            "securityContext": RESTRICTED,
            "volumeMounts": [
                item.mount
                for item in pod_volumes(run, Role.DRIVER, context.tokens)
                if item.volume["name"] in _REPORTER_VOLUMES
            ],
        }
    )
    return _template(run, Role.DRIVER, pod)


def _field(name: str, path: str) -> Manifest:
    """Return a variable with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def worker_pod(run: AgenticRun, role: Role, context: PodContext) -> Manifest:
    """Return the pod template of a worker role."""
    return _template(run, role, _pod(run, role, context, {}))


def _template(run: AgenticRun, role: Role, pod: Manifest) -> Manifest:
    """Return the pod template with the user's overlay (spec.roles.<role>.podTemplate).

    The rules of the API refuse an overlay of what must stay ours. No pod gets Kubernetes
    credentials unless the user names a service account and asks for its token.
    """
    overlay = run.spec.roles.of(role).overlay
    labels = run.spec.labels | overlay.metadata.labels | run_labels(run, role)
    annotations = run.spec.annotations | overlay.metadata.annotations
    if role in SAVES:
        labels |= {LABEL_SAVES: "true"}
        annotations = _NOT_CONSOLIDATED | annotations
    metadata: Manifest = {"labels": labels} | ({"annotations": annotations} if annotations else {})
    return {"metadata": metadata, "spec": merged(pod, overlay.spec)}


def _pod(run: AgenticRun, role: Role, context: PodContext, ports: dict[str, int]) -> Manifest:
    settings, image = run.spec.roles.of(role), context.images.of(run, role)
    volumes = pod_volumes(run, role, context.tokens)
    optional: Manifest = {
        "imagePullSecrets": [{"name": name} for name in run.spec.image_pull_secrets],
        **placement(run, role, context.images.architectures, context.claim),
        "priorityClassName": settings.priority_class_name or run.spec.priority_class_name,
        "runtimeClassName": settings.runtime_class_name,
        "schedulerName": run.spec.scheduling and run.spec.scheduling.scheduler_name,
    }
    bring_code = code_containers(run, settings, _init_container(run, role, image))
    private = init_volumes(run.spec.code) if run.spec.code else []
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": run.spec.grace_seconds(role),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": POD_USER,
            "runAsGroup": POD_USER,
            "fsGroup": POD_USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **{key: value for key, value in optional.items() if value},
        **({"initContainers": bring_code} if bring_code else {}),
        "containers": [
            {
                "name": RAY_CONTAINER,
                "image": image,
                "imagePullPolicy": run.spec.image_pull_policy,
                "env": _environment(run, role),
                "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
                # KubeRay's own probe is slower: it begins after 10 s and repeats every 5 s.
                "readinessProbe": {
                    "httpGet": {"path": "/api/healthz", "port": RAY_AGENT_PORT},
                    "periodSeconds": 1,
                    "timeoutSeconds": 2,
                    "failureThreshold": 10,
                },
                "resources": _resources(run, role),
                "securityContext": RESTRICTED,
                "volumeMounts": [*(item.mount for item in volumes), *settings.volume_mounts],
                **({"lifecycle": {"preStop": _leave(run, role)}} if role in SAVES else {}),
                **({"envFrom": settings.env_from} if settings.env_from else {}),
            }
        ],
        "volumes": [*(item.volume for item in volumes), *private, *settings.volumes],
    }


def _leave(run: AgenticRun, role: Role) -> Manifest:
    """Return the preStop hook of a pod that training cannot lose.

    SIGTERM goes to `ray start` alone, which ends the driver unsaved. It comes after the hook, in
    which the driver saves.
    """
    seconds = max(run.spec.grace_seconds(role) - RAY_STOP_SECONDS, 1)
    return {"exec": {"command": [*LEAVE_COMMAND, str(seconds)]}}


def _init_container(run: AgenticRun, role: Role, image: str) -> Manifest:
    """Return what all init containers that bring code have.

    They may use as much as the Ray container, which starts after them, without its devices. A quota
    on a kind of resource demands it from every container.
    """
    resources = _resources(run, role)
    return {
        "image": image,
        "imagePullPolicy": run.spec.image_pull_policy,
        "resources": {
            kind: {name: amount for name, amount in amounts.items() if "/" not in name}
            for kind, amounts in resources.items()
        },
        "securityContext": RESTRICTED | {"readOnlyRootFilesystem": True},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _environment(run: AgenticRun, role: Role) -> list[Manifest]:
    """Return our variables without the overridden ones, then the user's."""
    ours = _ENV | ({"PYTHONPATH": run.spec.code.python_path} if run.spec.code else {})
    variables = [{"name": name, "value": value} for name, value in ours.items()]
    theirs = run.spec.roles.of(role).env
    overridden = [variable.get("name") for variable in theirs]  # of any type, until it is applied
    return [
        variable
        for variable in [*variables, _field(ENV_NODE, "spec.nodeName"), *_hugging_face(run)]
        if variable["name"] not in overridden
    ] + theirs


def _hugging_face(run: AgenticRun) -> list[Manifest]:
    """Return the variables that huggingface_hub reads, in AgenticRun and in the engines."""
    hub = run.spec.hugging_face
    if hub is None:
        return []
    variables: list[Manifest] = []
    if hub.secret_name:
        reference = {"secretKeyRef": {"name": hub.secret_name, "key": HUB_TOKEN}}
        variables.append({"name": HUB_TOKEN, "valueFrom": reference})
    if hub.cache_claim_name:
        variables.append({"name": "HF_HUB_CACHE", "value": HUB_CACHE_DIR})
    if hub.offline:
        variables.append({"name": "HF_HUB_OFFLINE", "value": "1"})
    return variables


def _resources(run: AgenticRun, role: Role) -> Manifest:
    settings = run.spec.roles.of(role)
    given = settings.resources or Resources()
    requests: Manifest = {} if settings.gives("cpu") else {"cpu": settings.cpus}
    limits: Manifest = {} if settings.gives("memory") else {"memory": settings.memory}
    if settings.gpus:
        limits[settings.gpu_resource_name] = settings.gpus
    resources = {"requests": requests | limits | given.requests, "limits": limits | given.limits}
    for container in items(settings.overlay.spec, "containers"):
        if container.get("name") == RAY_CONTAINER and isinstance(container.get("resources"), dict):
            resources = merged(resources, container["resources"])
    return resources


def cpus_of(run: AgenticRun, role: Role) -> str:
    """Return the CPUs of a role's pod, in whichever form they are given."""
    settings = run.spec.roles.of(role)
    given = settings.resources or Resources()
    return given.requests.get("cpu") or given.limits.get("cpu") or settings.cpus
