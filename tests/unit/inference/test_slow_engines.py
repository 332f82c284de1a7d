"""An engine that is far slower than the others gets no requests for a time; no other is touched.

In virtual time: the real pool, clients, connections and actors, on simulated engines.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from agenticrun_api import Role
from agenticrun_workers.inference.actor import EngineActor
from agenticrun_workers.inference.client import GenerationClient
from agenticrun_workers.inference.engine import EngineError, EngineStats, SampledTokens
from agenticrun_workers.inference.pool import EnginePool
from agenticrun_workers.inference.slow_engines import (
    FIRST_EJECTION_POLLS,
    IDLE_POLLS,
    MAX_EJECTION_POLLS,
    WINDOW_POLLS,
    SlowEngines,
)
from agenticrun_workers.launch import Node
from agenticrun_workers.launch.liveness import POLL_SECONDS
from agenticrun_workers.launch.node import shared_node
from agenticrun_workers.placement import Placement
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, SamplingParams
from rollout_fakes import Remote
from virtual_clock import on_virtual_clock

TICK = 0.5


@dataclass
class Rate:
    """Tokens per second of an engine: for each request alone, and for all together."""

    request: float
    total: float = 1e9

    def each(self, requests: int) -> float:
        return min(self.request, self.total / requests)


class Engine:
    """Samples with a rate that changes with time. Each token is its number in the response."""

    def __init__(self, rate: Callable[[float], Rate]) -> None:
        self._rate = rate
        self._in_flight: dict[str, SampledTokens] = {}
        self._aborted: set[str] = set()
        self._generated = self._seat_seconds = self._busy_seconds = 0.0
        self.asked: list[float] = []
        """When each request came."""

    async def generate(self, request: GenerationRequest) -> Generation:
        loop = asyncio.get_running_loop()
        self.asked.append(loop.time())
        sampled = self._in_flight[request.request_id] = SampledTokens()
        done = 0.0
        while len(sampled) < request.sampling.max_new_tokens:
            await asyncio.sleep(TICK)
            if request.request_id in self._aborted:
                break
            requests = len(self._in_flight)
            new = TICK * self._rate(loop.time()).each(requests)
            done += new
            self._generated += new
            self._seat_seconds += TICK
            self._busy_seconds += TICK / requests
            for _ in range(min(int(done), request.sampling.max_new_tokens) - len(sampled)):
                sampled.append(request.sampled + len(sampled), -1.0, 0)
        del self._in_flight[request.request_id]
        aborted = request.request_id in self._aborted
        return sampled.response(FinishReason.ABORT if aborted else FinishReason.LENGTH)

    def progress(self, request_id: str, start: int) -> Generation | None:
        sampled = self._in_flight.get(request_id)
        return None if sampled is None else sampled.since(start)

    async def abort(self, request_ids: list[str]) -> None:
        self._aborted |= self._in_flight.keys() & set(request_ids)

    def stats(self) -> EngineStats:
        return EngineStats(
            0,
            len(self._in_flight),
            0,
            int(self._generated),
            0,
            self._busy_seconds,
            seats=64,
            seat_seconds=self._seat_seconds,
            computed_tokens=int(self._generated),
        )


class Actor(EngineActor):
    """An actor that has its engine from the beginning."""

    def __init__(self, name: str, engine: Engine) -> None:
        super().__init__(name)
        self._engine = engine  # type: ignore[assignment]
        self._port.seats = 64

    async def placement(self) -> Placement:
        return Placement(self._name, Role.INFERENCE, "node", "pod", 1)


@dataclass(frozen=True)
class Outcome:
    """Results of one simulation."""

    longest: float
    """Seconds of the slowest response."""
    asked: list[list[float]]
    """When requests came to each engine."""
    moves: int
    replaced: int
    """Engines that died."""


def play(
    rates: Sequence[Callable[[float], Rate]],
    *,
    sessions: int = 12,
    turns: int = 6,
    tokens: int = 400,
) -> Outcome:
    """Play so many sessions at once, turn by turn, and check each response."""

    async def episode(client: GenerationClient, number: int) -> float:
        longest, loop = 0.0, asyncio.get_running_loop()
        for turn in range(turns):
            began = loop.time()
            sampling = SamplingParams(tokens - 10 * (number % 5))
            name = f"{number}.{turn}"
            response = await client.generate(
                GenerationRequest(name, name, np.ones(200, np.int32), sampling)
            )
            np.testing.assert_array_equal(response.tokens_T, np.arange(sampling.max_new_tokens))
            longest = max(longest, loop.time() - began)
            client.end_session(name)
        return longest

    async def everything() -> Outcome:
        shared_node.set(Node("here", "127.0.0.1"))
        engines = [Engine(rate) for rate in rates]
        actors: list[Actor] = []
        client = GenerationClient("c")

        async def spawn(name: str, slot: int) -> Any:
            actors.append(Actor(name, engines[slot]))
            return Remote(actors[-1])

        async def changed(serving: dict[str, Any]) -> None:
            client.set_engines(serving, pool.retired)

        pool = EnginePool(spawn, len(engines), changed)
        await pool.start()
        longest = await asyncio.gather(*(episode(client, number) for number in range(sessions)))
        await pool.stop()
        client.set_engines({})
        for actor in actors:
            await actor._port.close()
        moves = sum(len(engine.asked) for engine in engines) - sessions * turns
        replaced = len(actors) - len(engines)
        return Outcome(max(longest), [engine.asked for engine in engines], moves, replaced)

    return on_virtual_clock(everything())


def steady(rate: Rate) -> Callable[[float], Rate]:
    return lambda seconds: rate


FAST = Rate(20)
WINDOW_SECONDS = WINDOW_POLLS * POLL_SECONDS


@pytest.mark.parametrize("slow", [Rate(1), Rate(0)], ids=["a token per second", "nothing"])
def test_responses_leave_an_engine_that_becomes_slow(slow: Rate) -> None:
    """Without that, the longest takes six minutes, or forever."""
    found = play([lambda now: slow if now > 30 else FAST, steady(FAST), steady(FAST)])
    assert found.longest < 20 + WINDOW_SECONDS + 2 * POLL_SECONDS
    assert 1 <= found.moves <= 12


def test_an_engine_that_is_well_again_gets_requests_again() -> None:
    found = play([lambda now: Rate(1) if 30 < now < 80 else FAST, steady(FAST)], turns=30)
    out = [now for now in found.asked[0] if now > 80]
    assert out
    assert found.longest < 20 + WINDOW_SECONDS + 2 * POLL_SECONDS


@pytest.mark.parametrize("total", [1e9, 60.0], ids=["each alone", "a CPU"])
@pytest.mark.parametrize("times", [1, 3])
def test_engines_of_different_speed_share_the_work_and_nothing_moves(
    times: int, total: float
) -> None:
    found = play([steady(Rate(10, total)), steady(Rate(10 * times, times * total))], sessions=16)
    assert found.moves == 0


Work = tuple[float, int, int]
"""Tokens that all requests of an engine get per second, prompt tokens, and requests."""


def stats(seconds: float, work: Work, *, known: bool = True) -> EngineStats:
    """Return the statistics after so many seconds of such work."""
    tokens, prompts, requests = work
    return EngineStats(
        0,
        requests,
        0,
        int(tokens * seconds),
        0,
        seconds * (requests > 0),
        seat_seconds=requests * seconds,
        computed_tokens=int(tokens * seconds) + int(prompts * seconds) if known else None,
    )


def after(works: Sequence[Work], polls: int = WINDOW_POLLS + 1, **options: bool) -> SlowEngines:
    """Return what is known after so many polls of engines 0, 1 ... with such work."""
    slow = SlowEngines()
    for poll in range(polls + 1):
        for number, work in enumerate(works):
            slow.poll(str(number), stats(poll * POLL_SECONDS, work, **options))
    return slow


@pytest.mark.parametrize(
    ("works", "ejected"),
    [
        pytest.param([(8, 0, 8), (800, 0, 8)], {"0"}, id="slow for each, and in all"),
        pytest.param([(800, 0, 256), (30, 0, 1)], set(), id="a full batch beside one request"),
        pytest.param([(30, 0, 1), (800, 0, 256)], set(), id="one request beside a full batch"),
        pytest.param([(0, 3200, 1), (240, 0, 8)], set(), id="a long prompt beside responses"),
        pytest.param([(240, 0, 8), (200, 128_000, 8)], set(), id="beside cached prompts"),
        pytest.param([(110, 0, 8), (800, 0, 8)], set(), id="seven times slower"),
        pytest.param([(8, 0, 8)], set(), id="the only engine"),
        pytest.param([(8, 0, 8), (0, 0, 0)], set(), id="the only one with requests"),
        pytest.param([(8, 0, 8), (8, 0, 8), (800, 0, 8)], {"0"}, id="half of three is one"),
    ],
)
def test_who_is_slow(works: Sequence[Work], ejected: set[str]) -> None:
    assert after(works).ejected == ejected
    assert after(works, polls=WINDOW_POLLS - 1).ejected == set()
    assert after(works, known=False).ejected == set(), "of no engine is known what it computes"


def test_an_engine_without_requests_is_not_judged_by_what_it_did_before() -> None:
    slow = SlowEngines()
    for poll in range(4 * WINDOW_POLLS):
        seconds = poll * POLL_SECONDS
        slow.poll("slow", stats(min(seconds, WINDOW_POLLS * POLL_SECONDS), (1, 0, 1)))
        slow.poll("late", stats(max(seconds - WINDOW_POLLS * POLL_SECONDS, 0), (100, 0, 1)))
    assert not slow.ejected


def test_more_than_half_are_not_ejected_when_another_one_is_gone() -> None:
    slow = after([(8, 0, 8), (8, 0, 8), (800, 0, 8), (800, 0, 8)])
    assert slow.ejected == {"0", "1"}
    slow.forget("2")
    assert len(slow.ejected) == 1
    slow.forget("3")
    slow.forget("1")
    assert not slow.ejected


def poll_in_turn(rate: float) -> Iterator[tuple[float, str]]:
    """Poll a fast engine and one of this rate; yield what is said of it at which poll."""
    slow = SlowEngines()
    for poll in itertools.count():
        slow.poll("fast", stats(poll * POLL_SECONDS, (100, 0, 1)))
        if said := slow.poll("slow", stats(poll * POLL_SECONDS, (rate, 0, 1))):
            yield poll, said


def test_ejections_grow_longer_and_end() -> None:
    said = list(itertools.islice(poll_in_turn(1), 14))
    assert said[0][1].startswith("slow samples 1 tokens/s for each request, and others 100: its 1")
    assert {text for _, text in said[1::2]} == {"slow gets requests again"}
    lasted = [back - out for (out, _), (back, _) in zip(said[::2], said[1::2], strict=True)]
    assert lasted == [min(FIRST_EJECTION_POLLS * 2**n, MAX_EJECTION_POLLS) for n in range(7)]


def test_an_engine_that_never_computes_a_token_is_stuck() -> None:
    assert len(list(itertools.islice(poll_in_turn(0.1), 14))) == 14
    events = poll_in_turn(0)
    tried_again = [poll for poll, text in itertools.islice(events, 6) if "again" in text]
    assert [poll + WINDOW_POLLS for poll in tried_again] == [24, 54, 108]
    with pytest.raises(EngineError, match="was tried 4 times in 540 s and computed nothing"):
        next(events)


def test_an_engine_that_computes_between_its_stalls_is_not_stuck() -> None:
    slow, seconds, tokens, ejections = SlowEngines(), 0.0, 0.0, 0
    for poll in range(2000):
        seconds += POLL_SECONDS
        tokens += 0 if poll % 400 < 2 * WINDOW_POLLS else 100 * POLL_SECONDS
        slow.poll("fast", stats(seconds, (100, 0, 1)))
        said = slow.poll("stalls", replace(stats(seconds, (0, 0, 1)), generated_tokens=int(tokens)))
        ejections += "elsewhere" in said
    assert ejections == 5


def test_a_stuck_engine_is_replaced() -> None:
    """It would be ejected for 95 minutes before it has had requests for five."""
    found = play([lambda now: FAST if now > 700 else Rate(0), steady(FAST)], turns=50)
    assert found.replaced == 1


def test_a_prompt_that_is_computed_in_one_long_step_is_no_sign() -> None:
    slow = SlowEngines()
    for poll in range(10 * WINDOW_POLLS):
        seconds = poll * POLL_SECONDS
        slow.poll("fast", stats(seconds, (100, 0, 1)))
        slow.poll("prefills", replace(stats(seconds, (0, 0, 1)), prefilling=8000))
    assert not slow.ejected


def test_speed_of_long_ago_is_forgotten() -> None:
    slow = after([(100, 0, 1)])
    began = (WINDOW_POLLS + 1) * POLL_SECONDS
    for poll in range(IDLE_POLLS + 2 * WINDOW_POLLS):
        seconds = began + poll * POLL_SECONDS
        slow.poll("0", stats(began, (100, 0, 1)))
        slow.poll("1", stats(max(0, seconds - began - IDLE_POLLS * POLL_SECONDS), (1, 0, 1)))
    assert not slow.ejected
