"""Requests of engines that die or cannot be reached go to others, but no request ends them all."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest

from agenticrun_workers.inference import client as client_module
from agenticrun_workers.inference import request_port
from agenticrun_workers.inference.client import (
    MAX_LOST_ENGINES,
    OLD_LOAD_SECONDS,
    GenerationClient,
    RequestRefused,
)
from agenticrun_workers.inference.request_port import Address, EngineLoad
from agenticrun_workers.launch import ActorUnavailable
from agenticrun_workers.types import FinishReason, GenerationRequest, SamplingParams
from rollout_fakes import FakeEngine, Remote
from waiting import eventually_in_loop

ANSWER_T = np.array([5], np.int32)


def request(name: str = "a") -> GenerationRequest:
    return GenerationRequest(name, name, np.array([1], np.int32), SamplingParams(1))


class OutOfReach(FakeEngine):
    """An engine that lives, at an address where nobody listens any more."""

    async def requests_address(self) -> Address:
        return Address("127.0.0.1", 1, b"")


async def test_requests_of_an_engine_that_cannot_be_reached_go_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "RECONNECT_SECONDS", 0.01)
    far, near = OutOfReach(ANSWER_T), FakeEngine(ANSWER_T)
    client = GenerationClient("c")
    client.set_engines({"far": Remote(far)})
    asking = [asyncio.create_task(client.generate(request(str(number)))) for number in range(4)]
    await eventually_in_loop(lambda: not client._links["far"].reachable, 60, "it is tried")
    client.set_engines({"far": Remote(far), "near": Remote(near)})
    answers = await asyncio.wait_for(asyncio.gather(*asking), 20)
    assert {answer.engine for answer in answers} == {"near"}
    late = await asyncio.wait_for(client.generate(request("late")), 20)
    assert late.engine == "near"
    client.set_engines({})
    await near.close()
    await asyncio.sleep(0)  # the loop closes the connections


class Cut(FakeEngine):
    """An engine that samples without an end; `cut` takes the network away.

    Args:
        fails: a call on the lost network fails, instead of getting no answer.
    """

    def __init__(self, fails: bool = False) -> None:
        super().__init__(ANSWER_T, lambda request: True)
        self._fails = fails
        self.lost = asyncio.Event()

    async def requests_address(self) -> Address:
        if self.lost.is_set():
            if self._fails:
                raise ActorUnavailable("the connection broke")
            await asyncio.Event().wait()
        return await super().requests_address()

    def cut(self) -> None:
        self.lost.set()
        for writer in self._port._connections.values():
            writer.transport.abort()


@pytest.mark.parametrize("fails", [False, True], ids=["no answer", "a failed call"])
async def test_a_lost_network_moves_requests_to_other_engines_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(client_module, "RECONNECT_SECONDS", 0.01)
    monkeypatch.setattr(client_module, "ADDRESS_SECONDS", 0.2)
    far, near = Cut(fails), FakeEngine(ANSWER_T)
    client = GenerationClient("c")
    client.set_engines({"far": Remote(far)})
    early = asyncio.create_task(client.generate(request("early")))
    await eventually_in_loop(lambda: bool(far.requests), 60, "it is asked")
    client.set_engines({"far": Remote(far), "near": Remote(near)})
    far.cut()
    await eventually_in_loop(lambda: client._links["far"].frames is None, 60, "it breaks")
    later_turn = replace(request("early"), request_id="late")
    late = await asyncio.wait_for(client.generate(later_turn), 20)
    assert late.engine == "near", "no later turn of the session waits for the lost one"
    assert (await asyncio.wait_for(early, 20)).engine == "near"
    far.lost.clear()
    await eventually_in_loop(lambda: client._links["far"].reachable, 60, "it is used again")
    client.set_engines({})
    for engine in (far, near):
        await engine.close()
    await asyncio.sleep(0)  # the loop closes the connections


async def test_engines_that_die_before_a_request_is_sent_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "RECONNECT_SECONDS", 0.01)
    client = GenerationClient("c")
    asking = asyncio.create_task(client.generate(request()))
    for number in range(MAX_LOST_ENGINES):
        client.set_engines({str(number): Remote(OutOfReach(ANSWER_T))})
        link = client._links[str(number)]
        await eventually_in_loop(partial(getattr, link, "in_flight"), 60, "it is chosen")
    engine = FakeEngine(ANSWER_T)
    client.set_engines({"good": Remote(engine)})
    assert (await asyncio.wait_for(asking, 20)).engine == "good"
    client.set_engines({})
    await engine.close()
    await asyncio.sleep(0)  # the loop closes the connections


def asked(client: GenerationClient, engines: dict[str, Cut]) -> str | None:
    """Return the id of the engine that samples a request."""
    return next(
        (
            name
            for name, link in client._links.items()
            if link.in_flight and link.frames and engines[name].requests
        ),
        None,
    )


def withdrawn(client: GenerationClient, name: str) -> bool:
    """True if the engine has no request, or cannot be reached and there is no other."""
    link = client._links[name]
    return not link.reachable and (not link.in_flight or len(client._links) == 1)


async def test_an_engine_that_is_unavailable_before_its_death_is_known_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request has moved by then."""
    monkeypatch.setattr(client_module, "RECONNECT_SECONDS", 0.01)
    client = GenerationClient("c")
    asking = asyncio.create_task(client.generate(request()))
    engines = {str(number): Cut(fails=True) for number in range(MAX_LOST_ENGINES)}
    handles = {name: Remote(engine) for name, engine in engines.items()}
    client.set_engines(handles)
    for _ in engines:
        name = await eventually_in_loop(partial(asked, client, engines), 60, "one samples it")
        engines[name].cut()
        await eventually_in_loop(partial(withdrawn, client, name), 60, "it is withdrawn")
        handles[name].kill()
        await eventually_in_loop(lambda: len(client._links) < len(handles), 60, "it is dropped")
        del handles[name]
    with pytest.raises(RequestRefused, match="3 engines died while they sampled it"):
        await asyncio.wait_for(asking, 20)
    for engine in engines.values():
        await engine.close()


async def test_engines_that_leave_alive_do_not_count() -> None:
    client = GenerationClient("c")
    asking = asyncio.create_task(client.generate(request()))
    leaving = [FakeEngine(ANSWER_T, lambda request: True) for _ in range(MAX_LOST_ENGINES)]
    engines = [*leaving, FakeEngine(ANSWER_T)]
    for number, engine in enumerate(engines):
        retired = [str(earlier) for earlier in range(number)]
        client.set_engines({str(number): Remote(engine)}, retired)
        await eventually_in_loop(lambda: bool(engine.requests), 60, "it is asked")
    assert (await asyncio.wait_for(asking, 20)).engine == str(MAX_LOST_ENGINES)
    client.set_engines({})
    for engine in engines:
        await engine.close()
    await asyncio.sleep(0)  # the loop closes the connections


async def test_a_request_of_which_engines_die_is_refused_at_last() -> None:
    """Otherwise it would end the replacements, too, and with them the attempt."""
    client = GenerationClient("c")
    asking = asyncio.create_task(client.generate(request()))
    engines = [FakeEngine(ANSWER_T, lambda request: True) for _ in range(MAX_LOST_ENGINES)]
    for number, engine in enumerate(engines):
        client.set_engines({str(number): Remote(engine)})
        await eventually_in_loop(lambda: bool(engine.requests), 60, "it is asked")
    client.set_engines({})
    with pytest.raises(RequestRefused, match="3 engines died while they sampled it"):
        await asyncio.wait_for(asking, 20)
    for engine in engines:
        await engine.close()


async def engine_of_next_turn(load: EngineLoad, other: EngineLoad, prompt_tokens: int) -> str:
    """Return "its own" or "other": which engine samples the second turn of a session."""
    engines = {name: FakeEngine(ANSWER_T) for name in "ab"}
    client = GenerationClient("c")
    client.set_engines({name: Remote(engine) for name, engine in engines.items()})
    first = await asyncio.wait_for(client.generate(request()), 20)
    for name, link in client._links.items():
        link.load = load if name == first.engine else other
        link.reported_at = asyncio.get_running_loop().time()
    prompt_T = np.ones(prompt_tokens, np.int32)
    turn = GenerationRequest("a.2", "a", prompt_T, SamplingParams(100))
    second = await asyncio.wait_for(client.generate(turn), 20)
    client.set_engines({})
    for engine in engines.values():
        await engine.close()
    await asyncio.sleep(0)  # the loop closes the connections
    return "its own" if second.engine == first.engine else "other"


@pytest.mark.parametrize(
    ("load", "other", "prompt_tokens", "chosen"),
    [
        pytest.param(EngineLoad(7, 700, 8), EngineLoad(0, 0, 8), 1, "its own", id="a seat is free"),
        pytest.param(EngineLoad(8, 800, 8), EngineLoad(2, 200, 8), 1, "other", id="full"),
        pytest.param(EngineLoad(8, 800, 8), EngineLoad(9, 900, 8), 1, "its own", id="both full"),
        pytest.param(
            EngineLoad(8, 800, 8), EngineLoad(9, 90, 8), 1, "other", id="short requests are few"
        ),
        pytest.param(
            EngineLoad(8, 800, 8), EngineLoad(7, 790, 8), 3200, "its own", id="a long prefix"
        ),
    ],
)
async def test_a_session_leaves_its_engine_only_for_one_that_is_sooner(
    load: EngineLoad, other: EngineLoad, prompt_tokens: int, chosen: str
) -> None:
    assert await engine_of_next_turn(load, other, prompt_tokens) == chosen


@pytest.mark.parametrize(("age", "chosen"), [(0.0, {"b"}), (2 * OLD_LOAD_SECONDS, {"a", "b"})])
async def test_an_engine_that_others_kept_busy_is_asked_again_after_a_time(
    age: float, chosen: set[str]
) -> None:
    engines = {name: FakeEngine(ANSWER_T) for name in "ab"}
    client = GenerationClient("c")
    client.set_engines({name: Remote(engine) for name, engine in engines.items()})
    busy = client._links["a"]
    busy.load = EngineLoad(requests=40, tokens=20_000.0, seats=64)
    busy.reported_at = asyncio.get_running_loop().time() - age
    asking = (client.generate(request(str(number))) for number in range(8))
    answers = await asyncio.wait_for(asyncio.gather(*asking), 20)
    assert {answer.engine for answer in answers} == chosen
    client.set_engines({})
    for engine in engines.values():
        await engine.close()
    await asyncio.sleep(0)  # the loop closes the connections


async def test_new_sessions_spread_over_engines_before_any_answers() -> None:
    engines = {name: FakeEngine(ANSWER_T, lambda request: True) for name in "ab"}
    client = GenerationClient("c")
    client.set_engines({name: Remote(engine) for name, engine in engines.items()})
    asking = [asyncio.create_task(client.generate(request(str(number)))) for number in range(8)]
    await eventually_in_loop(
        lambda: [len(engine.requests) for engine in engines.values()] == [4, 4], 60, "they spread"
    )
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    client.set_engines({})
    for engine in engines.values():
        await engine.close()
    await asyncio.sleep(0)  # the loop closes the connections


async def test_a_response_goes_on_from_the_tokens_that_came_of_engines_that_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_port, "PROGRESS_SECONDS", 0.01)
    client = GenerationClient("c")
    asked = replace(request(), sampling=SamplingParams(10, 0.7), seed=4)
    running = asyncio.create_task(client.generate(asked))
    had: list[int] = []
    for version, sampled in enumerate([[11, 12, 13], [14, 15]]):
        engine = FakeEngine(ANSWER_T, lambda _: True)
        engine.version = version
        client.set_engines({str(version): Remote(engine)})
        await eventually_in_loop(lambda: bool(engine.requests), 60, "it is asked")
        expected = replace(
            asked,
            prompt_tokens=np.array([1, *had], np.int32),
            sampling=replace(asked.sampling, max_new_tokens=10 - len(had)),
            sampled=len(had),
            session="c/a",
        )
        np.testing.assert_equal(asdict(engine.requests[0]), asdict(expected))
        for token in sampled:
            engine.sampled.append(token)
            had.append(token)
            (waiting,) = client._links[str(version)].in_flight.values()
            await eventually_in_loop(
                lambda: [*waiting.begun.tokens_T, *waiting.progress.tokens_T] == had, 60, "it comes"
            )
        client.set_engines({})
        await engine.close()
    last = FakeEngine(ANSWER_T)
    last.version = 2
    client.set_engines({"last": Remote(last)})
    response = await asyncio.wait_for(running, 20)
    assert response.tokens_T.tolist() == [11, 12, 13, 14, 15, *ANSWER_T]
    assert response.versions_T.tolist() == [0, 0, 0, 1, 1, 2]
    assert response.logprobs_T.tolist() == [-1.0, -1.0, -1.0, -2.0, -2.0, -3.0]
    assert (response.finish, response.engine) == (FinishReason.STOP, "last")
    client.set_engines({})
    await last.close()
    await asyncio.sleep(0)  # the loop closes the connections


async def test_tokens_that_came_of_an_engine_are_in_its_own_answer_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_port, "PROGRESS_SECONDS", 0.01)
    client = GenerationClient("c")
    engine = FakeEngine(np.array([7, 8, 9], np.int32), lambda _: True)
    engine.sampled = [7, 8]
    client.set_engines({"a": Remote(engine)})
    running = asyncio.create_task(client.generate(request()))
    await eventually_in_loop(
        lambda: any(
            len(each.progress.tokens_T) == 2 for each in client._links["a"].in_flight.values()
        ),
        60,
        "tokens come",
    )
    engine.answer("a")
    assert (await asyncio.wait_for(running, 20)).tokens_T.tolist() == [7, 8, 9]
    client.set_engines({})
    await engine.close()
    await asyncio.sleep(0)
