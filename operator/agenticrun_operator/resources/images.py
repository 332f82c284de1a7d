"""Which image a pod of a run gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agenticrun_api import AgenticRun, Role

EMBEDDED_ENGINE = "transformers"
"""The engine that every worker image has."""


@dataclass(frozen=True)
class WorkerImages:
    """What an installation has for runs that name no image of their own."""

    worker: str
    with_engine: Mapping[str, str] = field(default_factory=dict)
    """The worker image with a server of its own in it, by the engine's name. Empty: not configured."""

    def of(self, run: AgenticRun, role: Role) -> str:
        """Only the pods that carry engines get the image with the engine, which is some GB larger."""
        engine = run.spec.pipeline.actor_infer.strategy.name
        if run.spec.image:
            return run.spec.image
        return (
            self.with_engine[engine]
            if role is run.spec.engine_role and engine != EMBEDDED_ENGINE
            else self.worker
        )

    def missing_engine(self, run: AgenticRun) -> str | None:
        """The engine of the run, where no image has it."""
        engine = run.spec.pipeline.actor_infer.strategy.name
        return (
            None
            if run.spec.image or engine == EMBEDDED_ENGINE or self.with_engine.get(engine)
            else engine
        )
