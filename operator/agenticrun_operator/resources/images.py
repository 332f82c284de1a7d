"""The choice of the worker image of a pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agenticrun_api import AgenticRun, Role
from agenticrun_api.roles import REPORTER_RESOURCES, Resources

EMBEDDED_ENGINE = "transformers"
"""The engine that every worker image has."""


@dataclass(frozen=True)
class WorkerImages:
    """The worker images of an installation, for runs without spec.image, and how they run."""

    worker: str
    with_engine: Mapping[str, str] = field(default_factory=dict)
    """Worker images with an inference server, by engine name. An empty value: not configured."""
    architectures: tuple[str, ...] = ("amd64",)
    """Architectures of these images, as nodes name theirs. Empty: of every node."""
    reporter: Resources = REPORTER_RESOURCES
    """Resources of the container that runs the reporter, from the worker image."""
    operator_namespace: str = ""
    """Namespace of the operator's pods, which NetworkPolicies of runs let in. Empty: runs get no
    NetworkPolicies."""

    def of(self, run: AgenticRun, role: Role) -> str:
        """Return the image for the pods of a role.

        It is chosen once: a run that has started keeps the images in its status, although another
        version of the operator has others. Only pods that run engines get the image with the
        engine, because it is some GB larger.
        """
        engine = run.spec.pipeline.actor_infer.strategy.name
        if chosen := run.spec.roles.of(role).image or run.spec.image or chosen_image(run, role):
            return chosen
        return (
            self.with_engine[engine]
            if role is run.spec.engine_role and engine != EMBEDDED_ENGINE
            else self.worker
        )

    def missing_engine(self, run: AgenticRun) -> str | None:
        """Return the name of the run's engine if no configured image contains it, else None."""
        engine = run.spec.pipeline.actor_infer.strategy.name
        return (
            None
            if run.spec.image
            or run.spec.roles.of(run.spec.engine_role).image
            or engine == EMBEDDED_ENGINE
            or self.with_engine.get(engine)
            or chosen_image(run, run.spec.engine_role)
            else engine
        )


def chosen_image(run: AgenticRun, role: Role) -> str | None:
    """Return the image in the run's status for the pods of a role.

    None until the first attempt: a wrong image can be corrected as long as no pod has run it.
    """
    if run.status.job is None:
        return None
    return next((item.image for item in run.status.roles if item.name == role.value), None)
