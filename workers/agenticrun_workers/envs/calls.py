"""How environments are called: sync or async, in any of the shapes that users write, and whatever they do wrong is one `EnvFault`.

Async methods run on the event loop, in a task of their own. Sync ones run in a thread, so that one that blocks or hangs costs its own
episode only, unless the environment says `blocking = False` (steps of microseconds).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from agenticrun_workers.envs.answers import Start, checked_actions, checked_start, checked_step
from agenticrun_workers.envs.env import Env, StepResult, TakesItem
from agenticrun_workers.envs.faults import EnvFault, raised
from agenticrun_workers.envs.threads import Outcome, apart, attempt, hanging, in_thread
from agenticrun_workers.types import StopReason, Stream

__all__ = ["EnvCalls", "EnvFault", "Start"]

MAX_BLOCKING_CALLS = 64
"""Sync environments of one `EnvCalls` that can be inside `reset` or `step` at once. Others wait, and their timeout does not run."""

MAX_HANGING = 1024
"""Threads of a process that may hang for ever before sync environments are refused: each keeps some memory."""


class EnvCalls:
    """Calls environments of one run, many at once.

    Args:
        timeout: seconds that one `reset` or `step` may take (None: any).
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = timeout
        self._room = asyncio.Semaphore(MAX_BLOCKING_CALLS)

    async def reset(
        self, env: Env, seed: int, split: Stream, item: Mapping[str, Any] | None = None
    ) -> Start:
        """Begin an episode, about `item` if there is one. Raises `EnvFault`."""
        if item is not None:
            await self._call(env, cast(TakesItem, env).set_item, item)
        places, names = reset_arguments(env, seed, split)
        answer = await self._call(env, env.reset, *places, **names)
        return checked_start(answer, getattr(env, "instruction", ""))

    async def step(self, env: Env, action: str) -> StepResult:
        """Play an answer's text. Raises `EnvFault`."""
        return checked_step(await self._call(env, env.step, action))

    async def valid_actions(self, env: Env) -> list[str]:
        """The answers that are valid now; none: they cannot be listed. Raises `EnvFault`."""
        return checked_actions(await self._call(env, env.valid_actions))

    async def _call(self, env: Env, call: Callable[..., Any], *places: Any, **names: Any) -> Any:
        calling = partial(attempt, call, *places, **names)
        if inspect.iscoroutinefunction(call) or not getattr(env, "blocking", True):
            return await self._in_time(call, calling, threaded=False)
        async with self._room:
            if hanging() >= MAX_HANGING:
                raise EnvFault(
                    StopReason.TIMEOUT,
                    f"{MAX_HANGING} earlier calls hang for ever: set isolated: true",
                )
            return await self._in_time(call, calling, threaded=True)

    async def _in_time(
        self, call: Callable[..., Any], calling: Callable[[], Outcome], *, threaded: bool
    ) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                outcome = await in_thread(calling) if threaded else calling()
                if inspect.isawaitable(outcome.value):
                    outcome = await apart(outcome.value)
        except TimeoutError:
            raise EnvFault(
                StopReason.TIMEOUT, f"{call.__qualname__} took more than {self._timeout} s"
            ) from None
        if outcome.error is not None:
            raise raised(outcome.error, call)
        return outcome.value


def reset_arguments(env: Env, seed: int, split: Stream) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `reset` is called with, by place and by name.

    Seed and split, or only the seed where no second argument must be given or is called `split`. As in gymnasium, the seed may be
    an argument by name only.
    """
    try:
        parameters = list(inspect.signature(env.reset).parameters.values())
    except (TypeError, ValueError):  # compiled code need not have one
        return (seed, split), {}
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return (seed, split), {}
    if not places:
        named = {"seed": seed, "split": split}
        return (), {p.name: named[p.name] for p in parameters if p.name in named}
    takes_split = any(p.name == "split" or p.default is p.empty for p in places[1:2])
    return ((seed, split) if takes_split else (seed,)), {}
