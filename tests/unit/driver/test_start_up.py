"""The start of an attempt's actors: its order, its errors and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest

from agenticrun_api import Role, parse_run
from agenticrun_workers.driver.start_up import running_actors
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.inference.actor import EngineActor
from agenticrun_workers.models.source import TokenizerCorpus
from agenticrun_workers.placement import Placement
from agenticrun_workers.rollout.env_worker import EnvWorker
from agenticrun_workers.rollout.trajectory_store import TrajectoryStore
from agenticrun_workers.trainer.policy_rank import TrainerActor
from rollout_fakes import Remote
from runs import run_with
from waiting import eventually_in_loop

ANSWERS = {
    "describe": TokenizerCorpus((), ()),
    "make_model": {"config.json": b"{}"},
    "rendezvous": ("localhost", 1),
    "setup": 0,
    "warnings": [],
}
SILENT = ("health", "collect")
"""Polls: an actor answers them when something has happened."""


class Noted:
    """An actor that notes the calls it gets, and has its place."""

    def __init__(self, calls: list[str], role: Role) -> None:
        self._calls = calls
        self._role = role

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def answer(*_: Any) -> Any:
            self._calls.append(f"{self._role}.{method}")
            if method in SILENT:
                await asyncio.Event().wait()
            if method == "placement":
                return Placement(self._role.value, self._role, "node", "pod", 1)
            return ANSWERS.get(method)

        return answer


@pytest.mark.parametrize("placement", ["Disaggregated", "Colocated"])
async def test_each_actor_waits_for_what_it_needs(placement: str) -> None:
    calls: list[str] = []
    launcher = LauncherOf(
        {
            TrainerActor: partial(Noted, calls, Role.TRAINER),
            EngineActor: partial(Noted, calls, Role.INFERENCE),
            EnvWorker: partial(Noted, calls, Role.ENV),
            TrajectoryStore: partial(Noted, calls, Role.DRIVER),
        }
    )
    async with running_actors(
        parse_run(run_with(("spec.placement", placement))), launcher
    ) as actors:
        at = calls.index
        made = at("trainer.make_model")
        assert at("env.describe") < made < min(at("inference.start"), at("env.setup"))
        assert made < at("trainer.setup") < at("trainer.set_stores")
        assert at("trainer.set_stores") < len(calls) - calls[::-1].index("env.set_endpoints")
        if placement == "Colocated":
            assert at("trainer.placement") < at("inference.placement")
            assert at("inference.use_gpus") < at("inference.start") < at("inference.sleep")
            assert at("inference.sleep") < at("trainer.setup")
        else:
            assert not {"inference.use_gpus", "inference.sleep"} & {*calls}
        assert actors.trainers.parts == 1
        assert sorted(actors.traced()) == ["engine-0", "env worker 1", "trainer-0"]
    assert all(handle.killed for _, handle in launcher.started)


class Starting:
    """An actor that never has a place."""

    async def placement(self) -> Any:
        await asyncio.Event().wait()


class FailingWorker(Starting):
    """An env worker whose environment does not work."""

    async def placement(self) -> Any:
        return Placement("worker", Role.ENV, "node", "pod", 1)

    async def describe(self) -> TokenizerCorpus:
        raise InvalidConfig("spec.pipeline.envs", "no such level") from OSError("no file")


class LauncherOf:
    """Starts such actors of the driver's classes, else `Starting`."""

    def __init__(self, actors: dict[type, Callable[[], Any]] | None = None) -> None:
        self._actors = actors or {}
        self.started: list[tuple[type, Remote]] = []

    def start(self, *args: Any, **_: Any) -> Any:
        cls: type = args[1]
        handle = Remote(self._actors.get(cls, Starting)())
        self.started.append((cls, handle))
        return handle

    def put(self, value: Any) -> Any:
        raise AssertionError

    def offers(self, node_id: str) -> list[str]:
        return [role.value for role in Role]


async def test_a_start_that_fails_raises_its_error_and_ends_all_actors() -> None:
    launcher = LauncherOf({EnvWorker: FailingWorker})
    with pytest.raises(InvalidConfig, match="no such level") as raised:
        async with running_actors(parse_run(run_with()), launcher):
            raise AssertionError("it has not started")
    assert isinstance(raised.value.__cause__, OSError)
    assert {cls for cls, _ in launcher.started} == {EnvWorker, EngineActor, TrainerActor}
    assert all(handle.killed for _, handle in launcher.started)


async def test_a_start_that_is_given_up_ends_all_actors() -> None:
    launcher = LauncherOf()
    async with AsyncExitStack() as stack:
        actors = running_actors(parse_run(run_with()), launcher)
        starting = asyncio.create_task(stack.enter_async_context(actors))
        await eventually_in_loop(lambda: len(launcher.started) == 3, 60, "three actors start")
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert all(handle.killed for _, handle in launcher.started)
