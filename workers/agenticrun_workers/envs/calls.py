"""How environments are called: sync or async, in any of the shapes that users write, and whatever they do wrong is one `EnvFault`.

Async methods run on the event loop. Sync ones run in a thread, so that one that blocks or hangs costs its own episode only, unless
the environment says `blocking = False` (steps of microseconds).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from agenticrun_workers.envs.env import Env, StepResult, TakesItem
from agenticrun_workers.types import StopReason, Stream

MAX_BLOCKING_CALLS = 64
"""Sync environments that can be inside `reset` or `step` at once."""


class EnvFault(Exception):
    """An environment raised, hung, or returned something that is no step. It costs the episode; `reason` is env_error or timeout."""

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Start:
    """How an episode begins."""

    observation: str
    instruction: str
    """What the task is: the environment's, or this episode's own."""
    info: Mapping[str, Any] = field(default_factory=dict)


class EnvCalls:
    """Calls environments of one run, many at once.

    Args:
        timeout: seconds that one `reset` or `step` may take (None: any).
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(MAX_BLOCKING_CALLS, thread_name_prefix="env")

    async def reset(self, env: Env, seed: int, split: Stream, item: Mapping[str, Any] | None = None) -> Start:
        """Begin an episode, about `item` if there is one. Raises `EnvFault`."""
        if item is not None:
            await self._call(env, cast(TakesItem, env).set_item, item)
        answer = await self._call(env, env.reset, *((seed, split) if _takes_split(env) else (seed,)))
        observation, info = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
        if not isinstance(observation, str):
            raise EnvFault(StopReason.ENV_ERROR, f"reset returned {type(observation).__name__}, not text")
        instruction = info.get("env_instruction", getattr(env, "instruction", ""))
        return Start(observation, instruction, info)

    async def step(self, env: Env, action: str) -> StepResult:
        """Play an answer's text. Raises `EnvFault`."""
        return _checked(await self._call(env, env.step, action))

    async def _call(self, env: Env, call: Any, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                if inspect.iscoroutinefunction(call):
                    return await call(*arguments)
                if getattr(env, "blocking", True):
                    return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)
                return call(*arguments)
        except TimeoutError:
            raise EnvFault(StopReason.TIMEOUT, f"{call.__qualname__} took more than {self._timeout} s") from None
        except Exception as error:  # an environment is a user's code and may raise anything
            raise EnvFault(StopReason.ENV_ERROR, f"{type(error).__name__}: {error}") from error


def _takes_split(env: Env) -> bool:
    parameters = inspect.signature(env.reset).parameters.values()
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) > 1 or any(
        p.kind is p.VAR_POSITIONAL for p in parameters
    )


def _checked(result: object) -> StepResult:
    if isinstance(result, tuple) and len(result) == 5:
        observation, reward, terminated, truncated, info = result
        result = StepResult(
            observation, reward, bool(terminated), bool(truncated), info.get("metrics", {}), info.get("metrics_agg_mode", {}), info
        )
    if not isinstance(result, StepResult):
        raise EnvFault(StopReason.ENV_ERROR, f"step returned {type(result).__name__}, neither a StepResult nor a tuple of five")
    if not isinstance(result.observation, str):
        raise EnvFault(StopReason.ENV_ERROR, f"step returned an observation of {type(result.observation).__name__}, not text")
    if not np.isfinite(result.reward):
        raise EnvFault(StopReason.ENV_ERROR, f"step returned the reward {result.reward}")
    return result
