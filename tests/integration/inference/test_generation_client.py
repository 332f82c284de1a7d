"""The generation client on real engine actors: few calls, sticky sessions, engines that die."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agenticrun_workers.inference.client import GenerationClient, RequestRefused
from agenticrun_workers.inference.request_port import (
    LENGTH_BYTES,
    SECRET_BYTES,
    Address,
    Frames,
    RequestPort,
)
from agenticrun_workers.launch import ActorOptions
from agenticrun_workers.launch.ray_launcher import RayLauncher
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("ray_node")


class EchoEngine:
    """Answers with the prompt's last token plus one, after a moment.

    Args:
        held: answers nothing until `release`.
    """

    def __init__(self, held: bool) -> None:
        self._open = asyncio.Event()
        if not held:
            self._open.set()
        self._port = RequestPort(self._generate, self._abort)
        self._sessions: list[str] = []
        self._aborted: list[str] = []

    async def requests_address(self) -> Address:
        return await self._port.address()

    async def seen(self) -> tuple[list[str], int]:
        return self._sessions, os.getpid()

    async def aborted(self) -> list[str]:
        return self._aborted

    async def load(self) -> int:
        return self._port.load.requests

    async def release(self) -> None:
        self._open.set()

    async def _abort(self, request_ids: list[str]) -> None:
        self._aborted += request_ids

    async def _generate(self, request: GenerationRequest) -> Generation:
        self._sessions.append(request.session)
        await asyncio.sleep(0.05)
        await self._open.wait()
        if len(request.prompt_tokens) == 0:
            raise ValueError("the prompt is empty")
        token = np.array([request.prompt_tokens[-1] + 1], np.int32)
        return Generation(token, np.zeros(1, np.float32), np.zeros(1, np.int32), FinishReason.STOP)


def engine(*, held: bool = False) -> Any:
    return RayLauncher().start(ActorOptions(max_concurrency=1000), EchoEngine, held)


class Relay:
    """A TCP relay whose connections can be cut, as a network does."""

    def __init__(self) -> None:
        self.connections = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._servers: list[asyncio.Server] = []

    async def to(self, target: Address) -> Address:
        """Where to connect instead."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            other_reader, other_writer = await asyncio.open_connection(target.host, target.port)
            self._writers += [writer, other_writer]
            await asyncio.gather(pump(reader, other_writer), pump(other_reader, writer))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self._servers.append(server)
        return replace(target, port=server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        self.cut()
        await asyncio.sleep(0)  # the loop closes the connections


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)


class RelayedEngine:
    """An engine that is only reached through a relay."""

    def __init__(self, handle: Any, relay: Relay) -> None:
        self._handle = handle
        self._relay = relay

    async def requests_address(self) -> Address:
        return await self._relay.to(await self._handle.call(lambda actor: actor.requests_address()))


def request(number: int, turn: int = 1, tokens: int = 1) -> GenerationRequest:
    return GenerationRequest(
        f"{number}-{turn}", str(number), np.full(tokens, number, np.int32), SamplingParams(1)
    )


async def ask(client: GenerationClient, number: int, turn: int = 1) -> int:
    generation = await asyncio.wait_for(client.generate(request(number, turn)), 60)
    return int(generation.tokens_T[0])


async def until_asked(engine: Any, requests: int = 1) -> None:
    """So many requests have reached the engine."""
    async with asyncio.timeout(60):
        while await engine.call(lambda actor: actor.load()) < requests:
            await asyncio.sleep(0.02)


async def until_aborted(engine: Any, requests: int) -> list[str]:
    """The names of the requests that the engine was told to give up, when there are so many."""
    async with asyncio.timeout(60):
        while len(names := await engine.call(lambda actor: actor.aborted())) < requests:
            await asyncio.sleep(0.02)
    return [name.rpartition("/")[2] for name in names]


async def test_every_request_gets_its_own_answer() -> None:
    only = engine()
    client = GenerationClient("c")
    client.set_engines({"a": only})
    assert await asyncio.gather(*(ask(client, number) for number in range(100))) == list(
        range(1, 101)
    )
    sessions, _ = await only.call(lambda actor: actor.seen())
    assert sorted(sessions) == sorted(f"c/{number}" for number in range(100))


async def test_sessions_stay_on_their_engine_and_are_spread() -> None:
    engines = {"a": engine(), "b": engine()}
    client = GenerationClient("c")
    client.set_engines(engines)
    for turn in (1, 2, 3):
        await asyncio.gather(*(ask(client, number, turn) for number in range(40)))
    seen = [set((await handle.call(lambda actor: actor.seen()))[0]) for handle in engines.values()]
    assert seen[0] & seen[1] == set()
    assert min(len(sessions) for sessions in seen) >= 15


async def test_requests_of_a_dead_engine_go_on_at_another_one() -> None:
    engines = {"a": engine(held=True), "b": engine(held=True)}
    client = GenerationClient("c")
    client.set_engines(engines)
    asking = asyncio.gather(*(ask(client, number) for number in range(20)))
    await until_asked(engines["a"])
    os.kill((await engines["a"].call(lambda actor: actor.seen()))[1], signal.SIGKILL)
    await until_asked(engines["b"], 20)
    await engines["b"].call(lambda actor: actor.release())
    assert await asking == list(range(1, 21))


async def test_requests_wait_for_the_replacement_of_the_last_engine() -> None:
    first = engine(held=True)
    client = GenerationClient("c")
    client.set_engines({"a": first})
    asking = asyncio.gather(*(ask(client, number) for number in range(5)))
    await until_asked(first)
    os.kill((await first.call(lambda actor: actor.seen()))[1], signal.SIGKILL)
    client.set_engines({})
    await asyncio.sleep(0.1)
    client.set_engines({"b": engine()})
    assert await asking == [1, 2, 3, 4, 5]


async def test_a_refused_request_costs_only_itself() -> None:
    client = GenerationClient("c")
    client.set_engines({"a": engine()})
    bad = asyncio.create_task(client.generate(request(7, tokens=0)))
    assert await ask(client, 1) == 2
    with pytest.raises(RequestRefused, match="the prompt is empty"):
        await asyncio.wait_for(bad, 60)


async def test_a_caller_that_gives_up_stops_the_sampling_of_its_request_only() -> None:
    slow = engine(held=True)
    client = GenerationClient("c")
    client.set_engines({"a": slow})
    asking = [asyncio.create_task(ask(client, number)) for number in range(3)]
    await until_asked(slow, 3)
    asking[1].cancel()
    await until_aborted(slow, 1)
    await slow.call(lambda actor: actor.release())
    assert (await asking[0], await asking[2]) == (1, 3)
    assert await until_aborted(slow, 1) == ["1-1"]


async def test_a_connection_that_breaks_is_made_again_and_asks_again() -> None:
    """The engine drops what came on the broken one: nobody would hear the answer."""
    from rollout_fakes import Remote  # actors import this module, but cannot import that one

    slow = engine(held=True)
    relay = Relay()
    client = GenerationClient("c")
    client.set_engines({"a": Remote(RelayedEngine(slow, relay))})
    asking = asyncio.gather(*(ask(client, number) for number in range(3)))
    await until_asked(slow, 3)
    relay.cut()
    await until_aborted(slow, 3)
    await slow.call(lambda actor: actor.release())
    assert await asking == [1, 2, 3]
    assert relay.connections == 2
    assert sorted(await until_aborted(slow, 3)) == ["0-1", "1-1", "2-1"]
    client.set_engines({})
    await relay.close()


async def test_what_a_client_leaves_behind_is_aborted() -> None:
    slow = engine(held=True)
    client = GenerationClient("c")
    client.set_engines({"a": slow})
    asking = asyncio.create_task(ask(client, 1))
    await until_asked(slow)
    client.set_engines({})
    assert await until_aborted(slow, 1) == ["1-1"]
    asking.cancel()


async def test_a_stranger_is_heard_by_nobody() -> None:
    """Nothing that it sends is unpickled."""
    only = engine()
    address = await only.call(lambda actor: actor.requests_address())
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(bytes(SECRET_BYTES) + (3).to_bytes(LENGTH_BYTES, "big") + b"eve")
    Frames(reader, writer).write([request(1)])
    with suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()
    sessions, _ = await only.call(lambda actor: actor.seen())
    assert sessions == []
