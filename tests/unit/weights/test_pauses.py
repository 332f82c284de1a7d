"""How long engines pause to load weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.weights.buckets import WeightFile
from agenticrun_workers.weights.load_starts import busy_seconds, latest_start
from agenticrun_workers.weights.sync import FileSync
from agenticrun_workers.weights.transports import Receiver, ReplayStream
from virtual_clock import on_virtual_clock

SECONDS = st.floats(0.0, 10.0)
FILES = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=8)


def load(start: float, arrivals_B: list[float], loads_B: list[float]) -> tuple[float, list[float]]:
    """Return for how long a load that begins at `start` waits for files, and each file's end."""
    clock, waited, ends = start, 0.0, []
    for arrived, seconds in zip(arrivals_B, loads_B, strict=True):
        waited += max(0.0, arrived - clock)
        clock = max(clock, arrived) + seconds
        ends.append(clock)
    return waited, ends


@given(FILES)
def test_from_the_latest_start_a_load_never_waits_and_ends_no_later(
    files: list[tuple[float, float]],
) -> None:
    gaps, loads_B = zip(*files, strict=True)
    arrivals_B = [sum(gaps[1 : number + 1]) for number in range(len(gaps))]
    start = latest_start(arrivals_B, loads_B)
    waited, ends = load(start, arrivals_B, list(loads_B))
    _, ends_at_once = load(0.0, arrivals_B, list(loads_B))
    assert waited == pytest.approx(0.0, abs=1e-9)
    assert ends[-1] == pytest.approx(ends_at_once[-1])
    assert busy_seconds(arrivals_B, ends_at_once) == pytest.approx(loads_B)


class LoadingEngine:
    """Takes a second to load a file, one file after the other."""

    def __init__(self) -> None:
        self._loading = asyncio.Lock()

    def call(self, method: Callable[[Any], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Run a method of this object, as an `ActorHandle` does."""
        return asyncio.ensure_future(method(self))

    async def begin_update(self, version: int) -> None: ...

    async def take_bucket(self, path: str, checksum: int) -> None:
        async with self._loading:
            await asyncio.sleep(1.0)

    async def finish_update(self) -> None: ...


def file_sync() -> FileSync:
    """Return a sync of which nothing but the loading is used."""
    unused = cast("Any", None)
    sync = FileSync("run", [], "home", unused, bucket_bytes=1, delta=False)
    sync._version = 1
    return sync


async def pauses(gap: float, syncs: int) -> tuple[list[float], list[float]]:
    """Load ten files that arrive with gaps; return each sync's pause and its end."""
    sync, receiver = file_sync(), Receiver(cast("Any", LoadingEngine()), "home")
    loop, paused, ended = asyncio.get_running_loop(), [], []
    for _ in range(syncs):
        files: ReplayStream[WeightFile] = ReplayStream()
        began = loop.time()
        loading = asyncio.create_task(sync._load("engine-0", receiver, files))
        for number in range(10):
            await asyncio.sleep(gap if number else 0.0)
            files.put(WeightFile(str(number), 0))
        files.close()
        paused.append(await loading)
        ended.append(loop.time() - began)
    return paused, ended


def test_an_engine_samples_on_while_weights_arrive_slowly() -> None:
    """The first sync is not like the others, so the second one begins at once, too."""
    paused, ended = on_virtual_clock(pauses(gap=5.0, syncs=4))
    assert paused == pytest.approx([46.0, 46.0, 10.0, 10.0])
    assert ended == pytest.approx([46.0] * 4)


def test_an_engine_begins_at_once_where_weights_arrive_fast() -> None:
    paused, ended = on_virtual_clock(pauses(gap=0.1, syncs=3))
    assert paused == pytest.approx([10.0] * 3)
    assert ended == pytest.approx([10.0] * 3)


def test_an_engine_does_not_wait_for_more_than_the_last_file() -> None:
    async def slow_then_fast() -> tuple[float, float]:
        sync, receiver = file_sync(), Receiver(cast("Any", LoadingEngine()), "home")
        sync._starts.seconds["engine-0"] = 1000.0
        began = asyncio.get_running_loop().time()
        files = ReplayStream([WeightFile("0", 0)])
        paused = await sync._load("engine-0", receiver, files)
        return paused, asyncio.get_running_loop().time() - began

    assert on_virtual_clock(slow_then_fast()) == pytest.approx((1.0, 1.0))
