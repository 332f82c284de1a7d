"""GenerationClient: sends the requests of many episodes to the engines and returns the responses.

Requests of one tick of the event loop travel in one message (`request_port`). A new session goes to
that of two random engines which has fewer tokens to sample. It stays there, because the engine
caches its prefix, until the engine is full and another one would be sooner, the prefix included.
When an engine dies or cannot be reached, its requests go to another engine or wait for its
replacement. An engine sends the tokens of long responses from time to time (`Progress`): another
one continues from these. Each token keeps its log-prob and its policy version, as it does when new
weights come in the middle of a response.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from agenticrun_workers.inference.engine import ABORTED_UNSAMPLED
from agenticrun_workers.inference.request_port import (
    Abort,
    Address,
    Answer,
    EngineLoad,
    Frames,
    Progress,
    connect,
)
from agenticrun_workers.launch import ActorDied, ActorHandle, ActorUnavailable
from agenticrun_workers.types import Generation, GenerationRequest

log = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.5
ADDRESS_SECONDS = 5.0
"""Longest wait for an engine's address. The call gets no answer while the network is lost."""
PROMPT_TOKENS_PER_SAMPLED = 32
"""Prompt tokens that cost an engine about as much as one sampled token.

Prompts are computed at once, and tokens sampled one by one: 20 to 100 times slower on GPUs.
"""
OLD_LOAD_SECONDS = 5.0
"""Time after which a client asks an engine again that other clients had kept busy."""

MAX_LOST_ENGINES = 3
"""Give up on a request after it has killed this many engines, or it would kill them all."""


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

    def for_an_engine(self) -> GenerationRequest:
        """Return the request for the next engine: it continues from the tokens received so far."""
        self.begun, self.progress = joined(self.begun, self.progress), ABORTED_UNSAMPLED
        sampled = len(self.begun.tokens_T)
        if not sampled:
            return self.request
        request, sampling = self.request, self.request.sampling
        return replace(
            request,
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
        """The engine's last report, plus what was sent to it since then."""
        self.reported_at = 0.0
        """Time of that report, on the event loop's clock."""
        self.frames: Frames | None = None
        """The connection, if there is one. Without it requests wait in `in_flight`."""
        self.reachable = True
        """False from a broken or failed connection until the next successful one."""
        self.interrupted: list[_Waiting] = []
        """Requests that were sent on the connection that broke last, until there is another."""
        self.listener: asyncio.Task[None] | None = None

    def take(self, waiting: _Waiting) -> None:
        """Put a request into the next message to the engine."""
        request = waiting.for_an_engine()
        self.in_flight[request.request_id] = waiting
        self.outgoing.append(request)
        self.load = self.load.begun(self.load.expected(request))

    def load_now(self) -> EngineLoad:
        """Return the load. An engine that has had no reason to tell it for a time counts as idle.

        It tells it with answers: without a request there, it would stay busy for ever.
        """
        if (
            self.load.requests
            and not self.in_flight
            and asyncio.get_running_loop().time() - self.reported_at > OLD_LOAD_SECONDS
        ):
            self.load = replace(self.load, requests=0, tokens=0.0)
        return self.load


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
        # Requests of engines that have left alive must not count a death against themselves.
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
            if link.in_flight.get(waiting.request.request_id) is waiting:
                del link.in_flight[waiting.request.request_id]
                # Without a connection the engine has aborted it already.
                if link.frames is not None:
                    link.frames.write(Abort([waiting.request.request_id]))

    def _plan_flush(self) -> None:
        if not self._flush_planned:
            self._flush_planned = True
            # Requests of one turn of the event loop go out in one frame: env workers submit
            # thousands at once.
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
            # Without a connection they wait in `in_flight`, all of which is sent once there is one.
            if requests and link.frames is not None:
                link.frames.write(requests)

    def _choose(self, request: GenerationRequest) -> _EngineLink:
        """Return the engine that holds the prefix, unless another one is worth the loss of it."""
        # If no engine can be reached, requests still wait at one: the break may last a second only.
        reachable = [link for link in self._links.values() if link.reachable]
        held = self._links.get(self._sessions.get(request.session, ""))
        if held is not None and not held.reachable and reachable:
            held = None
        # The engine caches the prefix of the session, so staying is cheaper than a shorter queue.
        if held is not None and not held.load_now().full:
            return held
        links = reachable or list(self._links.values())
        # The power of two choices: nearly as even as the minimum over all, but clients that see the
        # same loads do not all pick the same engine.
        candidates = self._random.sample(links, k=min(2, len(links)))
        link = min(candidates, key=lambda candidate: candidate.load_now().tokens)
        if held is not None:
            # Another engine computes the whole prompt again: worth it only if its queue is shorter
            # by more.
            prefix = len(request.prompt_tokens) / PROMPT_TOKENS_PER_SAMPLED
            if held.load.tokens <= link.load.tokens + prefix:
                return held
        self._sessions[request.session] = link.engine_id
        return link

    async def _listen(self, link: _EngineLink) -> None:
        """Keep a connection to a living engine and deliver its answers."""
        while True:
            try:
                async with asyncio.timeout(ADDRESS_SECONDS):
                    address = await link.handle.call(lambda engine: engine.requests_address())
                frames = await connect(address, self._name)
            except (ActorDied, OSError) as error:
                # An unavailable actor may come back: only the pool decides that it is dead.
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
                # With no other engine, waiting for this one is all that is left.
                if any(other.reachable for other in self._links.values()):
                    self._withdraw(link)
            else:
                # Requests that died with an earlier connection do not count against this engine
                # again.
                link.reachable, link.interrupted = True, []
                await self._listen_to(link, frames)
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _listen_to(self, link: _EngineLink, frames: Frames) -> None:
        """Deliver answers until the connection breaks.

        First send the requests of an earlier connection again, because the engine has aborted them.
        """
        if link.in_flight:
            # The engine aborts the requests of a connection that breaks, so all of them are sent
            # again, from the tokens received so far.
            frames.write([waiting.for_an_engine() for waiting in link.in_flight.values()])
        # Whatever was in `outgoing` is in `in_flight`, too, and has just been sent.
        link.outgoing, link.frames = [], frames
        try:
            while True:
                answers, link.load = await frames.read()
                link.reported_at = asyncio.get_running_loop().time()
                for answer in answers:
                    self._deliver(link, answer)
        # The engine died or the network broke: `_listen` finds out which when it connects again.
        except (OSError, EOFError):
            pass
        finally:
            link.frames, link.reachable = None, False
            link.interrupted = list(link.in_flight.values())
            frames.close()

    def _drop(self, link: _EngineLink, *, died: bool = True) -> None:
        """Forget an engine that is gone. Fail the requests of which too many engines have died."""
        del self._links[link.engine_id]
        # `_listen` calls this as well, and must not cancel itself.
        if link.listener is not None and link.listener is not asyncio.current_task():
            link.listener.cancel()
        # Only requests that the engine had received may have killed it, not those queued for it.
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
        # Aborted by its caller, or answered by the engine that took it over.
        if waiting is None or waiting.done.done():
            return
        if answer.generation is None:
            waiting.done.set_exception(RequestRefused(answer.error))
        else:
            whole = joined(waiting.begun, answer.generation)
            waiting.done.set_result(replace(whole, engine=link.engine_id))
