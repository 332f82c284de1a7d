"""EnvSupply: the environments of one env worker, made where they are needed and used again."""

from __future__ import annotations

from collections import defaultdict

from agenticrun_api import Pipeline
from agenticrun_api.environments import EnvSpec
from agenticrun_workers.envs import Env, make_env
from agenticrun_workers.envs.isolated import IsolatedEnv, Isolation

STEP_TIMEOUT_SECONDS = 60.0
"""Default of `envs[].stepTimeoutSeconds`, in runs that are not deterministic."""

BUILD_TIMEOUT_SECONDS = 300.0
"""An isolated environment may read its data first."""


def step_timeout(pipeline: Pipeline, spec: EnvSpec) -> float | None:
    """Seconds that a reset or step of this environment may take; None: any."""
    return spec.step_timeout_seconds or (None if pipeline.deterministic else STEP_TIMEOUT_SECONDS)


class EnvSupply:
    """Take an environment for an episode, and give it back."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._idle: dict[str, list[Env]] = defaultdict(list)
        timeout = None if pipeline.deterministic else BUILD_TIMEOUT_SECONDS
        self._isolations = {
            spec.tag: Isolation(spec.type, spec.config, timeout)
            for spec in pipeline.envs
            if spec.isolated
        }

    async def take(self, tag: str) -> Env:
        """One that plays no other episode. Raises what building it raises; `EnvFault` if it is isolated."""
        if self._idle[tag]:
            return self._idle[tag].pop()
        if tag in self._isolations:
            return await self._isolations[tag].start()
        spec = self._pipeline.env(tag)
        return make_env(spec.type, spec.config)

    def give_back(self, tag: str, env: Env) -> None:
        """After an episode in which nothing went wrong."""
        if getattr(env, "reusable", True) and not (isinstance(env, IsolatedEnv) and env.worn_out):
            self._idle[tag].append(env)
        else:
            self.give_up(env)

    def give_up(self, env: Env) -> None:
        """Nobody knows which state it is in."""
        if isinstance(env, IsolatedEnv):
            env.end()
