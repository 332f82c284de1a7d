"""RolloutBackend that need no Ray: episodes end as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from agenticrun_workers.inference.request_port import Address, RequestPort
from agenticrun_workers.launch import ActorDied, ActorHandle, Result
from agenticrun_workers.launch.handle import Invocation
from agenticrun_workers.rollout.groups import EpisodeResult, EpisodeTask, VersionBounds
from agenticrun_workers.types import (
    STATE_BYTES,
    EpisodeKey,
    FinishReason,
    Generation,
    GenerationRequest,
    IntArray,
    StopReason,
    Stream,
)

Fate = Callable[[EpisodeTask], StopReason]


def result(
    group: int,
    member: int = 0,
    *,
    stop: StopReason = StopReason.COMPLETED,
    score: float = 0.0,
    version: int = 0,
    tokens: int = 20,
    tag: str = "A",
    attempt: int = 0,
) -> EpisodeResult:
    """An episode of two turns whose score comes with the last one."""
    return EpisodeResult(
        key=EpisodeKey(Stream.TRAIN, group, member),
        tag=tag,
        attempt=attempt,
        stop_reason=stop,
        rewards_K=np.array([0.0, score], np.float32),
        valid_K=np.ones(2, np.bool_),
        response_tokens_K=np.array([tokens // 4 - tokens // 8, tokens // 8], np.int32),
        states_K=bytes(2 * STATE_BYTES),
        tokens=tokens,
        oldest_version=version,
        metrics={"success": score, "num_actions": 2.0, "action_is_valid": 2.0},
        store=0,
    )


@dataclass(eq=False)
class _Playing:
    """A task that a `FakeBackend` plays."""

    task: EpisodeTask
    version: int
    stopped: StopReason | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self, reason: StopReason) -> None:
        self.stopped = self.stopped or reason
        self.wake.set()


class FakeBackend:
    """Plays at once, or when `release` says so for groups in `held`.

    Members finish in the order of their numbers, with `scores(task)`. Those that are
    stopped have half of their tokens: aborted ones, and held ones that grow too old.
    """

    def __init__(
        self,
        fate: Fate = lambda task: StopReason.COMPLETED,
        scores: Callable[[EpisodeTask], float] = lambda task: 0.0,
    ) -> None:
        self.fate = fate
        self.scores = scores
        self.tokens = 20
        self.version = 0
        self.tasks: list[EpisodeTask] = []
        self.held: dict[int, asyncio.Event] = {}
        self.bounds = VersionBounds()
        self._playing: set[_Playing] = set()

    def set_bounds(self, bounds: VersionBounds) -> None:
        self.bounds = bounds
        for playing in self._playing:
            if playing.task.key.group in self.held and playing.version < bounds.oldest:
                playing.stop(StopReason.STALE)

    def abort(self, group: int) -> None:
        for playing in self._playing:
            if playing.task.key.group == group:
                playing.stop(StopReason.ABORTED)

    def hold(self, *groups: int) -> None:
        self.held = {group: asyncio.Event() for group in groups}

    async def run(self, task: EpisodeTask) -> EpisodeResult:
        self.tasks.append(task)
        playing = _Playing(task, self.version)
        self._playing.add(playing)
        try:
            if task.key.stream is Stream.TRAIN and task.key.group in self.held:
                await self._released(task.key.group, playing.wake)
            await _ticks(1 + TICKS_BETWEEN_MEMBERS * task.key.member)
        finally:
            self._playing.discard(playing)
        stop = playing.stopped
        return result(
            task.key.group,
            task.key.member,
            stop=stop or self.fate(task),
            score=self.scores(task),
            version=playing.version,
            tokens=self.tokens // 2 if stop else self.tokens,
            tag=task.tag,
            attempt=task.attempt,
        )

    async def _released(self, group: int, stop: asyncio.Event) -> None:
        """Wait until a held group is released or stopped."""
        either = {asyncio.ensure_future(event.wait()) for event in (self.held[group], stop)}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in either:
                waiting.cancel()


TICKS_BETWEEN_MEMBERS = 5
"""Ticks of the event loop in which a group can stop the other members."""


async def _ticks(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


class Pending(Result[Any]):
    """The result of a call in this event loop."""

    def __init__(self, outcome: asyncio.Future[Any]) -> None:
        self._outcome = outcome

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self._outcome).__await__()

    def wait(self) -> Any:
        raise AssertionError("it would block its own event loop")


def _fail(outcome: asyncio.Future[Any], error: BaseException) -> None:
    outcome.set_exception(error)
    outcome.exception()  # or asyncio warns, if nothing awaits it


class Remote(ActorHandle[Any]):
    """An object whose async methods are called like those of an actor, in this event loop."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._outcomes: set[asyncio.Future[Any]] = set()
        self.killed = False

    def kill(self) -> None:
        self.killed = True
        while self._outcomes:
            _fail(self._outcomes.pop(), ActorDied("it was killed"))

    def _call(self, call: Invocation) -> Result[Any]:
        outcome = asyncio.get_running_loop().create_future()
        if self.killed:
            outcome.set_exception(ActorDied("it was killed"))
            return Pending(outcome)
        self._outcomes.add(outcome)
        method = getattr(self._target, call.method)
        task = asyncio.ensure_future(method(*call.arguments, **call.options))
        task.add_done_callback(lambda done: self._pass_on(done, outcome))
        return Pending(outcome)

    def _pass_on(self, task: asyncio.Task[Any], outcome: asyncio.Future[Any]) -> None:
        if outcome not in self._outcomes:
            return  # it was killed
        self._outcomes.remove(outcome)
        if task.cancelled():
            outcome.cancel()
        elif (error := task.exception()) is not None:
            _fail(outcome, error)
        else:
            outcome.set_result(task.result())

    def _call_pair(self, call: Invocation) -> tuple[Result[Any], Result[Any]]:
        raise NotImplementedError

    def _stream(self, call: Invocation) -> AsyncIterator[Any]:
        raise NotImplementedError


class Mute:
    """Answers no call, like an actor whose process is stopped."""

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def silent(*_: Any) -> None:
            await asyncio.Event().wait()

        return silent


class FakeEngine:
    """Answer every request with one text, except those in `ignores`, and record the requests."""

    def __init__(
        self,
        answer_T: IntArray,
        ignores: Callable[[GenerationRequest], bool] = lambda request: False,
    ) -> None:
        self.answer_T = answer_T
        self.ignores = ignores
        self.requests: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.version = 0
        self.sampled: list[int] = []
        """Tokens sampled so far for each request in `ignores`."""
        self._ignored: dict[str, asyncio.Event] = {}
        self._port = RequestPort(self._generate, self._abort, progress=self._progress)

    async def requests_address(self) -> Address:
        return await self._port.address()

    async def close(self) -> None:
        await self._port.close()

    async def _generate(self, request: GenerationRequest) -> Generation:
        request = replace(request, request_id=_own_id(request.request_id))
        self.requests.append(request)
        if self.ignores(request):
            self._ignored[request.request_id] = asyncio.Event()
            await self._ignored[request.request_id].wait()
        return self._generation(self.answer_T)

    def answer(self, request_id: str) -> None:
        """Answer a request that was ignored."""
        self._ignored[request_id].set()

    def _progress(self, request_id: str, start: int) -> Generation | None:
        in_flight = _own_id(request_id) in self._ignored
        return self._generation(self.sampled[start:]) if in_flight else None

    def _generation(self, tokens: Sequence[int] | IntArray) -> Generation:
        return Generation(
            np.array(tokens, np.int32),
            np.full(len(tokens), -1.0 - self.version, np.float32),
            np.full(len(tokens), self.version, np.int32),
            FinishReason.STOP,
        )

    async def _abort(self, request_ids: list[str]) -> None:
        own = [_own_id(request_id) for request_id in request_ids]
        self.aborted += own
        for request_id in self._ignored.keys() & own:  # others have not begun, or are answered
            self._ignored[request_id].set()


def _own_id(request_id: str) -> str:
    """A request's id as its client knows it."""
    return request_id.rpartition("/")[2]
