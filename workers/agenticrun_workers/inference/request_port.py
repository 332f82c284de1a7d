"""How requests reach an engine: one TCP connection per client, on which requests go there and answers come back as they are ready.

Why not calls of the actor: each costs a millisecond of CPU and half a dozen hops between threads, which add up to a twentieth of the
engine's time when cores are busy (benchmarks/engines.py). A message here is one write and one wake-up.

A connection begins with the engine's secret and the client's name; nothing is unpickled before the secret has been compared.
When it breaks, what the engine still computes for it is aborted: nobody would hear the answers.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from agenticrun_workers.serialization import pack, unpack
from agenticrun_workers.types import Generation, GenerationRequest

log = logging.getLogger(__name__)

SECRET_BYTES = 32
LENGTH_BYTES = 8
HELLO_SECONDS = 10.0
MAX_NAME_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine takes requests. The secret travels by Ray, to whoever has the actor's handle."""

    host: str
    port: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """What comes back for one request: a generation, or why there is none."""

    request_id: str
    generation: Generation | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    """A client has given these requests up."""

    request_ids: list[str]


class Frames:
    """Messages over a stream: a length, and a pickle."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> Any:
        """The next message. Raises `EOFError` or `OSError` when the other side is gone."""
        length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
        return unpack(await self._reader.readexactly(length))

    def write(self, message: Any) -> None:
        """Send it when the connection takes it; a broken one loses it, which `read` tells."""
        data = pack(message)
        self._writer.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)

    def close(self) -> None:
        self._writer.close()


async def connect(address: Address, name: str) -> Frames:
    """A connection of the client called `name`. Raises `OSError`."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    encoded = name.encode()
    writer.write(address.secret + len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded)
    return Frames(reader, writer)


class RequestPort:
    """An engine's side.

    Args:
        generate: samples one request; its client is told what it raises. Ids of requests and sessions carry the client's name, so
            that clients cannot meet.
        abort: stops these requests, which `generate` then returns.
        host: the address that clients can reach.
    """

    def __init__(
        self,
        generate: Callable[[GenerationRequest], Awaitable[Generation]],
        abort: Callable[[list[str]], Awaitable[None]],
        host: str = "127.0.0.1",
    ) -> None:
        self.generate = generate
        self.abort = abort
        self._host = host
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Lock()
        self._numbers = itertools.count()
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def load(self) -> int:
        """Requests of all clients under way."""
        return len(self.tasks)

    async def address(self) -> Address:
        """Where it listens; begins to, if it does not yet."""
        async with self._opening:
            if self._server is None:
                self._server = await asyncio.start_server(self._serve, self._host, 0)
        return Address(self._host, self._server.sockets[0].getsockname()[1], self._secret)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            name = await self._greeted(reader)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            log.warning(
                "a connection from %s is refused: %s", writer.get_extra_info("peername"), error
            )
            writer.close()
            return
        # A client that connects again may ask again for what is being aborted: the number keeps the two apart.
        connection = _Connection(
            self, f"{name}.{next(self._numbers)}/", f"{name}/", Frames(reader, writer)
        )
        try:
            await connection.serve()
        except (OSError, EOFError):
            pass
        finally:
            writer.close()
            await self.give_up(connection.close())

    async def give_up(self, request_ids: list[str]) -> None:
        """Stop requests, also those that were read a moment ago: they begin first, because nobody can abort what it does not know."""
        await asyncio.sleep(0)
        await self.abort(request_ids)

    async def _greeted(self, reader: asyncio.StreamReader) -> str:
        """The client's name."""
        async with asyncio.timeout(HELLO_SECONDS):
            if not hmac.compare_digest(await reader.readexactly(SECRET_BYTES), self._secret):
                raise ValueError("it does not know the secret")
            length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
            if length > MAX_NAME_BYTES:
                raise ValueError("its name is too long")
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
        self._under_way: dict[asyncio.Task[None], str] = {}
        """Ids of requests, from when they are read. By task: an id may come again before the task of an aborted request has ended."""
        self._answers: list[Answer] = []
        self._open = True

    async def serve(self) -> None:
        """Take messages until the client is gone."""
        while True:
            message = await self._frames.read()
            if isinstance(message, Abort):
                await self._port.give_up(
                    [self._id_prefix + request_id for request_id in message.request_ids]
                )
                continue
            for request in message:
                mine = replace(
                    request,
                    request_id=self._id_prefix + request.request_id,
                    session=self._session_prefix + request.session,
                )
                task = asyncio.create_task(self._answer(request.request_id, mine))
                self._under_way[task] = mine.request_id
                self._port.tasks.add(task)
                task.add_done_callback(self._ended)

    def close(self) -> list[str]:
        """Send nothing any more; the ids of what is still under way."""
        self._open = False
        return list(self._under_way.values())

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._under_way[task]
        self._port.tasks.discard(task)

    async def _answer(self, request_id: str, mine: GenerationRequest) -> None:
        """`mine` is the request as the engine knows it; its client knows it by `request_id`."""
        try:
            answer = Answer(request_id, await self._port.generate(mine))
        except Exception as error:  # it costs this request; the engine goes on
            answer = Answer(request_id, None, f"{type(error).__name__}: {error}")
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._flush)
        self._answers.append(answer)

    def _flush(self) -> None:
        """Answers of one tick travel together."""
        answers, self._answers = self._answers, []
        if self._open:
            self._frames.write((answers, self._port.load))
