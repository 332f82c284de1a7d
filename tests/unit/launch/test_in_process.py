"""The launcher inside one process."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from agenticrun_api import Role
from agenticrun_workers.launch import ActorDied, ActorOptions, Launcher
from agenticrun_workers.launch.in_process import InProcessLauncher
from launcher_conformance import Counter, LauncherConformance, soon
from waiting import eventually_in_loop


@pytest.fixture(scope="class")
def launcher() -> Iterator[Launcher]:
    made = InProcessLauncher()
    yield made
    made.close()


class TestInProcessLauncher(LauncherConformance):
    """See `LauncherConformance`."""


class Closed:
    """Notes what happens to it."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    async def work(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self._notes.append("cancelled")

    async def leave(self) -> None:
        raise SystemExit(3)

    async def close(self) -> None:
        self._notes.append("closed")


async def test_the_gpus_of_an_actor_that_has_ended_are_free(launcher: Launcher) -> None:
    options = ActorOptions(Role.TRAINER, gpus=1)
    first, second = (launcher.start(options, Counter, 0) for _ in range(2))
    assert (await soon(second.call(lambda actor: actor.gpus())))[0] == ("1",)
    first.kill()
    (thread,) = first._actor.threads  # type: ignore[attr-defined]
    await eventually_in_loop(lambda: not thread.is_alive(), 10, "the end of the first actor")
    third = launcher.start(options, Counter, 0)
    assert (await soon(third.call(lambda actor: actor.gpus())))[0] == ("0",)
    for actor in (second, third):
        actor.kill()


async def test_the_end_of_the_launcher_ends_calls_objects_and_threads() -> None:
    launcher, notes = InProcessLauncher(), list[str]()
    before = threading.active_count()
    actor = launcher.start(ActorOptions(), Closed, notes)
    working = actor.call(lambda closed: closed.work())
    await asyncio.sleep(0.05)
    launcher.close()
    with pytest.raises(ActorDied, match="Closed died: its launcher was closed"):
        await soon(working)
    assert notes == ["cancelled", "closed"]
    assert threading.active_count() == before


async def test_an_actor_that_has_ended_is_forgotten() -> None:
    launcher = InProcessLauncher()
    killed = launcher.start(ActorOptions(), Closed, [])
    actor = weakref.ref(killed._actor)  # type: ignore[attr-defined]
    killed.kill()
    del killed

    def forgotten() -> bool:
        launcher.start(ActorOptions(), Closed, []).kill()
        gc.collect()
        return actor() is None

    await eventually_in_loop(forgotten, 60, "the launcher to forget it")
    launcher.close()


async def test_an_actor_that_leaves_its_process_is_dead_and_the_process_lives(
    launcher: Launcher,
) -> None:
    actor = launcher.start(ActorOptions(), Closed, [])
    with pytest.raises(ActorDied):
        await soon(actor.call(lambda closed: closed.leave()))
    with pytest.raises(ActorDied, match="SystemExit in leave: 3"):
        await soon(actor.call(lambda closed: closed.work()))
