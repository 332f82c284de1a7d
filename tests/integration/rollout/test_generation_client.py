"""The generation client against real engine actors: few calls, sticky sessions, and engines that die."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import numpy as np
import pytest
import ray

from agenticrun_workers.rollout.generation_client import Answer, GenerationClient, RequestRefused
from agenticrun_workers.rollout.outbox import Outbox
from agenticrun_workers.rollout.wire import pack, unpack
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("ray_node")


class EchoEngine:
    """Answers with the prompt's last token plus one, after a moment."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._outbox: Outbox[Answer] = Outbox()
        self._sessions: list[str] = []
        self._submits = 0
        self._aborted: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, client: str, requests: bytes) -> None:
        self._submits += 1
        for request in unpack(requests):
            self._sessions.append(request.session)
            task = asyncio.create_task(self._answer(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def collect(self, client: str) -> bytes:
        return pack((await self._outbox.take(), len(self._tasks)))

    async def abort(self, client: str, request_ids: list[str]) -> None:
        self._aborted += request_ids

    async def seen(self) -> tuple[int, list[str], int]:
        return self._submits, self._sessions, os.getpid()

    async def aborted(self) -> list[str]:
        return self._aborted

    async def _answer(self, request: GenerationRequest) -> None:
        await asyncio.sleep(self._seconds)
        if len(request.prompt_tokens) == 0:
            self._outbox.put(Answer(request.request_id, None, "InvalidRequest: the prompt is empty"))
            return
        token = np.array([request.prompt_tokens[-1] + 1], np.int32)
        generation = Generation(token, np.zeros(1, np.float32), np.zeros(1, np.int32), FinishReason.STOP)
        self._outbox.put(Answer(request.request_id, generation))


def engine(seconds: float = 0.05) -> Any:
    return ray.remote(EchoEngine).options(num_cpus=0, max_concurrency=1000).remote(seconds)


def request(number: int, turn: int = 1, tokens: int = 1) -> GenerationRequest:
    return GenerationRequest(f"{number}-{turn}", str(number), np.full(tokens, number, np.int32), SamplingParams(1))


async def ask(client: GenerationClient, number: int, turn: int = 1) -> int:
    generation = await asyncio.wait_for(client.generate(request(number, turn)), 60)
    return int(generation.tokens_T[0])


async def test_requests_of_one_tick_travel_in_one_call() -> None:
    only = engine()
    client = GenerationClient("c")
    client.set_engines({"a": only})
    assert await asyncio.gather(*(ask(client, number) for number in range(100))) == list(range(1, 101))
    submits, sessions, _ = await only.seen.remote()
    assert submits == 1
    assert len(sessions) == 100


async def test_sessions_stay_on_their_engine_and_are_spread() -> None:
    engines = {"a": engine(), "b": engine()}
    client = GenerationClient("c")
    client.set_engines(engines)
    for turn in (1, 2, 3):
        await asyncio.gather(*(ask(client, number, turn) for number in range(40)))
    seen = [set((await handle.seen.remote())[1]) for handle in engines.values()]
    assert seen[0] & seen[1] == set()
    assert min(len(sessions) for sessions in seen) >= 15


async def test_requests_of_a_dead_engine_go_on_at_another_one() -> None:
    engines = {"a": engine(1.0), "b": engine(1.0)}
    client = GenerationClient("c")
    client.set_engines(engines)
    asking = asyncio.gather(*(ask(client, number) for number in range(20)))
    await asyncio.sleep(0.3)
    os.kill((await engines["a"].seen.remote())[2], signal.SIGKILL)
    assert await asking == list(range(1, 21))


async def test_requests_wait_for_the_replacement_of_the_last_engine() -> None:
    first = engine(1.0)
    client = GenerationClient("c")
    client.set_engines({"a": first})
    asking = asyncio.gather(*(ask(client, number) for number in range(5)))
    await asyncio.sleep(0.3)
    os.kill((await first.seen.remote())[2], signal.SIGKILL)
    client.set_engines({})
    await asyncio.sleep(0.1)
    client.set_engines({"b": engine(0.01)})
    assert await asking == [1, 2, 3, 4, 5]


async def test_a_refused_request_costs_only_itself() -> None:
    client = GenerationClient("c")
    client.set_engines({"a": engine()})
    bad = asyncio.create_task(client.generate(request(7, tokens=0)))
    assert await ask(client, 1) == 2
    with pytest.raises(RequestRefused, match="the prompt is empty"):
        await asyncio.wait_for(bad, 10)


async def test_a_caller_that_gives_up_stops_the_sampling_of_its_request_only() -> None:
    slow = engine(0.5)
    client = GenerationClient("c")
    client.set_engines({"a": slow})
    asking = [asyncio.create_task(ask(client, number)) for number in range(3)]
    await asyncio.sleep(0.1)
    asking[1].cancel()
    assert (await asking[0], await asking[2]) == (1, 3)
    assert await slow.aborted.remote() == ["1-1"]


async def test_a_step_of_rollout_takes_few_calls() -> None:
    """128 episodes of 8 turns on a fast engine: 1024 requests travel together, however they come apart."""
    fast = engine(0.01)
    client = GenerationClient("c")
    client.set_engines({"a": fast})

    async def episode(number: int) -> None:
        for turn in range(1, 9):
            await ask(client, number, turn)

    await asyncio.gather(*(episode(number) for number in range(128)))
    submits, sessions, _ = await fast.seen.remote()
    assert len(sessions) == 1024
    assert submits < 100
