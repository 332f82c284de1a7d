"""Aborted requests are not sampled, however soon they are aborted, and wherever they wait."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import numpy as np
import pytest

from agenticrun_workers.inference import EngineError, EngineStats
from agenticrun_workers.inference import actor as actor_module
from agenticrun_workers.inference.actor import EngineActor
from agenticrun_workers.inference.request_port import (
    LENGTH_BYTES,
    Abort,
    Address,
    Answer,
    EngineLoad,
    Frames,
    RequestPort,
    connect,
)
from agenticrun_workers.launch import Node
from agenticrun_workers.launch.node import shared_node
from agenticrun_workers.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    IntArray,
    SamplingParams,
)
from waiting import eventually_in_loop


def generation(tokens_T: IntArray, finish: FinishReason) -> Generation:
    return Generation(
        tokens_T, np.zeros(len(tokens_T), np.float32), np.zeros(len(tokens_T), np.int32), finish
    )


class Engine:
    """Samples forever, or repeats the prompt unless that is empty.

    Only requests that it samples can be aborted, as in every engine.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.in_flight: dict[str, asyncio.Event] = {}
        self.illness: Exception | None = None

    async def check_health(self) -> None:
        if self.illness is not None:
            raise self.illness

    async def generate(self, request: GenerationRequest) -> Generation:
        if request.request_id in self.in_flight:
            raise ValueError("it is already in flight")
        self.begun += 1
        if len(request.prompt_tokens):
            return generation(request.prompt_tokens, FinishReason.STOP)
        aborted = self.in_flight[request.request_id] = asyncio.Event()
        await aborted.wait()
        del self.in_flight[request.request_id]
        return generation(request.prompt_tokens, FinishReason.ABORT)

    async def abort(self, request_ids: list[str] | None = None) -> None:
        for request_id in list(self.in_flight) if request_ids is None else request_ids:
            if request_id in self.in_flight:
                self.in_flight[request_id].set()

    def stats(self) -> EngineStats:
        return EngineStats(0, len(self.in_flight), 0, 0, 0, 0.0)

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class Woken:
    """Weights that are there at once."""

    async def finish(self) -> None: ...


@pytest.fixture
async def closing() -> AsyncIterator[AsyncExitStack]:
    """Closes the ports of a test after it."""
    async with AsyncExitStack() as stack:
        yield stack


def port_of(engine: Engine, closing: AsyncExitStack) -> RequestPort:
    port = RequestPort(engine.generate, engine.abort)
    closing.push_async_callback(port.close)
    return port


def actor(engine: Engine, closing: AsyncExitStack) -> EngineActor:
    """An actor in this process, whose engine has started."""
    shared_node.set(Node("here", "127.0.0.1"))
    made = EngineActor("engine-0")
    closing.push_async_callback(made._port.close)
    made._engine, made._incoming = engine, Woken()  # type: ignore[assignment]
    return made


def ask(name: str, *prompt: int) -> list[GenerationRequest]:
    return [GenerationRequest(name, name, np.array(prompt, np.int32), SamplingParams(1))]


async def answers(frames: Frames, number: int) -> list[Answer]:
    """So many answers, in the order of their requests' ids."""
    got: list[Answer] = []
    async with asyncio.timeout(60):
        while len(got) < number:
            got += (await frames.read())[0]
    return sorted(got, key=lambda answer: answer.request_id)


async def idle(load: Callable[[], int]) -> None:
    await eventually_in_loop(lambda: load() == 0, 60, "no request is under way")


async def test_a_request_that_is_given_up_in_the_same_breath_is_stopped(
    closing: AsyncExitStack,
) -> None:
    engine = Engine()
    port = port_of(engine, closing)
    frames = await connect(await port.address(), "w")
    for message in (ask("a"), Abort(["a"]), ask("a"), Abort(["a"]), ask("a", 7)):
        frames.write(message)  # one write, and one read
    assert [(answer.request_id, answer.error) for answer in await answers(frames, 3)] == [
        ("a", "")
    ] * 3
    assert (engine.begun, engine.in_flight) == (3, {})
    await idle(lambda: port.load.requests)
    frames.close()


class Written:
    """A writer that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str) -> Written:
        return self

    def setsockopt(self, *option: int) -> None: ...


class Gone(Written):
    """A writer to a client that has already gone."""

    def setsockopt(self, *option: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


async def test_a_connection_that_breaks_at_once_is_closed(
    closing: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, served, connected = port_of(Engine(), closing), Gone(), Gone()
    await port._serve(asyncio.StreamReader(), served)  # type: ignore[arg-type]

    async def open_connection(*_: object) -> tuple[asyncio.StreamReader, Gone]:
        return asyncio.StreamReader(), connected

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    with pytest.raises(OSError, match="Invalid argument"):
        await connect(Address("here", 1, b""), "w")
    assert (served.closed, connected.closed) == (True, True)


async def test_a_request_whose_client_leaves_in_the_same_breath_is_stopped(
    closing: AsyncExitStack,
) -> None:
    engine, sent, reader = Engine(), Written(), asyncio.StreamReader()
    port = port_of(engine, closing)
    sent.write((await port.address()).secret + (1).to_bytes(LENGTH_BYTES, "big") + b"w")
    Frames(reader, sent).write(ask("a"))  # type: ignore[arg-type]
    reader.feed_data(sent.data)
    reader.feed_eof()
    await port._serve(reader, Written())  # type: ignore[arg-type]
    await idle(lambda: port.load.requests)
    assert (engine.begun, engine.in_flight) == (1, {})


async def test_an_id_that_is_repeated_after_its_abort_is_aborted_when_the_client_leaves(
    closing: AsyncExitStack,
) -> None:
    engine = Engine()
    port = port_of(engine, closing)
    frames = await connect(await port.address(), "w")
    for message in (ask("a"), Abort(["a"]), ask("a")):
        frames.write(message)
    await answers(frames, 1)
    frames.close()
    await idle(lambda: port.load.requests)
    assert engine.begun == 2


async def asked_while_it_sleeps(
    engine: Engine, requests: list[GenerationRequest], closing: AsyncExitStack
) -> tuple[EngineActor, Frames]:
    """Return the actor of a sleeping engine with these requests, and a client's connection."""
    made = actor(engine, closing)
    await made.sleep()
    frames = await connect(await made.requests_address(), "w")
    frames.write(requests)
    await eventually_in_loop(
        lambda: made._port.load.requests == len(requests), 60, "the actor has read the requests"
    )
    return made, frames


async def test_requests_wait_for_the_weights_of_an_engine_that_sleeps(
    closing: AsyncExitStack,
) -> None:
    engine = Engine()
    made, frames = await asked_while_it_sleeps(engine, ask("a", 7) + ask("b", 8), closing)
    await made.wake()
    assert engine.begun == 0
    await made.finish_update()
    told = [answer.generation for answer in await answers(frames, 2)]
    assert [each.tokens_T.tolist() for each in told if each is not None] == [[7], [8]]
    frames.close()


async def test_a_request_that_is_given_up_while_the_engine_sleeps_never_reaches_it(
    closing: AsyncExitStack,
) -> None:
    """Its id may be asked for again at once, and that request waits like any other."""
    engine = Engine()
    made, frames = await asked_while_it_sleeps(engine, ask("a"), closing)
    for message in (Abort(["a"]), ask("a", 7)):
        frames.write(message)
    (given_up,) = await answers(frames, 1)
    assert given_up.generation is not None
    assert (given_up.generation.finish, len(given_up.generation.tokens_T)) == (
        FinishReason.ABORT,
        0,
    )
    await made.wake()
    await made.finish_update()
    (answer,) = await answers(frames, 1)
    assert answer.generation is not None
    assert answer.generation.tokens_T.tolist() == [7]
    assert engine.begun == 1
    frames.close()


async def test_a_request_that_is_given_up_as_its_engine_gets_its_weights_is_stopped(
    closing: AsyncExitStack,
) -> None:
    engine = Engine()
    made, frames = await asked_while_it_sleeps(engine, ask("a"), closing)
    await made.finish_update()
    await made._abort(["w.0/a"])
    await idle(lambda: made._port.load.requests)
    assert engine.in_flight == {}
    frames.close()


async def test_an_engine_that_is_not_healthy_any_more_makes_its_actor_fail(
    closing: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while nobody asks it for anything."""
    monkeypatch.setattr(actor_module, "POLL_SECONDS", 0.02)
    engine = Engine()
    made = actor(engine, closing)
    watching = asyncio.create_task(made._watch())
    await made.health()
    engine.illness = EngineError("the server is frozen")
    await watching
    with pytest.raises(EngineError, match="the server is frozen"):
        await made.health()


async def test_a_health_check_that_fails_itself_is_logged_once_and_goes_on(
    closing: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(actor_module, "POLL_SECONDS", 0.02)
    engine = Engine()
    made = actor(engine, closing)
    engine.illness = KeyError("loads")
    watching = asyncio.create_task(made._watch())
    await asyncio.sleep(0.2)
    await made.health()
    assert [record.getMessage() for record in caplog.records] == [
        "the health of engine-0 cannot be checked"
    ]
    engine.illness = EngineError("the server is frozen")
    await watching
    with pytest.raises(EngineError, match="the server is frozen"):
        await made.health()


async def test_tcp_probes_both_ends_so_that_a_lost_network_breaks_the_connection(
    closing: AsyncExitStack,
) -> None:
    port = port_of(Engine(), closing)
    frames = await connect(await port.address(), "w")
    await eventually_in_loop(lambda: bool(port._connections), 60, "the port serves")
    for writer in (frames._writer, *port._connections.values()):
        connection = writer.get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        found = {
            option: connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        }
        assert list(found.values()) == [15, 15, 3]
    frames.close()


async def test_a_broken_engine_answers_nothing_so_that_its_clients_ask_another_one(
    closing: AsyncExitStack,
) -> None:
    """An answer with the error would cost the episode."""
    engine = Engine()
    made = actor(engine, closing)
    frames = await connect(await made.requests_address(), "w")
    engine.generate = failing  # type: ignore[method-assign]
    frames.write(ask("a", 7))
    with pytest.raises(EngineError, match="out of memory"):
        await made.health()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(frames.read(), 0.2)
    frames.close()


async def test_an_engine_that_cannot_abort_is_broken_and_its_connections_last(
    closing: AsyncExitStack,
) -> None:
    engine = Engine()
    made = actor(engine, closing)
    frames = await connect(await made.requests_address(), "w")
    engine.abort = cannot_abort  # type: ignore[method-assign]
    frames.write(Abort(["a"]))
    with pytest.raises(EngineError, match="answered 500"):
        await made.health()
    frames.write(ask("b", 7))
    assert (await answers(frames, 1))[0].request_id == "b"
    frames.close()


async def cannot_abort(request_ids: list[str] | None = None) -> None:
    raise EngineError("/abort was answered 500")


async def failing(request: GenerationRequest) -> Generation:
    raise EngineError("out of memory")


def asks(max_new_tokens: int) -> GenerationRequest:
    return GenerationRequest("a", "a", np.ones(1, np.int32), SamplingParams(max_new_tokens))


def test_a_load_expects_what_its_last_responses_took_but_no_more_than_the_request_allows() -> None:
    load = EngineLoad(seats=2)
    assert load.expected(asks(100)) == 100
    expected = load.expected(asks(100))
    load = load.begun(expected)
    assert (load.requests, load.tokens, load.full) == (1, 100, False)
    assert load.begun(0).full
    load = load.ended(expected, generation(np.ones(10, np.int32), FinishReason.STOP))
    assert (load.requests, load.tokens) == (0, 0)
    assert load.expected(asks(100)) == 10
    assert load.expected(asks(4)) == 4


def test_aborted_and_failed_requests_say_nothing_about_the_length_of_responses() -> None:
    load = EngineLoad(response=50.0).begun(50).begun(50)
    load = load.ended(50, None)
    load = load.ended(50, generation(np.ones(1, np.int32), FinishReason.ABORT))
    assert load == EngineLoad(response=50.0)


async def test_answers_tell_the_load_of_all_clients(closing: AsyncExitStack) -> None:
    port = port_of(Engine(), closing)
    port.seats = 8
    one, two = [await connect(await port.address(), name) for name in "ab"]
    one.write(ask("endless"))
    await eventually_in_loop(lambda: port.load.requests == 1, 60, "it has begun")
    two.write(ask("short", 1, 2, 3))
    _, load = await two.read()
    assert (load.requests, load.seats, load.response) == (1, 8, 3)
    for frames in (one, two):
        frames.close()
    await idle(lambda: port.load.requests)
