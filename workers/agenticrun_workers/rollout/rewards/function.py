"""A user's function of one episode as a judge."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agenticrun_workers.rollout.rewards.judge import JudgedEpisode, JudgeFailed, Judgement

MAX_THREADS = 8


class FunctionJudge:
    """`function(episode, **arguments) -> float`, sync or async.

    An async function scores the episodes of a call side by side. A sync one runs in a thread, one episode after the other.
    Raises `TypeError` if the function does not take these arguments.
    """

    episodes_per_call: int | None = None
    calls_at_once = MAX_THREADS

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        inspect.signature(function).bind(None, **arguments)
        self._function = function
        self._arguments = dict(arguments)
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="judge")

    async def judge(self, episodes: list[JudgedEpisode]) -> list[Judgement]:
        """See `Judge`. What the function raises fails its own episode only."""
        if inspect.iscoroutinefunction(self._function):
            return list(await asyncio.gather(*map(self._await_one, episodes)))
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: list(map(self._call_one, episodes))
        )

    async def _await_one(self, episode: JudgedEpisode) -> Judgement:
        try:
            return float(await self._function(episode, **self._arguments))
        except Exception as error:  # a user's function may raise anything
            return _failure(error)

    def _call_one(self, episode: JudgedEpisode) -> Judgement:
        try:
            return float(self._function(episode, **self._arguments))
        except Exception as error:  # a user's function may raise anything
            return _failure(error)


def _failure(error: Exception) -> JudgeFailed:
    return JudgeFailed(f"{type(error).__name__}: {error}")
