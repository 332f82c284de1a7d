"""A process that answers nothing is found by its missed polls, and killed."""

from __future__ import annotations

import asyncio
import time

import pytest

from agenticrun_workers.launch import ActorDied, ActorOptions, ActorUnavailable, liveness
from agenticrun_workers.launch.in_process import InProcessLauncher
from launcher_conformance import Keeper, soon
from rollout_fakes import Mute, Remote


@pytest.fixture(autouse=True)
def a_short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(liveness, "FROZEN_POLLS", 3)


async def test_an_actor_that_does_not_answer_is_killed_and_all_calls_to_it_fail() -> None:
    actor = Remote(Mute())
    other = actor.call(lambda mute: mute.work())
    with pytest.raises(ActorUnavailable, match="not answered for 0 s: it is frozen"):
        await soon(actor.poll(lambda mute: mute.health()))
    assert actor.killed
    with pytest.raises(ActorDied):
        await soon(other)


async def test_an_actor_that_cannot_be_reached_is_killed() -> None:
    class OutOfReach:
        async def health(self) -> None:
            raise ActorUnavailable("the network is slow")

    actor = Remote(OutOfReach())
    with pytest.raises(ActorUnavailable, match="the network is slow"):
        await soon(actor.poll(lambda actor: actor.health()))
    assert actor.killed


async def test_an_answer_within_the_limit_is_the_methods() -> None:
    class Slow:
        async def health(self) -> int:
            await asyncio.sleep(0.08)
            return 3

        async def fail(self) -> None:
            raise ValueError("no")

    actor = Remote(Slow())
    assert await soon(actor.poll(lambda slow: slow.health())) == 3
    with pytest.raises(ValueError, match="no"):
        await soon(actor.poll(lambda slow: slow.fail()))
    assert not actor.killed


async def test_a_process_that_was_stopped_itself_calls_nobody_frozen() -> None:
    """All its time limits have passed when it continues, and the answers are there."""
    loop = asyncio.get_running_loop()
    answer = loop.create_future()
    loop.call_later(0.06, answer.set_result, 1)
    asking = asyncio.create_task(liveness.answered(answer))
    await asyncio.sleep(0)
    time.sleep(0.5)
    assert await soon(asking) == 1


async def test_an_actor_in_this_process_may_take_its_time() -> None:
    """A debugger stops in it."""
    launcher = InProcessLauncher()
    keeper = launcher.start(ActorOptions(), Keeper)
    polling = asyncio.ensure_future(keeper.poll(lambda actor: actor.get("a")))
    await asyncio.sleep(0.5)
    await soon(keeper.call(lambda actor: actor.put("a", 7)))
    assert await soon(polling) == 7
    await asyncio.to_thread(launcher.close)
