"""SpillFile: blocks of bytes that do not fit into memory, on a local disk until they are freed.

The blocks lie one after the other in segments, which are files without a name: the kernel deletes
them when this process ends, even if it is killed. A segment that is full is deleted with the last
of its blocks. So blocks that are freed in about the order in which they were written keep at most
one segment more than they need.
"""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from agenticrun_api.names import WORK_DIR
from agenticrun_workers.launch.liveness import FROZEN_POLLS, POLL_SECONDS, NoAnswer, answered

T = TypeVar("T")

SEGMENT_BYTES = 64 << 20
"""A segment that has so many bytes gets no other block."""


class DamagedBlock(Exception):
    """The disk returned other bytes than it got."""


class HungDisk(OSError):
    """The disk has not answered for too long."""


class _Segment:
    """A file without a name, which is deleted when it is closed: after its last use.

    To open and to close it may wait for the disk: call the methods in threads.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opening = threading.Lock()
        self._file: tuple[int, weakref.finalize[..., _Segment]] | None = None
        self.end = 0
        self.users = 0
        """Number of blocks and of running reads and writes."""

    def close(self) -> None:
        with self._opening:
            if self._file is not None:
                self._file[1]()

    def descriptor(self) -> int:
        """Return the descriptor of the file. The first call makes it."""
        with self._opening:
            if self._file is None:
                with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
                    descriptor = os.dup(file.fileno())
                self._file = descriptor, weakref.finalize(self, os.close, descriptor)
            return self._file[0]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The place and the checksum of bytes in a `SpillFile`."""

    segment: _Segment
    offset: int
    nbytes: int
    checksum: int
    """xxh3_64 of the bytes."""


class SpillFile:
    """Blocks on disk. Reads and writes run in threads, beside the event loop.

    Args:
        folder: where the segments lie; by default the pod's scratch space or, without one, the
            folder for temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or scratch_folder()
        self._segments: set[_Segment] = set()
        self._last: _Segment | None = None
        """The segment that gets the next block."""
        self._late = 0
        """Reads and writes that were given up. Each keeps its thread until the disk answers."""

    @property
    def segments(self) -> int:
        """Number of open files."""
        return len(self._segments)

    async def write(self, data: bytes) -> Block:
        """Write a block.

        Raises:
            HungDisk: it takes too long, or something else still does.
            OSError: for example, the disk is full.
        """
        if self._late:
            raise _hung()
        segment = self._last or _Segment(self.folder)
        self._segments.add(segment)
        block = Block(segment, segment.end, len(data), xxhash.xxh3_64_intdigest(data))
        segment.end += len(data)
        self._last = segment if segment.end < SEGMENT_BYTES else None
        segment.users += 1
        try:
            await self._in_thread(segment, lambda: _write(segment.descriptor(), data, block.offset))
        except BaseException:
            if self._last is segment:
                self._last = None  # what was written of this block is deleted with the others
            self.free(block)
            raise
        return block

    async def read(self, block: Block) -> bytes:
        """Return the bytes of a block that was not freed.

        Raises:
            DamagedBlock: the data read back differs from what was written.
            HungDisk: it takes too long.
        """
        data = await self._in_thread(
            block.segment, lambda: _read(block.segment.descriptor(), block.nbytes, block.offset)
        )
        if len(data) != block.nbytes or xxhash.xxh3_64_intdigest(data) != block.checksum:
            raise DamagedBlock(f"the disk of {self.folder} does not return what was spilled to it")
        return data

    def free(self, block: Block) -> None:
        """Delete a block."""
        block.segment.users -= 1
        self._close_unused(block.segment)

    async def _in_thread(self, segment: _Segment, work: Callable[[], T]) -> T:
        """Read or write in a thread. The segment stays open until it ends."""

        def ended(thread: asyncio.Future[T]) -> None:
            thread.exception()  # silences asyncio: the waiting task may have been cancelled
            segment.users -= 1
            self._close_unused(segment)

        def arrived_late(_: asyncio.Future[T]) -> None:
            self._late -= 1

        segment.users += 1
        thread = asyncio.get_running_loop().run_in_executor(None, work)
        thread.add_done_callback(ended)
        try:
            return await answered(asyncio.shield(thread))
        except NoAnswer:
            self._late += 1
            thread.add_done_callback(arrived_late)
            raise _hung() from None

    def _close_unused(self, segment: _Segment) -> None:
        if not segment.users and segment is not self._last:
            self._segments.discard(segment)
            asyncio.get_running_loop().run_in_executor(None, segment.close)


def _hung() -> HungDisk:
    seconds = FROZEN_POLLS * POLL_SECONDS
    return HungDisk(errno.ETIMEDOUT, f"the disk has not answered for {seconds:.0f} s")


def scratch_folder() -> Path:
    """Return the pod's scratch space or, outside of pods, the folder for temporary files."""
    return Path(WORK_DIR if os.access(WORK_DIR, os.W_OK) else tempfile.gettempdir())


def _write(descriptor: int, data: bytes, offset: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written


def _read(descriptor: int, nbytes: int, offset: int) -> bytes:
    parts = []
    while nbytes and (part := os.pread(descriptor, nbytes, offset)):
        parts.append(part)
        nbytes, offset = nbytes - len(part), offset + len(part)
    return b"".join(parts)
