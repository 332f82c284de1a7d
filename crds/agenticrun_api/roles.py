"""`spec.roles`: resources and scheduling of each role's pods."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from agenticrun_api.base import Model, Name, Quantity
from agenticrun_api.names import Role

OpenList = Annotated[list[dict[str, Any]], Field(max_length=32)]


class PodRole(Model):
    """Resources and scheduling of one role's pods."""

    cpus: Quantity = "1"
    """CPU request of a pod. There is no CPU limit, because throttling slows RL down."""
    memory: Quantity = "2Gi"
    """Memory request and limit of a pod."""
    gpus: Annotated[int, Field(ge=0, le=16)] = 0
    """Number of GPUs of a pod, requested as `gpuResourceName`. A trainer pod runs one rank per GPU,
    an inference pod as many engines as its GPUs suffice for; without GPUs, each runs one."""
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
    """As in a pod spec."""
    runtime_class_name: Name | None = None
    """As in a pod spec."""
    termination_grace_period_seconds: Annotated[int, Field(ge=0, le=3600)] = 30
    """As in a pod spec."""
    env: OpenList = []
    """Environment variables of the role's containers, as in a pod spec."""
    env_from: OpenList = []
    """As in a container spec."""
    volumes: OpenList = []
    """As in a pod spec."""
    volume_mounts: OpenList = []
    """As in a container spec."""
    shm_size: Quantity = "1Gi"
    """Size limit of /dev/shm, which holds Ray's objects and the weights in transfer to the engines.
    On trainer and inference pods, set more than twice the size of the model. Counts against
    `memory`."""


class WorkerRole(PodRole):
    """Settings of a role with a number of pods."""

    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of pods."""


class DriverRole(PodRole):
    """The head pod: Ray's control plane, the driver and the reporter."""

    cpus: Quantity = "500m"
    """CPU request of the pod. There is no CPU limit."""
    memory: Quantity = "3Gi"
    """Memory request and limit of the pod."""


class Roles(Model):
    """The pods of a run. Actors run only on the pods of their role."""

    driver: DriverRole = DriverRole()
    trainer: WorkerRole = WorkerRole()
    reference: WorkerRole | None = None
    """Separate pods for the reference policy. Default: it runs on the trainer's pods."""
    critic: WorkerRole | None = None
    """Separate pods for the value model. Default: it runs on the trainer's pods."""
    inference: WorkerRole | None = None
    """Pods of the engines. Disaggregated runs have them even if this is not set. Colocated engines
    run on the trainer's pods."""
    env: WorkerRole = WorkerRole()

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
