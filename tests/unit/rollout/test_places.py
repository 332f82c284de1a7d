"""Episodes begin when there is a place and memory for them, and one may always run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.pod_memory import PodMemory
from agenticrun_workers.rollout.env_worker import (
    FULL_SHARE,
    LOOK_EPISODES,
    WAIT_SECONDS,
    EpisodePlaces,
)
from virtual_clock import on_virtual_clock

LIMIT = 1000
FULL = int(FULL_SHARE * LIMIT) + 1


class FakeMemory(PodMemory):
    """Memory of a pod, as a test says."""

    def __init__(self, used: Callable[[], int], limit: int | None = LIMIT) -> None:
        self._used, self._bytes = used, limit

    def limit(self) -> int | None:
        return self._bytes

    def used(self) -> int:
        return self._used()


class Worker:
    """Runs episodes, each for some seconds, and notes how many run and how long they waited.

    Args:
        places: largest number of episodes at once.
        used: memory in use.
        limit: of the memory.
    """

    def __init__(
        self, places: int, used: Callable[[Worker], int], limit: int | None = LIMIT
    ) -> None:
        self.rooms = 0
        self.places = EpisodePlaces(places, self.make_room, FakeMemory(lambda: used(self), limit))
        self.running: set[int] = set()
        self.most = 0
        self.waited: dict[int, float] = {}

    def make_room(self) -> None:
        self.rooms += 1

    async def run(self, number: int, seconds: float) -> None:
        async with self.places.place() as waited:
            self.waited[number] = waited
            self.running.add(number)
            self.most = max(self.most, len(self.running))
            try:
                await asyncio.sleep(seconds)
            finally:
                self.running.discard(number)

    async def run_all(self, seconds: list[float]) -> None:
        await asyncio.gather(*(self.run(number, each) for number, each in enumerate(seconds)))


def test_with_full_memory_one_episode_runs_at_a_time_and_none_waits_for_ever() -> None:
    worker = Worker(8, lambda _: FULL)
    on_virtual_clock(worker.run_all([5.0] * 4))
    assert worker.most == 1
    assert worker.waited == pytest.approx({0: 0.0, 1: 5.0, 2: 5.0, 3: 5.0})
    assert worker.rooms == 3, "ended episodes leave environments behind"


def test_episodes_begin_when_memory_is_free_again() -> None:
    def used(_: Worker) -> int:
        return FULL if asyncio.get_running_loop().time() < 3 * WAIT_SECONDS else 0

    worker = Worker(8, used)
    on_virtual_clock(worker.run_all([100.0] * 4))
    assert worker.most == 4
    assert max(worker.waited.values()) <= 4 * WAIT_SECONDS


def test_what_can_be_made_again_is_freed_before_episodes_wait() -> None:
    worker = Worker(8, lambda worker: 0 if worker.rooms else FULL)
    on_virtual_clock(worker.run_all([5.0] * 4))
    assert (worker.most, worker.rooms, sum(worker.waited.values())) == (4, 1, 0.0)


def test_memory_that_cannot_be_read_counts_as_free_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def vanished(_: Worker) -> int:
        raise FileNotFoundError("no memory.current")

    worker = Worker(4, vanished)
    on_virtual_clock(worker.run_all([5.0] * 8))
    assert (worker.most, worker.rooms) == (4, 0)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "cannot be read: no memory.current" in said


def test_without_a_limit_memory_is_not_looked_at() -> None:
    def never(_: Worker) -> int:
        raise AssertionError

    worker = Worker(3, never, limit=None)
    on_virtual_clock(worker.run_all([5.0] * 9))
    assert worker.most == 3


@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.floats(0.1, 9.0), st.booleans()), min_size=1, max_size=60),
    st.integers(10, 400),
    st.integers(0, 950),
)
def test_episodes_keep_within_places_and_memory_and_all_of_them_end(
    places: int, episodes: list[tuple[float, bool]], each: int, base: int
) -> None:
    """An episode takes `each` bytes while it runs; some are cancelled."""
    worker = Worker(places, lambda worker: base + each * len(worker.running))

    async def play() -> None:
        running = [
            asyncio.create_task(worker.run(number, seconds + 1.0))
            for number, (seconds, _) in enumerate(episodes)
        ]
        for task, (seconds, cancelled) in zip(running, episodes, strict=True):
            if cancelled:
                asyncio.get_running_loop().call_later(seconds, task.cancel)
        async with asyncio.timeout(20 * len(episodes)):
            await asyncio.gather(*running, return_exceptions=True)
        assert all(
            cancelled or number in worker.waited for number, (_, cancelled) in enumerate(episodes)
        )
        for _ in range(places):  # none is lost
            await worker.places._places.acquire()
        assert (worker.places._running, worker.places._turn.locked()) == (0, False)

    on_virtual_clock(play())
    fitting = max(0, int((FULL_SHARE * LIMIT - base) // each))
    assert worker.most <= min(places, fitting + 1 + LOOK_EPISODES)


VERSIONS = {
    1: (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_",
    ),
    2: ("memory.max", "memory.current", "memory.stat", ""),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("limit", "expected"), [("3221225472", 3221225472), ("9223372036854771712", None)]
)
def test_memory_is_read_from_control_groups_of_both_versions(
    tmp_path: Path, version: int, limit: str, expected: int | None
) -> None:
    limit_file, usage, stat, prefix = VERSIONS[version]
    (tmp_path / "memory").mkdir()
    (tmp_path / limit_file).write_text(f"{limit}\n")
    (tmp_path / usage).write_text("1000000\n")
    (tmp_path / stat).write_text(
        f"anon 5\ninactive_file 7\n{prefix}inactive_file 300000\n{prefix}active_file 100000\n"
        if prefix
        else "anon 5\ninactive_file 300000\nactive_file 100000\n"
    )
    memory = PodMemory(tmp_path)
    assert (memory.limit(), memory.used()) == (expected, 600_000)


def test_a_machine_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert PodMemory(tmp_path).limit() is None
    (tmp_path / "memory.current").write_text("5\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert PodMemory(tmp_path).limit() is None
