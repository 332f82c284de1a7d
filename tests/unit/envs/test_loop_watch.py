"""A user's code that blocks the event loop is interrupted, and named."""

from __future__ import annotations

import asyncio
import bdb
import threading
import time
from typing import Any

import pytest

from agenticrun_workers.envs import Env, EnvCalls, EnvFault
from agenticrun_workers.envs.calls import Outcome, in_task
from agenticrun_workers.envs.loop_watch import EventLoopBlocked, LoopWatch
from waiting import eventually

TICK = 0.05


async def spins() -> None:
    while True:
        pass  # the line of the test


async def outcome_of(work: Any, ticks: int = 4) -> Outcome:
    with LoopWatch(ticks, TICK):
        return await asyncio.wait_for(in_task(work), 60)


async def test_code_that_never_awaits_is_interrupted_and_the_loop_continues() -> None:
    outcome = await outcome_of(spins())
    assert isinstance(outcome.error, EventLoopBlocked)
    assert "write a plain def, which runs in a thread" in str(outcome.error)
    await asyncio.sleep(0.01)


async def test_no_handler_of_a_user_takes_it() -> None:
    async def stubborn() -> None:
        while True:
            try:
                await spins()
            except Exception:
                continue

    assert isinstance((await outcome_of(stubborn())).error, EventLoopBlocked)


async def test_code_that_awaits_is_left_alone() -> None:
    async def patient() -> str:
        for _ in range(20):
            time.sleep(TICK / 2)
            await asyncio.sleep(0)
            await asyncio.sleep(TICK)
        return "done"

    assert (await outcome_of(patient())).value == "done"


async def test_our_own_code_is_never_interrupted() -> None:
    with LoopWatch(2, TICK):
        time.sleep(10 * TICK)
        await asyncio.sleep(TICK)


async def test_a_debugger_may_stop_as_long_as_it_likes() -> None:
    async def stops() -> Any:
        return bdb.Bdb().runcall(lambda: time.sleep(10 * TICK) or "continued")  # type: ignore[func-returns-value]

    assert (await outcome_of(stops(), ticks=2)).value == "continued"


async def test_an_environment_that_blocks_the_loop_costs_its_episode() -> None:
    class Blocks:
        instruction = ""

        async def reset(self, seed: int) -> str:
            while True:
                pass

    env: Env = Blocks()  # type: ignore[assignment]
    with (
        LoopWatch(4, TICK),
        pytest.raises(EnvFault, match=r"EventLoopBlocked.*test_loop_watch\.py:"),
    ):
        await EnvCalls().reset(env, 1, "train")  # type: ignore[arg-type]


def test_a_watch_ends_with_its_loop() -> None:
    async def leave_it_open() -> None:
        LoopWatch(1, TICK).__enter__()

    asyncio.run(leave_it_open())
    eventually(
        lambda: not any(thread.name == "loop-watch" for thread in threading.enumerate()),
        20,
        "the watch has ended",
    )
