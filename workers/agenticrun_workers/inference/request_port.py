"""The connection between an engine and its clients: one TCP connection per client.

Why not calls of the Ray actor: each costs a millisecond of CPU and six hops between threads, which
add up to 5 % of the engine's time on busy cores (benchmarks/engines.py). A message here is one
write and one wake-up.

A connection begins with the engine's secret and the client's name. The engine unpickles nothing
before it has checked the secret. When a connection breaks, the engine aborts its requests. A lost
network breaks it, too: both ends let TCP probe each other (`launch.liveness` has the whole rule).
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from agenticrun_workers.serialization import pack, unpack
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest

log = logging.getLogger(__name__)

SECRET_BYTES = 32
LENGTH_BYTES = 8
HANDSHAKE_SECONDS = 10.0
MAX_NAME_BYTES = 1024
PROBES = {
    socket.SO_KEEPALIVE: (socket.SOL_SOCKET, 1),
    socket.TCP_KEEPIDLE: (socket.IPPROTO_TCP, 15),
    socket.TCP_KEEPINTVL: (socket.IPPROTO_TCP, 15),
    socket.TCP_KEEPCNT: (socket.IPPROTO_TCP, 3),
    socket.TCP_USER_TIMEOUT: (socket.IPPROTO_TCP, 60_000),
}
"""Socket options, with level and value: a connection breaks a minute after the network is lost."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of an engine's request port. Only holders of the actor's handle get the secret."""

    host: str
    port: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one request: a generation or an error."""

    request_id: str
    generation: Generation | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens of a request in flight, which its client keeps in case the engine is lost."""

    request_id: str
    start: int
    """Number of tokens in earlier messages."""
    sampled: Generation


PROGRESS_SECONDS = 1.0
"""Time between two messages about a request's tokens. The first one comes in the second look."""

LAST_RESPONSES = 64
"""Number of responses over which `EngineLoad.response` is a moving average."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The work of an engine, which its clients get with every answer."""

    requests: int = 0
    """Requests of all clients in flight."""
    tokens: float = 0.0
    """Tokens that they are expected to sample."""
    seats: int = 1
    """Largest number of requests that the engine computes at once."""
    response: float | None = None
    """Mean tokens of its last responses; None = there is none yet."""

    @property
    def full(self) -> bool:
        """True if another request would wait."""
        return self.requests >= self.seats

    def expected(self, request: GenerationRequest) -> float:
        """Return how many tokens a request will probably sample.

        `max_new_tokens` alone tells little: it is the same for short and long responses.
        """
        limit = request.sampling.max_new_tokens
        return limit if self.response is None else min(limit, self.response)

    def begun(self, tokens: float) -> EngineLoad:
        """Return the load with another request that is expected to sample so many tokens."""
        return replace(self, requests=self.requests + 1, tokens=self.tokens + tokens)

    def ended(self, tokens: float, generation: Generation | None) -> EngineLoad:
        """Return the load without such a request, of which this generation has come."""
        mean = self.response
        if generation is not None and generation.finish is not FinishReason.ABORT:
            length = len(generation.tokens_T)
            mean = length if mean is None else mean + (length - mean) / LAST_RESPONSES
        requests = self.requests - 1
        left = self.tokens - tokens if requests else 0.0  # exactly: no error adds up
        return replace(self, requests=requests, tokens=left, response=mean)


@dataclass(frozen=True, slots=True)
class Abort:
    """A client's message: abort these requests."""

    request_ids: list[str]


class Frames:
    """Messages over a stream, each a length and a pickle."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> Any:
        """Return the next message. Raises `EOFError` or `OSError` when the other side is gone."""
        length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
        return unpack(await self._reader.readexactly(length))

    def write(self, message: Any) -> None:
        """Send a message without waiting. A broken connection loses it; `read` reports that."""
        data = pack(message)
        self._writer.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)

    def close(self) -> None:
        self._writer.close()


async def connect(address: Address, name: str) -> Frames:
    """Connect to an engine as the client `name`. Raises `OSError`."""
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        _probe(writer)
    except OSError:
        writer.close()
        raise
    encoded = name.encode()
    # The secret comes first, so that a stranger is refused before anything is parsed.
    writer.write(address.secret + len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded)
    return Frames(reader, writer)


def _probe(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    for option, (level, value) in PROBES.items():
        connection.setsockopt(level, option, value)


class RequestPort:
    """The engine's end of the connections.

    Args:
        generate: samples one request; its client gets what it raises. Ids of requests and sessions
            carry the client's name, so those of two clients cannot collide.
        abort: ends these requests; their `generate` returns.
        host: the address that clients can reach.
        progress: returns the tokens of a request in flight from a number on, if there are any.
    """

    def __init__(
        self,
        generate: Callable[[GenerationRequest], Awaitable[Generation]],
        abort: Callable[[list[str]], Awaitable[None]],
        host: str = "127.0.0.1",
        progress: Callable[[str, int], Generation | None] = lambda *_: None,
    ) -> None:
        self.generate = generate
        self.abort = abort
        self.progress = progress
        self._host = host
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Lock()
        self._numbers = itertools.count()
        self.load = EngineLoad()
        """Load of the requests of all clients."""
        self.tasks: set[asyncio.Task[None]] = set()
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """By the task that serves them."""

    @property
    def seats(self) -> int:
        """Largest number of requests that the engine computes at once."""
        return self.load.seats

    @seats.setter
    def seats(self, seats: int) -> None:
        self.load = replace(self.load, seats=seats)

    async def address(self) -> Address:
        """Return the address. The first call begins to listen."""
        async with self._opening:
            if self._server is None:
                # Port 0: the kernel chooses a free one, and the actor's handle carries it to
                # clients.
                self._server = await asyncio.start_server(self._serve, self._host, 0)
        return Address(self._host, self._server.sockets[0].getsockname()[1], self._secret)

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        if self._server is not None:
            self._server.close()
        for writer in self._connections.values():
            writer.close()
        # Closed writers end the readers; their tasks abort what is in flight.
        await asyncio.gather(*self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        task.add_done_callback(lambda done: self._connections.pop(done, None))
        try:
            _probe(writer)
            name = await self._handshake(reader)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            log.warning(
                "refused a connection from %s: %s", writer.get_extra_info("peername"), error
            )
            writer.close()
            return
        # A client that reconnects may repeat a request that is still being aborted. The number of
        # the connection keeps the two ids apart.
        connection = _Connection(
            self, f"{name}.{next(self._numbers)}/", f"{name}/", Frames(reader, writer)
        )
        telling = asyncio.create_task(connection.tell_progress(), name=f"progress-{name}")
        try:
            await connection.serve()
        except (OSError, EOFError):
            pass
        finally:
            telling.cancel()
            writer.close()
            # The client is gone: what it waited for would only take seats.
            await self.abort_requests(connection.close())

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Abort requests, also those read a moment ago.

        Their tasks start first: `abort` does not know a request before its `generate` begins.
        """
        await asyncio.sleep(0)
        await self.abort(request_ids)

    async def _handshake(self, reader: asyncio.StreamReader) -> str:
        """Check the secret and return the client's name. Raises `ValueError`."""
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            # In constant time, because any pod can connect.
            if not hmac.compare_digest(await reader.readexactly(SECRET_BYTES), self._secret):
                raise ValueError("wrong secret")
            length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
            # The length comes from the other side: it must not decide how much is read.
            if length > MAX_NAME_BYTES:
                raise ValueError("the client's name is too long")
            return (await reader.readexactly(length)).decode()


class _Connection:
    """One client of a port."""

    def __init__(
        self, port: RequestPort, id_prefix: str, session_prefix: str, frames: Frames
    ) -> None:
        self._port = port
        self._id_prefix = id_prefix
        self._session_prefix = session_prefix
        self._frames = frames
        self._in_flight: dict[asyncio.Task[None], str] = {}
        """Ids of the requests, from when they are read. The key is the task, because an id may come
        again before the task of an aborted request has ended."""
        self._reported: dict[asyncio.Task[None], int] = {}
        """Number of tokens that the client has, by request that was in flight at the last look."""
        self._answers: list[Answer | Progress] = []
        self._open = True

    async def serve(self) -> None:
        """Handle messages until the client is gone."""
        while True:
            message = await self._frames.read()
            if isinstance(message, Abort):
                await self._port.abort_requests(
                    [self._id_prefix + request_id for request_id in message.request_ids]
                )
                continue
            for request in message:
                engine_request = replace(
                    request,
                    request_id=self._id_prefix + request.request_id,
                    # The engine's cache survives a reconnection, so sessions leave out the
                    # connection's number.
                    session=self._session_prefix + request.session,
                )
                task = asyncio.create_task(self._answer(request.request_id, engine_request))
                # Before the task runs, so that a message that aborts it finds it.
                self._in_flight[task] = engine_request.request_id
                self._port.tasks.add(task)
                task.add_done_callback(self._ended)

    async def tell_progress(self) -> None:
        """Send the new tokens of long responses from time to time."""
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            # Only requests that were in flight in the last round: short ones send nothing extra.
            for task, reported in self._reported.items():
                request_id = self._in_flight[task]
                sampled = self._port.progress(request_id, reported)
                if sampled is not None:
                    self._reported[task] = reported + len(sampled.tokens_T)
                    unprefixed = request_id.removeprefix(self._id_prefix)
                    self._send(Progress(unprefixed, reported, sampled))
            self._reported |= dict.fromkeys(self._in_flight.keys() - self._reported.keys(), 0)

    def close(self) -> list[str]:
        """Stop sending answers. Returns the ids of the requests still in flight."""
        self._open = False
        return list(self._in_flight.values())

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._in_flight[task]
        self._reported.pop(task, None)
        self._port.tasks.discard(task)

    async def _answer(self, request_id: str, engine_request: GenerationRequest) -> None:
        """Answer a request, which the client knows as `request_id` and the engine by another id."""
        port = self._port
        expected = port.load.expected(engine_request)
        # Counted before the first await, so that clients which choose now see it.
        port.load = port.load.begun(expected)
        try:
            answer = Answer(request_id, await port.generate(engine_request))
        except Exception as error:  # only this request fails
            answer = Answer(request_id, None, f"{type(error).__name__}: {error}")
        port.load = port.load.ended(expected, answer.generation)
        self._send(answer)

    def _send(self, message: Answer | Progress) -> None:
        # One frame for all answers of a turn of the event loop.
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._flush)
        self._answers.append(message)

    def _flush(self) -> None:
        """Send what one tick has to say in one message."""
        answers, self._answers = self._answers, []
        if self._open:
            self._frames.write((answers, self._port.load))
