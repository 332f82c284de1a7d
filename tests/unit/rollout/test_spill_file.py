"""Bytes come back from disk as they were, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.launch.liveness import NoAnswer
from agenticrun_workers.rollout import trajectory_store
from agenticrun_workers.rollout.trajectory_store import Block, DamagedBlock, HungDisk, SpillFile
from waiting import eventually_in_loop

FULL = Path("/dev/full")


def open_files(folder: Path) -> int:
    """Number of files below a folder that this process has open, deleted ones included."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(descriptor))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return sum(link.startswith(str(folder)) for link in links)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.binary(max_size=40)),
        st.tuples(st.sampled_from(["free", "read"]), st.integers(0, 99)),
    ),
    max_size=40,
)


@given(STEPS, st.integers(1, 64))
def test_blocks_are_read_as_they_were_written_whatever_was_freed_in_between(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, object]], segment: int
) -> None:
    folder = tmp_path_factory.mktemp("spill")

    async def play() -> None:
        file = SpillFile(folder)
        expected: list[tuple[Block, bytes]] = []
        for step, value in steps:
            if isinstance(value, bytes):
                expected.append((await file.write(value), value))
            elif expected:
                assert isinstance(value, int)
                block, data = expected[value % len(expected)]
                if step == "read":
                    assert await file.read(block) == data
                else:
                    expected.remove((block, data))
                    file.free(block)
        for block, data in expected:
            assert await file.read(block) == data
        await asyncio.sleep(0)  # the threads' callbacks
        held = {block.segment for block, _ in expected}
        assert len(held) <= file.segments <= len(held) + 1
        await eventually_in_loop(
            lambda: open_files(folder) == file.segments, 60, "threads have closed the others"
        )
        for block, _ in expected:
            file.free(block)
        assert file.segments <= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trajectory_store, "SEGMENT_BYTES", segment)
        asyncio.run(play())
    assert (list(folder.iterdir()), open_files(folder)) == ([], 0)


async def test_blocks_that_are_written_at_once_do_not_mix(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    data = [bytes([number]) * 5000 for number in range(100)]
    blocks = await asyncio.gather(*map(file.write, data))
    assert await asyncio.gather(*map(file.read, blocks)) == data
    assert file.segments == 1


async def test_a_disk_that_returns_something_else_is_an_error(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    block = await file.write(b"tokens")
    os.pwrite(block.segment.descriptor(), b"T", block.offset)
    with pytest.raises(DamagedBlock, match="does not return what was spilled to it"):
        await file.read(block)
    os.ftruncate(block.segment.descriptor(), 3)
    with pytest.raises(DamagedBlock, match="does not return what was spilled to it"):
        await file.read(block)


async def test_a_full_disk_is_an_error_and_keeps_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SpillFile(tmp_path)
    good = await file.write(b"before")
    full = os.open(FULL, os.O_WRONLY)
    with monkeypatch.context() as patch:
        patch.setattr(
            trajectory_store, "_write_at", lambda _, data, offset: os.pwrite(full, data, offset)
        )
        with pytest.raises(OSError, match="No space left"):
            await file.write(b"never")
    os.close(full)
    assert await file.read(good) == b"before"
    file.free(good)
    await asyncio.sleep(0)
    assert file.segments == 0


async def test_a_write_whose_caller_is_cancelled_keeps_its_file_open_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would write into whatever file gets the same descriptor."""
    goes_on, begun, open_then = threading.Event(), asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def slow_write(descriptor: int, data: bytes, offset: int) -> None:
        loop.call_soon_threadsafe(begun.set)
        goes_on.wait(60)
        open_then.append(os.pwrite(descriptor, data, offset))

    monkeypatch.setattr(trajectory_store, "_write_at", slow_write)
    file = SpillFile(tmp_path)
    writing = asyncio.create_task(file.write(b"tokens"))
    await begun.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    goes_on.set()
    await eventually_in_loop(lambda: not file.segments, 60, "the segment is closed")
    assert open_then == [6]


async def test_a_disk_that_hangs_while_a_file_is_made_does_not_hold_up_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, begun = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    made = tempfile.TemporaryFile

    def hangs(**options: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        assert goes_on.wait(60), "the event loop goes on meanwhile"
        return made(**options)

    monkeypatch.setattr(tempfile, "TemporaryFile", hangs)
    file = SpillFile(tmp_path)
    writing = asyncio.create_task(file.write(b"block"))
    await asyncio.wait_for(begun.wait(), 30)
    goes_on.set()
    assert await file.read(await writing) == b"block"


async def test_a_disk_that_hangs_is_not_waited_for_and_works_again_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, begun = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    file = SpillFile(tmp_path)
    old = await file.write(b"before")

    def hangs(*_: object) -> None:
        loop.call_soon_threadsafe(begun.set)
        goes_on.wait(60)

    async def never(_: object) -> None:
        await begun.wait()
        raise NoAnswer

    with monkeypatch.context() as patch:
        patch.setattr(trajectory_store, "_write_at", hangs)
        patch.setattr(trajectory_store, "answered", never)
        with pytest.raises(HungDisk, match="the disk has not answered for 60 s"):
            await file.write(b"never")
        patch.setattr(trajectory_store, "_read_at", hangs)
        with pytest.raises(HungDisk):
            await file.read(old)
    with pytest.raises(HungDisk):
        await file.write(b"not tried: it would keep another thread")
    goes_on.set()
    await eventually_in_loop(lambda: not file._late, 60, "the disk answers")
    new = await file.write(b"after")
    assert [await file.read(block) for block in (old, new)] == [b"before", b"after"]
    for block in (old, new):
        file.free(block)
    await eventually_in_loop(lambda: file.segments <= 1, 60, "the segments are closed")
