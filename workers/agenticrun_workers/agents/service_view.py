"""The environment as an agent with queues sees it: `reset` and `step` are awaited, and what it measures is collected."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar, cast

from agenticrun_workers.agents.agent import Episode
from agenticrun_workers.agents.episode_metrics import EpisodeMetrics
from agenticrun_workers.envs import Env, EnvFault
from agenticrun_workers.envs.service import EnvironmentService, ServiceCalls, ServiceStep
from agenticrun_workers.types import StopReason

T = TypeVar("T")


class ServiceView(EnvironmentService):
    """One episode's environment. It has begun before the agent does, so the agent's first `reset` changes nothing."""

    def __init__(self, episode: Episode, calls: ServiceCalls) -> None:
        self.metrics = EpisodeMetrics()
        self.fault: EnvFault | None = None
        """What the environment did wrong, also if the agent caught it."""
        self.calls = 0
        """Calls under way."""
        self.active = time.monotonic()
        """When the last call ended."""
        self._episode = episode
        self._env_calls = calls
        self._first: str | None = None

    async def begin(self) -> tuple[str, str]:
        """Instruction and first user message. Raises `EnvFault`."""
        instruction, first = await self._counted(self._begin())
        self._first = first
        return instruction, first

    async def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> str:
        """Begin the episode again, unless it has only begun. Its level is the run's business: other seeds and options are refused."""
        if seed not in (None, self._episode.env_seed) or options:
            raise EnvFault(
                StopReason.ENV_ERROR,
                "the agent: seed and options are the run's, so call env.reset() without them",
            )
        if self._first is None:
            _, first = await self._counted(self._begin())
            return first
        first, self._first = self._first, None
        return first

    async def step(self, action: Any) -> ServiceStep:
        """Play an action. Raises `EnvFault`."""
        self._first = None
        return await self._counted(self._step(action))

    async def _counted(self, call: Awaitable[T]) -> T:
        self.calls += 1
        try:
            return await call
        except EnvFault as fault:
            self.fault = fault
            raise
        finally:
            self.calls -= 1
            self.active = time.monotonic()

    @abstractmethod
    async def _begin(self) -> tuple[str, str]: ...

    @abstractmethod
    async def _step(self, action: Any) -> ServiceStep: ...


class _OfService(ServiceView):
    def __init__(self, service: EnvironmentService, episode: Episode, calls: ServiceCalls) -> None:
        super().__init__(episode, calls)
        self._service = service

    async def _begin(self) -> tuple[str, str]:
        episode = self._episode
        text = await self._env_calls.begin(
            self._service, episode.env_seed, episode.key.stream, episode.item
        )
        return self._service.instruction, text

    async def _step(self, action: Any) -> ServiceStep:
        return await self._env_calls.act(self._service, action)


class _OfEnv(ServiceView):
    """An environment of texts, as a service: `step(text)`."""

    def __init__(self, env: Env, episode: Episode, calls: ServiceCalls) -> None:
        super().__init__(episode, calls)
        self._env = env

    async def _begin(self) -> tuple[str, str]:
        episode = self._episode
        start = await self._env_calls.reset(
            self._env, episode.env_seed, episode.key.stream, episode.item
        )
        return start.instruction, start.observation

    async def _step(self, action: Any) -> ServiceStep:
        result = await self._env_calls.step(self._env, action)
        self.metrics.add_step(result)
        return (
            result.observation,
            result.reward,
            result.terminated,
            result.truncated,
            {"metrics": result.metrics, **result.info},
        )


def view_of(env: Env | EnvironmentService, episode: Episode, calls: ServiceCalls) -> ServiceView:
    """What the agent of this episode gets."""
    if getattr(env, "is_service", False):
        return _OfService(cast(EnvironmentService, env), episode, calls)
    return _OfEnv(cast(Env, env), episode, calls)
