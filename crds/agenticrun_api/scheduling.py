"""`spec.scheduling`: the scheduler that places the pods of a run."""

from __future__ import annotations

from agenticrun_api.base import Model, Name


class Scheduling(Model):
    """The scheduler of the run's pods, and if it places them together."""

    gang: bool = False
    """true: a batch scheduler places all pods of the run together, or none. KubeRay must be
    installed with one (its Helm value `batchScheduler.name`: volcano, yunikorn or
    scheduler-plugins). The RayCluster gets the labels that it reads for this:
    `ray.io/gang-scheduling-enabled`, and `ray.io/priority-class-name` with
    spec.priorityClassName."""
    scheduler_name: Name | None = None
    """As in a pod spec, for the pods of all roles. KubeRay sets it to that of its batch scheduler,
    if it has one."""
