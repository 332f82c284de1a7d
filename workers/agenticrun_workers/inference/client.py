"""GenerationClient: sends the requests of many episodes to the engines and returns the responses.

Requests of one tick of the event loop travel in one message (`request_port`). A new session goes to
that of two random engines which will sooner have sampled what it has to, by the speed at which it
does. It stays there, because the engine caches its prefix, until the engine is full and another one
would be sooner, the prefix included. When an engine dies or cannot be reached, its requests go to
another engine or wait for its replacement. They also leave an engine that is far slower than
another one (`FAR`), which would hold up the step. An engine sends the tokens of long responses from
time to time (`Progress`): another one goes on from these. Each token keeps its log-prob and its
policy version, as it does when new weights come in the middle of a response.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from agenticrun_workers.inference.engine import (
    ABORTED_UNSAMPLED,
    PROMPT_TOKENS_PER_SAMPLED,
)
from agenticrun_workers.inference.request_port import (
    Abort,
    Address,
    Answer,
    EngineLoad,
    Frames,
    Progress,
    Speed,
    connect,
)
from agenticrun_workers.launch import ActorDied, ActorHandle, ActorUnavailable
from agenticrun_workers.types import Generation, GenerationRequest

log = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.5
ADDRESS_SECONDS = 5.0
"""Longest wait for an engine's address. The call gets no answer while the network is lost."""
FAR = 8.0
"""How many times as long an engine may take as another one. Pools may have engines of different
hardware: two or three times as fast is nothing to react to."""
LONG_SECONDS = 10.0
"""A response that its engine ends in less time stays."""
MAX_MOVES = 2
"""How often a response may leave an engine that lives: each time its prompt is computed again."""
LOOK_SECONDS = 1.0
"""Shortest time between two looks at the requests of an engine."""
TRY_SECONDS = 60.0
"""Time after which an idle engine that was far slower gets one new session: it may be well again.
"""
TRIED_SECONDS = 20.0
"""Time for that session before it may leave. Until then the speed is measured."""
MAX_LOST_ENGINES = 3
"""Engines that may die of a request. Otherwise one that crashes them would end all of them."""


UNKNOWN_SPEED = Speed(1.0, 1.0)
"""Of all engines, before that of any is known."""


class RequestRefused(Exception):
    """An engine refused or failed this request. The message is the engine's."""


class RequestServer(Protocol):
    """The part of an `EngineActor` that clients call."""

    async def requests_address(self) -> Address: ...


@dataclass(slots=True, eq=False)
class _Waiting:
    request: GenerationRequest
    """As the caller made it."""
    done: asyncio.Future[Generation]
    lost_engines: int = 0
    """Number of engines that died after the request was sent to them."""
    begun: Generation = ABORTED_UNSAMPLED
    """Tokens that lost engines sampled."""
    progress: Generation = ABORTED_UNSAMPLED
    """Tokens that the engine has sampled so far."""
    moves: int = 0
    """Number of engines that it has left although they live."""

    @property
    def request_id(self) -> str:
        """Its id at the engine. An engine that it has left still answers to the earlier one."""
        own = self.request.request_id
        return f"{own}~{self.moves}" if self.moves else own

    @property
    def left(self) -> int:
        """The number of tokens that it may still get."""
        sampled = len(self.begun.tokens_T) + len(self.progress.tokens_T)
        return self.request.sampling.max_new_tokens - sampled

    def for_an_engine(self) -> GenerationRequest:
        """Return the request for the next engine: it goes on from the tokens that have come."""
        self.begun, self.progress = joined(self.begun, self.progress), ABORTED_UNSAMPLED
        sampled = len(self.begun.tokens_T)
        request, sampling = self.request, self.request.sampling
        if not sampled:
            return replace(request, request_id=self.request_id) if self.moves else request
        return replace(
            request,
            request_id=self.request_id,
            prompt_tokens=np.concatenate([request.prompt_tokens, self.begun.tokens_T]),
            sampling=replace(sampling, max_new_tokens=sampling.max_new_tokens - sampled),
            sampled=request.sampled + sampled,
        )

    def take(self, progress: Progress) -> None:
        """Keep tokens of the engine that samples, unless they are of an earlier try."""
        if progress.start == len(self.progress.tokens_T):
            self.progress = joined(self.progress, progress.sampled)


def joined(first: Generation, then: Generation) -> Generation:
    """Return one response of two parts."""
    if not len(first.tokens_T):
        return then
    return replace(
        then,
        tokens_T=np.concatenate([first.tokens_T, then.tokens_T]),
        logprobs_T=np.concatenate([first.logprobs_T, then.logprobs_T]),
        versions_T=np.concatenate([first.versions_T, then.versions_T]),
    )


class _EngineLink:
    """An engine and this client's connection to it."""

    def __init__(self, engine_id: str, handle: ActorHandle[RequestServer]) -> None:
        self.engine_id = engine_id
        self.handle = handle
        self.in_flight: dict[str, _Waiting] = {}
        self.outgoing: list[GenerationRequest] = []
        self.load = EngineLoad()
        """As the engine told last, with what was sent to it since then."""
        self.frames: Frames | None = None
        """The connection, if there is one. Without it requests wait in `in_flight`."""
        self.reachable = True
        """False from a connection that breaks or fails to one that succeeds."""
        self.interrupted: list[_Waiting] = []
        """Requests that were sent on the connection that broke last, until there is another."""
        self.listener: asyncio.Task[None] | None = None
        self.looked = self.tried = -math.inf
        """When its requests were looked at last, and when they left it, or it was tried again."""

    def tokens_per_second(self, requests: int) -> float | None:
        """Return what each of so many further requests would get; None: not known."""
        load = self.load
        if load.speed is None:
            return None
        return load.speed.with_requests(load.requests + requests, load.seats)

    def take(self, waiting: _Waiting) -> None:
        """Put a request into the next message to the engine."""
        request = waiting.for_an_engine()
        self.in_flight[request.request_id] = waiting
        self.outgoing.append(request)
        self.load = self.load.begun(self.load.expected(request))


class GenerationClient:
    """Generates responses for the agents of one env worker.

    Args:
        name: unique among the clients of a run.
        seed: of the choice between engines.
        keep: called with each task that listens to an engine. The caller watches the task: if it
            fails, its requests would wait forever. The death of an engine is not a failure.
    """

    def __init__(
        self, name: str, seed: int = 0, keep: Callable[[asyncio.Task[None]], None] = lambda _: None
    ) -> None:
        self._name = name
        self._keep = keep
        self._random = random.Random(seed)
        self._links: dict[str, _EngineLink] = {}
        self._sessions: dict[str, str] = {}
        self._unsent: list[_Waiting] = []
        self._flush_planned = False
        self._usual_speed = UNKNOWN_SPEED
        self._uneven = False
        """Some engine is far slower than another one, if both sampled alone."""

    def set_engines(
        self,
        engines: Mapping[str, ActorHandle[RequestServer]],
        retired: Collection[str] = (),
    ) -> None:
        """Use exactly these engine actors, by id, from now on. Requests of others move to them.

        Args:
            engines: the engines.
            retired: engines that have left alive. The others that are gone have died.
        """
        for engine_id in set(self._links) - set(engines):
            self._drop(self._links[engine_id], died=engine_id not in retired)
        for engine_id, handle in engines.items():
            if engine_id not in self._links:
                link = self._links[engine_id] = _EngineLink(engine_id, handle)
                link.listener = asyncio.create_task(self._listen(link), name=f"listen-{engine_id}")
                self._keep(link.listener)
        self._plan_flush()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one response. Cancel the call to stop the sampling.

        Raises:
            RequestRefused: the engine refused the request, or several engines died of it.
        """
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._unsent.append(waiting)
        self._plan_flush()
        try:
            return await waiting.done
        except asyncio.CancelledError:
            self._abort(waiting)
            raise

    def end_session(self, session: str) -> None:
        """Forget which engine holds the prefix of a finished trajectory."""
        self._sessions.pop(session, None)

    def _abort(self, waiting: _Waiting) -> None:
        if waiting in self._unsent:
            self._unsent.remove(waiting)
        for link in self._links.values():
            if link.in_flight.get(waiting.request_id) is waiting:
                del link.in_flight[waiting.request_id]
                if link.frames is not None:
                    link.frames.write(Abort([waiting.request_id]))

    def _plan_flush(self) -> None:
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        if not self._links:
            return  # set_engines flushes again
        unsent, self._unsent = self._unsent, []
        for waiting in unsent:
            self._choose(waiting.request).take(waiting)
        for link in self._links.values():
            requests, link.outgoing = link.outgoing, []
            if requests and link.frames is not None:
                link.frames.write(requests)

    def _choose(self, request: GenerationRequest) -> _EngineLink:
        """Return the engine that holds the prefix, unless another one is worth the loss of it."""
        links = [link for link in self._links.values() if link.reachable]
        links = links or list(self._links.values())
        held = self._links.get(self._sessions.get(request.session, ""))
        if held is not None and held not in links:
            held = None
        if self._uneven:
            links = self._not_far_slower(links, new=held is None)
            if held is not None and held.load.speed is not None and held not in links:
                left = request.sampling.max_new_tokens
                speed = held.load.speed.request
                if self._far_sooner(links, left, len(request.prompt_tokens), speed) is not None:
                    held = None
        if held is not None and not held.load.full:
            return held
        candidates = self._random.sample(links, k=min(2, len(links)))
        tokens = min(link.load.expected(request) for link in candidates)
        link = min(candidates, key=lambda candidate: self._seconds(candidate, tokens))
        if held is not None:
            prefix = len(request.prompt_tokens) / PROMPT_TOKENS_PER_SAMPLED
            if self._seconds(held, tokens) <= self._seconds(link, tokens + prefix):
                return held
        self._sessions[request.session] = link.engine_id
        return link

    def _seconds(self, link: _EngineLink, tokens: float) -> float:
        """Return a measure of when an engine will have sampled what it has to, and so many more."""
        speed = link.load.speed or self._usual_speed
        return (link.load.tokens + tokens) / speed.request

    def _not_far_slower(self, links: list[_EngineLink], *, new: bool) -> list[_EngineLink]:
        """Leave out engines that would be far slower than another one with one request more.

        Args:
            links: engines.
            new: it is for a new session, with which an idle engine may be tried again.
        """
        now = asyncio.get_running_loop().time()
        speeds = [link.tokens_per_second(1) for link in links]
        least = max(speed or 0.0 for speed in speeds) / FAR
        usual = []
        for link, speed in zip(links, speeds, strict=True):
            if speed is None or speed >= least:
                usual.append(link)
            elif new and not link.load.requests and now - link.tried > TRY_SECONDS:
                link.tried = now
                return [link]
        return usual

    def _speeds_changed(self) -> None:
        known = sorted(
            (link.load.speed for link in self._links.values() if link.load.speed is not None),
            key=lambda speed: speed.request,
        )
        self._usual_speed = known[len(known) // 2] if known else UNKNOWN_SPEED
        self._uneven = bool(known) and known[0].request * FAR < known[-1].request

    def _leave_if_far_slower(self, link: _EngineLink) -> None:
        """Let responses go on at other engines if this one would take many times as long."""
        speed, now = link.load.speed, asyncio.get_running_loop().time()
        if not self._uneven or speed is None or now - link.looked < LOOK_SECONDS:
            return
        if now - link.tried < TRIED_SECONDS:
            return
        link.looked = now
        others = [
            other
            for other in self._links.values()
            if other is not link and other.frames is not None
        ]
        moved: list[str] = []
        for request_id, waiting in list(link.in_flight.items()):
            if waiting.moves >= MAX_MOVES or waiting.left < 1:
                continue
            other = self._far_sooner(
                others,
                waiting.left,
                len(waiting.request.prompt_tokens),
                speed.request,
                at_least=LONG_SECONDS,
            )
            if other is None:
                continue
            del link.in_flight[request_id]
            moved.append(request_id)
            waiting.moves += 1
            self._sessions[waiting.request.session] = other.engine_id
            other.take(waiting)
        if moved and link.frames is not None:
            link.tried = now
            link.frames.write(Abort(moved))
            self._plan_flush()
            log.warning(
                "engine %s samples %.2f tokens/s for each request, %d times slower than others: %d "
                "requests go on at other engines",
                link.engine_id,
                speed.request,
                max(other.load.speed.request for other in others if other.load.speed)
                / speed.request,
                len(moved),
            )

    def _far_sooner(
        self,
        others: list[_EngineLink],
        left: int,
        prompt: int,
        speed: float,
        *,
        at_least: float = 0.0,
    ) -> _EngineLink | None:
        """Return the engine that would end a response `FAR` times sooner; None if there is none.

        Args:
            others: engines. Those of unknown speed do not count.
            left: tokens that the response may still get. It probably gets as many as others did.
            prompt: tokens that another engine has to compute first.
            speed: tokens per second that the response gets where it is.
            at_least: seconds. A response that needs less where it is stays.
        """
        sooner: list[tuple[float, _EngineLink]] = []
        for other in others:
            there = other.tokens_per_second(1)
            if there is None:
                continue
            mean = other.load.response
            tokens = left if mean is None else min(left, max(1.0, mean))
            seconds = (tokens + prompt / PROMPT_TOKENS_PER_SAMPLED) / there
            if tokens / speed > max(at_least, FAR * seconds):
                sooner.append((seconds, other))
        return min(sooner, key=lambda pair: pair[0])[1] if sooner else None

    async def _listen(self, link: _EngineLink) -> None:
        """Keep a connection to a living engine and deliver its answers."""
        while True:
            try:
                async with asyncio.timeout(ADDRESS_SECONDS):
                    address = await link.handle.call(lambda engine: engine.requests_address())
                frames = await connect(address, self._name)
            except (ActorDied, OSError) as error:
                if isinstance(error, ActorDied) and not isinstance(error, ActorUnavailable):
                    log.warning(
                        "engine %s died (%s): its %d requests move to other engines",
                        link.engine_id,
                        error,
                        len(link.in_flight),
                    )
                    if self._links.get(link.engine_id) is link:
                        self._drop(link)
                    return
                log.warning("engine %s cannot be reached: %r", link.engine_id, error)
                link.reachable = False
                if any(other.reachable for other in self._links.values()):
                    self._withdraw(link)
            else:
                link.reachable, link.interrupted = True, []
                await self._listen_to(link, frames)
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _listen_to(self, link: _EngineLink, frames: Frames) -> None:
        """Deliver answers until the connection breaks.

        First send the requests of an earlier connection again, because the engine has aborted them.
        """
        if link.in_flight:
            frames.write([waiting.for_an_engine() for waiting in link.in_flight.values()])
        link.outgoing, link.frames = [], frames
        try:
            while True:
                before = link.load.speed
                answers, link.load = await frames.read()
                if link.load.speed != before:
                    self._speeds_changed()
                for answer in answers:
                    self._deliver(link, answer)
                self._leave_if_far_slower(link)
        except (OSError, EOFError):
            pass
        finally:
            link.frames, link.reachable = None, False
            link.interrupted = list(link.in_flight.values())
            frames.close()

    def _drop(self, link: _EngineLink, *, died: bool = True) -> None:
        """Forget an engine that is gone. Fail the requests of which too many engines have died."""
        del self._links[link.engine_id]
        self._speeds_changed()
        if link.listener is not None and link.listener is not asyncio.current_task():
            link.listener.cancel()
        sent = link.interrupted if link.frames is None else list(link.in_flight.values())
        self._withdraw(link)
        for waiting in sent if died else ():
            waiting.lost_engines += 1
            if waiting.lost_engines >= MAX_LOST_ENGINES and not waiting.done.done():
                self._abort(waiting)
                waiting.done.set_exception(
                    RequestRefused(f"{waiting.lost_engines} engines died while they sampled it")
                )

    def _withdraw(self, link: _EngineLink) -> None:
        """Send the requests of an engine to others."""
        self._unsent += link.in_flight.values()
        link.in_flight, link.outgoing = {}, []
        self._plan_flush()

    def _deliver(self, link: _EngineLink, answer: Answer | Progress) -> None:
        if isinstance(answer, Progress):
            if answer.request_id in link.in_flight:
                link.in_flight[answer.request_id].take(answer)
            return
        waiting = link.in_flight.pop(answer.request_id, None)
        if waiting is None or waiting.done.done():
            return
        if answer.generation is None:
            waiting.done.set_exception(RequestRefused(answer.error))
        else:
            whole = joined(waiting.begun, answer.generation)
            waiting.done.set_result(replace(whole, engine=link.engine_id))
