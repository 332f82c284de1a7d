"""The environments of an env worker: what they hold is given back, and places are bounded."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar

import pytest

from agenticrun_api import Pipeline
from agenticrun_workers.envs import StepResult
from agenticrun_workers.rollout.episode_runner import EnvCache
from tiny_runs import tiny_run
from waiting import eventually_in_loop


class Holding:
    """An environment that holds something, for one episode."""

    reusable = False
    instances: ClassVar[list[Holding]] = []

    def __init__(self) -> None:
        self.closed = 0
        self.instances.append(self)

    def reset(self, seed: int, split: str) -> str:
        return "?"

    def step(self, action: str) -> StepResult:
        return StepResult("over", 0.0, terminated=True)

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        self.closed += 1


class Reused(Holding):
    reusable = True


class Stubborn(Holding):
    def close(self) -> Any:
        raise OSError("it is busy")


def cache(kind: type, **spec: Any) -> EnvCache:
    Holding.instances.clear()
    return EnvCache(pipeline(kind, **spec))


def pipeline(kind: type, **spec: Any) -> Pipeline:
    return tiny_run(
        envs=[{"tag": "A", "type": f"{__name__}:{kind.__name__}", **spec}],
        trainEnvs={"groups": 4, "groupSize": 2, "tags": ["A"]},
        valEnvs=None,
        evalSteps=0,
    ).spec.pipeline


async def test_an_environment_is_closed_once_when_it_is_no_longer_needed() -> None:
    envs = cache(Holding)
    envs.release("A", await envs.take("A"))
    envs.discard("A", await envs.take("A"))
    await eventually_in_loop(
        lambda: [each.closed for each in Holding.instances] == [1, 1], 5, "both are closed"
    )


async def test_idle_environments_are_closed_when_room_is_made() -> None:
    envs = cache(Reused)
    envs.release("A", await envs.take("A"))
    envs.release("A", await envs.take("A"))
    (only,) = Holding.instances
    assert only.closed == 0
    envs.discard_idle()
    await eventually_in_loop(lambda: only.closed == 1, 5, "it is closed")


async def test_an_environment_that_cannot_be_closed_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    envs = cache(Stubborn, maxConcurrent=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            envs.discard("A", await asyncio.wait_for(envs.take("A"), 5))
        await asyncio.wait_for(envs.take("A"), 5)
    assert ["it is busy" in message for message in caplog.messages] == [True]


async def test_others_wait_for_a_place_until_one_is_closed() -> None:
    envs = cache(Holding, maxConcurrent=2)
    first, second = await envs.take("A"), await envs.take("A")
    third = asyncio.create_task(envs.take("A"))
    await asyncio.sleep(0.02)
    assert not third.done()
    envs.release("A", first)
    await asyncio.wait_for(third, 5)
    assert Holding.instances[0].closed == 1
    assert Holding.instances[1].closed == 0
    envs.release("A", second)
    await eventually_in_loop(lambda: Holding.instances[1].closed == 1, 5, "it is closed")


async def test_a_place_that_was_waited_for_in_vain_is_not_lost() -> None:
    envs = cache(Reused, maxConcurrent=1)
    only = await envs.take("A")
    waiting = asyncio.create_task(envs.take("A"))
    await asyncio.sleep(0)
    waiting.cancel()
    envs.release("A", only)
    assert await asyncio.wait_for(envs.take("A"), 5) is only


async def test_a_place_is_free_again_after_a_constructor_that_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    envs = cache(Reused, maxConcurrent=1)

    def fails(*_: Any) -> Any:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr("agenticrun_workers.rollout.episode_runner.make_env", fails)
        with pytest.raises(RuntimeError):
            await envs.take("A")
    await asyncio.wait_for(envs.take("A"), 5)
