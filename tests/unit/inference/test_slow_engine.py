"""Responses leave an engine that is far slower than others, and nothing moves between the others.

In virtual time, with the real clients, connections and actors on simulated engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from agenticrun_workers.inference.actor import SPEED_POLLS, EngineActor, SpeedMeter
from agenticrun_workers.inference.client import GenerationClient
from agenticrun_workers.inference.engine import STREAM_TOKENS, EngineStats, SampledTokens
from agenticrun_workers.inference.request_port import Speed
from agenticrun_workers.launch import Node
from agenticrun_workers.launch.launcher import shared_node
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
    """Samples with a rate that changes with time."""

    def __init__(self, rate: Callable[[float], Rate]) -> None:
        self._rate = rate
        self._in_flight: dict[str, SampledTokens] = {}
        self._aborted: set[str] = set()
        self._generated = self._seat_seconds = self._busy_seconds = 0.0
        self._prompts = 0
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine`."""
        self.requests.append(request)
        self._prompts += len(request.prompt_tokens)
        sampled = self._in_flight[request.request_id] = SampledTokens()
        done = 0.0
        loop = asyncio.get_running_loop()
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
        """See `ReportsProgress`."""
        sampled = self._in_flight.get(request_id)
        return None if sampled is None else sampled.since(start)

    async def abort(self, request_ids: list[str]) -> None:
        """See `InferenceEngine`."""
        self._aborted |= self._in_flight.keys() & set(request_ids)

    async def check_health(self) -> None:
        """See `InferenceEngine`. One that samples nothing does not answer either."""
        if not self._rate(asyncio.get_running_loop().time()).request:
            await asyncio.Event().wait()

    def stats(self) -> EngineStats:
        """See `InferenceEngine`."""
        return EngineStats(
            0,
            len(self._in_flight),
            0,
            int(self._generated),
            self._prompts,
            self._busy_seconds,
            seats=64,
            seat_seconds=self._seat_seconds,
            computed_tokens=int(self._generated) + self._prompts,
        )


class Actor(EngineActor):
    def serve(self, engine: Engine) -> None:
        self._engine = engine  # type: ignore[assignment]
        self._watcher = asyncio.create_task(self._watch())

    async def end(self) -> None:
        await self._port.close()
        assert self._watcher is not None
        self._watcher.cancel()


@dataclass(frozen=True)
class Outcome:
    """Results of one simulation."""

    longest: float
    """Seconds."""
    asked: list[int]
    """Requests that each engine got."""
    moves: int


def play(
    rates: Sequence[Callable[[float], Rate]],
    *,
    sessions: int = 12,
    turns: int = 6,
    tokens: int = 400,
    prompt: int = 200,
    session_turns: int = 100,
) -> Outcome:
    """Play so many turns after each other, all sessions at once, and check each response.

    Args:
        session_turns: turns after which a session ends, and another one begins.
    """

    async def episode(client: GenerationClient, number: int) -> float:
        longest, loop = 0.0, asyncio.get_running_loop()
        for turn in range(turns):
            began = loop.time()
            session = f"{number}.{turn // session_turns}"
            request = GenerationRequest(
                f"{number}.{turn}",
                session,
                np.ones(prompt, np.int32),
                SamplingParams(tokens - 10 * (number % 5)),
            )
            response = await client.generate(request)
            # Each token is its number in the response.
            np.testing.assert_array_equal(
                response.tokens_T, np.arange(request.sampling.max_new_tokens)
            )
            longest = max(longest, loop.time() - began)
            if not (turn + 1) % session_turns:
                client.end_session(session)
        return longest

    async def everything() -> Outcome:
        shared_node.set(Node("here", "127.0.0.1"))
        engines = [Engine(rate) for rate in rates]
        actors = [Actor(f"engine-{number}") for number in range(len(engines))]
        for actor, engine in zip(actors, engines, strict=True):
            actor.serve(engine)
        client = GenerationClient("c")
        client.set_engines({str(number): Remote(actor) for number, actor in enumerate(actors)})
        longest = await asyncio.gather(*(episode(client, number) for number in range(sessions)))
        client.set_engines({})
        for actor in actors:
            await actor.end()
        asked = [len(engine.requests) for engine in engines]
        return Outcome(max(longest), asked, sum(asked) - sessions * turns)

    return on_virtual_clock(everything())


def steady(rate: Rate) -> Callable[[float], Rate]:
    return lambda seconds: rate


def test_responses_leave_an_engine_that_falls_to_a_token_per_second() -> None:
    """Without that the longest takes six minutes."""
    fast = Rate(20)
    found = play([lambda seconds: Rate(1) if seconds > 30 else fast, steady(fast), steady(fast)])
    assert found.longest < 60
    assert 1 <= found.moves <= 12


def test_an_engine_that_answers_nothing_holds_no_response_for_long() -> None:
    fast = Rate(20)
    found = play([lambda seconds: Rate(0) if seconds > 30 else fast, steady(fast)])
    assert found.longest < 60


def test_an_engine_that_is_well_again_gets_sessions_again() -> None:
    fast = Rate(20)
    asked = [
        play(
            [lambda seconds: Rate(1) if 10 < seconds < end else fast, steady(fast)],
            sessions=4,
            turns=20,
            session_turns=1,
        ).asked[0]
        for end in (40, 1e9)
    ]
    assert asked[0] > asked[1] + 5


@pytest.mark.parametrize("total", [1e9, 60.0], ids=["each alone", "a CPU"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_engines_of_different_speed_share_the_work_and_nothing_moves(
    times: int, total: float
) -> None:
    found = play([steady(Rate(10, total)), steady(Rate(10 * times, times * total))], sessions=16)
    assert found.moves == 0
    assert sum(found.asked) == 16 * 6


def test_a_cpu_with_many_requests_is_not_slow_because_another_one_has_few() -> None:
    """What they compute is shared: to move all of them would turn the tables."""
    found = play([steady(Rate(100, 100)), steady(Rate(100, 100))], sessions=3, tokens=2000)
    assert found.moves == 0


def stats(
    seconds: float, generated: float, *, running: int = 4, prompts: int = 0, held: bool = False
) -> EngineStats:
    return EngineStats(
        0,
        running,
        0,
        int(generated),
        0,
        seconds,
        seat_seconds=running * seconds,
        computed_tokens=int(generated) + prompts,
        held=held,
    )


def measured(polls: list[EngineStats]) -> Speed | None:
    meter = SpeedMeter()
    return [meter.measure(poll) for poll in polls][-1]


def test_speed_is_measured_over_some_polls_and_never_too_slow() -> None:
    """A server may not have sent the last tokens of each request yet."""
    polls = [stats(5 * number, 1000 * number) for number in range(SPEED_POLLS + 1)]
    assert measured(polls[:-1]) is None
    speed = measured(polls)
    assert speed is not None
    unsent = STREAM_TOKENS * 4
    assert speed.total == pytest.approx((3000 + unsent) / 15)
    assert speed.request == pytest.approx((3000 + unsent) / 60)


def test_an_engine_that_computes_long_prompts_is_not_slow() -> None:
    decodes = measured([stats(5 * number, 200 * number) for number in range(4)])
    prefills = measured([stats(5 * number, 0, prompts=6400 * number) for number in range(4)])
    assert decodes == prefills


def test_time_without_requests_or_weights_says_nothing_about_speed() -> None:
    polls = [stats(5 * number, 1000 * number) for number in range(SPEED_POLLS + 1)]
    idle = [polls[-1]] * 50
    held = [stats(15 + 5 * number, 3000, held=True) for number in range(50)]
    assert measured([*polls, *idle]) == measured([*polls, *held]) == measured(polls)


def test_what_an_engine_can_compute_is_shared_by_more_requests() -> None:
    speed = Speed(request=50.0, total=100.0)
    assert [speed.with_requests(number, seats=4) for number in (1, 2, 4, 8)] == [50, 50, 25, 12.5]
    alone = Speed(request=50.0, total=1e9)
    assert [alone.with_requests(number, seats=4) for number in (1, 4, 8)] == [50, 50, 25]
