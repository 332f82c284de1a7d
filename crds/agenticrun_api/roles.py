"""`spec.roles`: resources and scheduling of each role's pods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from agenticrun_api.base import Model, Name, Open, Quantity, Rule
from agenticrun_api.names import RAY_CONTAINER, REPORTER_CONTAINER, Role
from agenticrun_api.quantities import possible_cpus, some_bytes

OpenList = Annotated[list[dict[str, Any]], Field(max_length=32)]
Labels = Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)]
Annotations = Annotated[dict[str, Annotated[str, Field(max_length=16_384)]], Field(max_length=32)]

_RESERVED = ("agenticrun.dev/", "ray.io/", "kueue.x-k8s.io/")
LABEL_GANG = "ray.io/gang-scheduling-enabled"
LABEL_GANG_PRIORITY = "ray.io/priority-class-name"
GANG_LABELS = (LABEL_GANG, "ray.io/scheduler-name", LABEL_GANG_PRIORITY)
"""Labels of ray.io that gang schedulers read on the RayCluster and its pods."""


def reserved_labels(field: str, labels: Callable[[Any], Iterable[str]]) -> Rule:
    """Return a rule that a mapping of labels has none that decides about the run's objects."""
    refused = " && ".join(f"!k.startsWith('{prefix}')" for prefix in _RESERVED)
    gang = ", ".join(f"'{label}'" for label in GANG_LABELS)
    return Rule(
        f"!has(self.{field}) || self.{field}.all(k, k in [{gang}] || ({refused}))",
        "labels of agenticrun.dev, ray.io and kueue.x-k8s.io are set by the operator and KubeRay "
        f"only, except those for gang schedulers ({', '.join(GANG_LABELS)}): leave them out",
        f".{field}",
        lambda model: all(
            key in GANG_LABELS or not key.startswith(_RESERVED) for key in labels(model)
        ),
    )


def _open_object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that may have more fields than the rules read."""
    return {"type": "object", "properties": properties, "additionalProperties": True}


_AS_THERE = "As in a pod spec."
_TEXT = {"type": "string", "maxLength": 1024, "description": _AS_THERE}
_WORDS = {
    "type": "array",
    "maxItems": 64,
    "items": {"type": "string", "maxLength": 4096},
    "description": _AS_THERE,
}


def _list_of(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "maxItems": most, "items": items, "description": _AS_THERE}


_CONTAINER = _open_object(
    name=_TEXT,
    image=_TEXT,
    command=_WORDS,
    args=_WORDS,
    volumeMounts=_list_of(_open_object(mountPath=_TEXT), 32),
)
_CONTAINERS = _list_of(_CONTAINER, 16)
_POD_SPEC = _open_object(
    automountServiceAccountToken={"type": "boolean", "description": _AS_THERE},
    serviceAccountName=_TEXT,
    restartPolicy=_TEXT,
    containers=_CONTAINERS,
    initContainers=_CONTAINERS,
    volumes=_list_of(_open_object(name=_TEXT), 32),
)
PodSpecOverlay = Annotated[Open, WithJsonSchema(_POD_SPEC)]
OWN_FOLDER = "/etc/agenticrun"
OWN_VOLUMES = ("run", "reporter-token")


def items(fields: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the mappings of a list; nothing of what the apiserver refuses or takes for unset."""
    found = fields.get(name)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _containers(template: PodTemplate) -> list[dict[str, Any]]:
    return [*items(template.spec, "containers"), *items(template.spec, "initContainers")]


_EVERY_CONTAINER = " && ".join(
    f"(!has(self.spec.{kind}) || self.spec.{kind}.all(c, {{0}}))"
    for kind in ("containers", "initContainers")
)


class PodTemplateMetadata(Model):
    """Labels and annotations of a role's pods."""

    RULES = (reserved_labels("labels", lambda m: m.labels),)

    labels: Labels = {}
    """Labels, in addition to the operator's own."""
    annotations: Annotations = {}
    """Annotations, in addition to KubeRay's own."""


class PodTemplate(Model):
    """Fields to merge into the role's pods, as Kubernetes' strategic merge does
    (docs/pod-template.md).
    """

    RULES = (
        Rule(
            _EVERY_CONTAINER.format("has(c.name)"),
            "every container needs its name, by which it is merged: "
            f"{RAY_CONTAINER} is the one that runs Ray",
            ".spec.containers",
            lambda t: all("name" in container for container in _containers(t)),
        ),
        Rule(
            f"!has(self.spec.containers) || self.spec.containers.all(c, "
            f"!has(c.name) || c.name != '{RAY_CONTAINER}' || "
            "!(has(c.command) || has(c.args) || has(c.image)))",
            f"command and args of container {RAY_CONTAINER} are KubeRay's, and its image is "
            "roles.<role>.image: leave them out",
            ".spec.containers",
            lambda t: (
                not any(
                    {"command", "args", "image"} & container.keys()
                    for container in items(t.spec, "containers")
                    if container.get("name") == RAY_CONTAINER
                )
            ),
        ),
        Rule(
            _EVERY_CONTAINER.format(f"!has(c.name) || c.name != '{REPORTER_CONTAINER}'"),
            f"container {REPORTER_CONTAINER} is the operator's own: choose another name",
            ".spec.initContainers",
            lambda t: all(c.get("name") != REPORTER_CONTAINER for c in _containers(t)),
        ),
        Rule(
            _EVERY_CONTAINER.format(
                "!has(c.volumeMounts) || c.volumeMounts.all(m, !has(m.mountPath) || "
                f"!m.mountPath.startsWith('{OWN_FOLDER}'))"
            ),
            f"{OWN_FOLDER} holds the run's own files and tokens: choose another mountPath",
            ".spec.containers",
            lambda t: (
                not any(
                    str(mount.get("mountPath")).startswith(OWN_FOLDER)
                    for container in _containers(t)
                    for mount in items(container, "volumeMounts")
                )
            ),
        ),
        Rule(
            "!has(self.spec.volumes) || self.spec.volumes.all(v, has(v.name) && "
            + " && ".join(f"v.name != '{name}'" for name in OWN_VOLUMES)
            + ")",
            f"every volume needs a name; {' and '.join(OWN_VOLUMES)} are the operator's own",
            ".spec.volumes",
            lambda t: all(
                volume.get("name", OWN_VOLUMES[0]) not in OWN_VOLUMES
                for volume in items(t.spec, "volumes")
            ),
        ),
        Rule(
            "!has(self.spec.automountServiceAccountToken) || "
            "!self.spec.automountServiceAccountToken || has(self.spec.serviceAccountName)",
            "no pod of a run gets the token of the namespace's default service account: "
            "set serviceAccountName too, or leave automountServiceAccountToken out",
            ".spec.automountServiceAccountToken",
            lambda t: (
                not t.spec.get("automountServiceAccountToken") or "serviceAccountName" in t.spec
            ),
        ),
        Rule(
            "!has(self.spec.restartPolicy)",
            "restartPolicy is set by the operator and KubeRay: leave it out",
            ".spec.restartPolicy",
            lambda t: "restartPolicy" not in t.spec,
        ),
    )

    metadata: PodTemplateMetadata = PodTemplateMetadata()
    spec: PodSpecOverlay = {}
    """Fields of a pod spec. Mappings are merged, and so are lists with a merge key: containers,
    volumes and env by name, volumeMounts by mountPath, topologySpreadConstraints by topologyKey.
    Everything else replaces."""


_NO_TEMPLATE = PodTemplate()
"""One for all roles without a template: a new one is checked, field by field."""


Quantities = Annotated[dict[str, Quantity], Field(max_length=16)]


class Resources(Model):
    """Resources of the Ray container in Kubernetes' own form."""

    RULES = tuple(
        rule
        for part in ("requests", "limits")
        for rule in (possible_cpus(part, "cpu"), some_bytes(part, "memory"))
    )

    requests: Quantities = {}
    """As in a container spec."""
    limits: Quantities = {}
    """As in a container spec."""


REPORTER_RESOURCES = Resources(
    requests={"cpu": "20m", "memory": "128Mi", "ephemeral-storage": "64Mi"},
    limits={"cpu": "500m", "memory": "256Mi", "ephemeral-storage": "256Mi"},
)
"""Resources of the container that runs the reporter, unless the installation has others. They name
every kind of resource that a quota may demand from each container."""


def _one_form(cpus: str, memory: str) -> tuple[Rule, ...]:
    """Return the rules that a quantity is not given twice, in the short and in the long form.

    A short form that has its default counts as not given.
    """
    here = (
        "has(self.resources) && ((has(self.resources.requests) && {0} in self.resources.requests)"
    )
    here += " || (has(self.resources.limits) && {0} in self.resources.limits))"

    def conflict(resource: str, field: str, default: str) -> Rule:
        return Rule(
            f"!({here.format(repr(resource))}) || string(self.{field}) == '{default}'",
            f"{resource} is in resources: leave {field} out",
            f".{field}",
            lambda role: not role.gives(resource) or getattr(role, field) == default,
        )

    return (
        conflict("cpu", "cpus", cpus),
        conflict("memory", "memory", memory),
        Rule(
            f"!({here.format('self.gpuResourceName')})",
            "write GPUs as gpus and gpuResourceName, not in resources: the number of ranks and "
            "engines follows from gpus",
            ".resources",
            lambda role: not role.gives(role.gpu_resource_name),
        ),
    )


_AMOUNTS = (possible_cpus("cpus"), some_bytes("memory"), some_bytes("shm_size"))


class PodRole(Model):
    """Resources and scheduling of one role's pods."""

    RULES: ClassVar[tuple[Rule, ...]] = (*_one_form("1", "2Gi"), *_AMOUNTS)

    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Image of the role's pods. Default: spec.image."""
    resources: Resources | None = None
    """Resources in Kubernetes' own form, for what the short fields lack: ephemeral-storage, RDMA
    devices, a memory request below its limit. Each quantity in one of the two forms."""
    pod_template: PodTemplate | None = None
    cpus: Quantity = "1"
    """CPU request of a pod, and torch's threads, divided by its ranks or engines. There is no CPU
    limit, which would slow RL down. With `agenticrun run`, a trainer or embedded engine without
    `cpus` and `gpus` uses all cores."""
    memory: Quantity = "2Gi"
    """Memory request and limit of a pod."""
    gpus: Annotated[int, Field(ge=0, le=16)] = 0
    """GPUs of a pod, requested as `gpuResourceName`. A trainer pod runs one rank per GPU, an
    inference pod as many engines as its GPUs suffice for; without GPUs, each runs one."""
    gpu_resource_name: Annotated[str, Field(min_length=1, max_length=253)] = "nvidia.com/gpu"
    """Resource name of the GPUs, as the nodes' device plugin offers it."""
    node_selector: Annotated[
        dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=16)
    ] = {}
    """As in a pod spec."""
    tolerations: OpenList = []
    """As in a pod spec."""
    affinity: dict[str, Any] = {}
    """As in a pod spec."""
    priority_class_name: Name | None = None
    """As in a pod spec. Default: spec.priorityClassName."""
    runtime_class_name: Name | None = None
    """As in a pod spec."""
    termination_grace_period_seconds: Annotated[int, Field(ge=0, le=3600)] | None = None
    """As in a pod spec. Default: 30; for head, trainer, reference and critic pods of a run with
    checkpoints, the time to end a step and save: with `model.initialize` 60 and two seconds per 100
    MB, at most 1800; with `model.path` 600."""
    env: OpenList = []
    """Environment variables of the role's containers, as in a pod spec."""
    env_from: OpenList = []
    """As in a container spec."""
    volumes: OpenList = []
    """As in a pod spec."""
    volume_mounts: OpenList = []
    """As in a container spec."""
    shm_size: Quantity = "1Gi"
    """Size limit of /dev/shm, which holds Ray's objects and weights on their way to the engines:
    more than twice the model on trainer and inference pods. Counts against `memory`."""

    def gives(self, resource: str) -> bool:
        """Return True if `resources` requests or limits the resource."""
        given = self.resources
        return given is not None and (resource in given.requests or resource in given.limits)

    @property
    def given_grace_seconds(self) -> int | None:
        """Return the termination grace period that the user has set; None if there is none."""
        merged = self.overlay.spec.get("terminationGracePeriodSeconds")
        if isinstance(merged, int) and not isinstance(merged, bool):
            return merged
        return self.termination_grace_period_seconds

    @property
    def overlay(self) -> PodTemplate:
        """Return podTemplate; an empty one if it is not set."""
        return self.pod_template or _NO_TEMPLATE


NodeLabel = Annotated[str, Field(min_length=1, max_length=316)]


class Topology(Model):
    """Nodes close to each other, which Kueue gives the pods of a role (docs/queues.md)."""

    RULES = (
        Rule(
            "has(self.required) != has(self.preferred)",
            "set either required or preferred",
            "",
            lambda topology: (topology.required is None) != (topology.preferred is None),
        ),
    )

    required: NodeLabel | None = None
    """Node label of a level of Kueue's Topology, such as a rack's: all pods of the role get nodes
    with the same value, or the run waits."""
    preferred: NodeLabel | None = None
    """The same, but without room for all, the pods get nodes of several values."""


class WorkerRole(PodRole):
    """Settings of a role with a number of pods."""

    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Pods. For env and inference it may change while the run trains
    (docs/concepts.md)."""
    topology: Topology | None = None


SAVES = frozenset({Role.DRIVER, Role.TRAINER, Role.REFERENCE, Role.CRITIC})
"""The roles with pods that write checkpoints, and mount their claim."""


class ElasticRole(WorkerRole):
    """Settings of a role whose number of pods may change while the run trains."""

    RULES = (
        *WorkerRole.RULES,
        Rule(
            "!has(self.minReplicas) || self.minReplicas <= self.replicas",
            "minReplicas is larger than replicas: set at most replicas",
            ".minReplicas",
            lambda role: role.min_replicas is None or role.min_replicas <= role.replicas,
        ),
    )

    min_replicas: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Pods without which no attempt begins. Default: half of `replicas`, rounded up. The first
    attempt also waits failurePolicy.waitSeconds for all. With spec.queue, Kueue may admit the run
    with as few pods if this is set (docs/queues.md)."""


ELASTIC = (Role.INFERENCE, Role.ENV)
"""Roles with a number of replicas that may change."""


class DriverRole(PodRole):
    """The head pod: Ray's control plane, the driver and the reporter.

    terminationGracePeriodSeconds is also the time that the driver gets, after its step, to save a
    checkpoint when the run is suspended or activeDeadlineSeconds is over: more than a save takes.
    """

    RULES = (*_one_form("500m", "3Gi"), *_AMOUNTS)

    cpus: Quantity = "500m"
    """CPU request of the pod. There is no CPU limit."""
    memory: Quantity = "3Gi"
    """Memory request and limit of the pod."""


class Roles(Model):
    """The pods of a run. Actors run only on the pods of their role."""

    driver: DriverRole = DriverRole()
    trainer: WorkerRole = WorkerRole()
    """Pods of the trainer's ranks, and of reference policy and value model unless these have their
    own."""
    reference: WorkerRole | None = None
    """Separate pods for the reference policy. Default: it runs on the trainer's pods."""
    critic: WorkerRole | None = None
    """Separate pods for the value model. Default: it runs on the trainer's pods."""
    inference: ElasticRole | None = None
    """Pods of the engines. Disaggregated runs have them even if this is not set. Colocated engines
    run on the trainer's pods."""
    env: ElasticRole = ElasticRole()
    """Pods of the env workers, each of which plays many episodes at the same time."""

    def has(self, role: Role) -> bool:
        """Return True if the role has pods."""
        return getattr(self, role.value) is not None

    @property
    def workers(self) -> tuple[Role, ...]:
        """Roles that have pods, without the driver, in the order of `Role`."""
        return tuple(role for role in Role if role is not Role.DRIVER and self.has(role))

    def of(self, role: Role) -> PodRole:
        """Return the settings of a role that has pods."""
        found: PodRole | None = getattr(self, role.value)
        assert found is not None, f"no pods of role {role}"
        return found

    def replicas(self, role: Role) -> int:
        """Return the number of pods of a role. The driver has one."""
        settings = self.of(role)
        return settings.replicas if isinstance(settings, WorkerRole) else 1

    def topology(self, role: Role) -> Topology | None:
        """Return how close to each other a role asks Kueue to place its pods."""
        settings = self.of(role) if self.has(role) else None
        return settings.topology if isinstance(settings, WorkerRole) else None

    def min_replicas(self, role: Role) -> int:
        """Return the number of pods of a role without which no attempt begins."""
        settings, replicas = self.of(role), self.replicas(role)
        if not isinstance(settings, ElasticRole):
            return replicas
        return min(settings.min_replicas or (replicas + 1) // 2, replicas)

    def total_gpus(self, role: Role) -> int:
        """Return the number of GPUs of all pods of a role."""
        return self.replicas(role) * self.of(role).gpus

    @property
    def savers_have_topology(self) -> bool:
        """True if Kueue chooses nodes for pods that write checkpoints by a topology of theirs."""
        return any(map(self.topology, SAVES))

    @property
    def fewest_in_a_queue(self) -> dict[str, int]:
        """The number of pods with which a queue may admit the run if it has no quota for all.

        Kueue allows it for one role: the engines, which hold GPUs, come before the env pods. Only a
        number that the user has set counts, because the run keeps as few pods until it is admitted
        again.
        """
        for role, settings in ((Role.INFERENCE, self.inference), (Role.ENV, self.env)):
            if settings and settings.min_replicas and settings.min_replicas < settings.replicas:
                return {role.value: settings.min_replicas}
        return {}

    @property
    def elastic(self) -> dict[str, int]:
        """The replicas that may change, by role."""
        return {role.value: self.replicas(role) for role in ELASTIC if self.has(role)}

    def with_replicas(self, replicas: Mapping[str, int]) -> Roles:
        """Return the roles with other numbers of replicas."""
        changed = {
            name: getattr(self, name).model_copy(update={"replicas": number})
            for name, number in replicas.items()
        }
        return self.model_copy(update=changed)
