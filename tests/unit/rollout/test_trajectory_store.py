"""A store returns what it was given, from memory or from disk, and keeps within its memory."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.pod_memory import PodMemory
from agenticrun_workers.rollout import trajectory_store
from agenticrun_workers.rollout.trajectory_store import TrajectoryStore, memory_of
from agenticrun_workers.serialization import pack, unpack
from agenticrun_workers.types import EpisodeKey, StopReason, Stream, Trajectory, Turn


def trajectory(member: int, tokens: int = 20, turns: int = 2, attempt: int = 0) -> Trajectory:
    rng = np.random.default_rng((member, attempt))
    played = tuple(
        Turn(
            rng.integers(0, 50_000, tokens // 2).astype(np.int32),
            rng.integers(0, 50_000, tokens).astype(np.int32),
            -rng.random(tokens, np.float32),
            np.full(tokens, 3, np.int32),
            float(number),
            state=rng.bytes(32),
        )
        for number in range(turns)
    )
    key = EpisodeKey(Stream.TRAIN, 0, member)
    return Trajectory(key, "A", played, StopReason.COMPLETED, {"attempt": float(attempt)})


def keys(members: Sequence[int]) -> list[EpisodeKey]:
    return [EpisodeKey(Stream.TRAIN, 0, member) for member in members]


async def kept(store: TrajectoryStore, members: Sequence[int]) -> list[bytes]:
    """Return what the store returns for these members, each packed."""
    return [pack(each) for each in await store.get(keys(members))]


MEMBERS = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)
STEPS = st.lists(st.tuples(st.sampled_from(["put", "put", "get", "discard"]), MEMBERS), max_size=15)


@given(STEPS, st.integers(0, 8), st.booleans())
def test_a_store_with_any_bound_is_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, list[int]]],
    room: int,
    at_once: bool,
) -> None:
    """Independent definition: a dictionary of what was put last and not discarded."""
    folder, limit = tmp_path_factory.mktemp("spill"), room * memory_of(trajectory(0))

    async def play() -> None:
        store, expected = TrajectoryStore(limit, folder), dict[int, bytes]()
        puts: list[asyncio.Task[None]] = []
        for number, (step, members) in enumerate(steps):
            if step == "put":
                put = [trajectory(member, attempt=number) for member in members]
                expected |= {each.key.member: pack(each) for each in put}
                puts.append(asyncio.create_task(store.put(put)))
                await asyncio.sleep(0)
            elif step == "discard":
                await store.discard(keys(members))
                expected = {m: data for m, data in expected.items() if m not in members}
            else:
                there = sorted(expected.keys() & set(members))
                assert await kept(store, there) == [expected[member] for member in there]
            if not at_once:
                await asyncio.gather(*puts)
                assert (await store.use()).memory_bytes <= limit
        await asyncio.gather(*puts)
        assert await kept(store, sorted(expected)) == [expected[m] for m in sorted(expected)]
        assert await store.size() == len(expected)
        use = await store.use()
        assert use.memory_bytes <= limit
        assert (use.spilled_bytes == 0) == (use.spilled_trajectories == 0)
        await store.discard(keys(range(10)))
        await asyncio.sleep(0)
        assert (await store.use()).memory_bytes == 0
        assert store._spill_file.segments <= 1
        assert not [*folder.iterdir()], "files have no names, so that none outlives the process"

    asyncio.run(play())


async def test_what_comes_while_memory_is_full_is_spilled_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = TrajectoryStore(2 * memory_of(trajectory(0)), tmp_path)
    await store.put([trajectory(0)])
    await store.put([trajectory(1), trajectory(2)])
    await store.put([trajectory(3)])
    assert [store._stored[key].block is not None for key in keys(range(4))] == [
        False,
        False,
        True,
        True,
    ], "the newest are trained on last"
    use = await store.use()
    assert use.spilled_trajectories == 2
    assert use.spilled_bytes == sum(len(pack(trajectory(member))) for member in (2, 3))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "raise spec.roles.trainer.memory, or lower staleness.max" in said
    await store.discard(keys([0]))
    await store.put([trajectory(4)])
    assert (await store.use()).spilled_trajectories == 2, "there is room again"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (trajectory_store._hung(), "the disk has not answered for 60 s"),
    ],
    ids=["full", "hangs"],
)
async def test_without_a_disk_trajectories_stay_in_memory_and_that_is_said_and_counted(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: OSError,
    words: str,
) -> None:
    def no_space(*_: object) -> None:
        raise error

    monkeypatch.setattr(trajectory_store, "_write_at", no_space)
    store = TrajectoryStore(0, tmp_path)
    for member in range(3):
        await store.put([trajectory(member)])
    assert await kept(store, range(3)) == [pack(trajectory(member)) for member in range(3)]
    use = await store.use()
    assert (use.spilled_trajectories, use.memory_bytes) == (0, 3 * memory_of(trajectory(0)))
    assert use.unspilled_trajectories == 3
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"stay in memory: {words}" in said
    await store.discard(keys(range(3)))
    assert (await store.use()).memory_bytes == 0


@pytest.mark.parametrize(
    ("turns", "tokens"), [(1, 10), (4, 100), (20, 20), (8, 512)], ids=lambda n: str(n)
)
def test_the_memory_of_a_trajectory_is_known_within_a_tenth(turns: int, tokens: int) -> None:
    packed = pack([trajectory(member, tokens, turns) for member in range(100)])
    tracemalloc.start()
    try:
        several = unpack(packed)
        measured = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert sum(map(memory_of, several)) == pytest.approx(measured, rel=0.1)


def test_a_store_takes_a_tenth_of_its_pod_or_of_a_machine_without_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PodMemory, "limit", lambda _: 3 << 30)
    assert trajectory_store.default_limit() == (3 << 30) // 10
    monkeypatch.setattr(PodMemory, "limit", lambda _: None)
    monkeypatch.setattr(trajectory_store, "machine_bytes", lambda: 64 << 30)
    assert trajectory_store.default_limit() == (64 << 30) // 10
