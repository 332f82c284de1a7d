"""TrajectoryStore: holds finished trajectories on a trainer pod.

A trajectory counts only once it is stored here: data in an env worker is lost with its pod.

The store takes a tenth of its pod's memory. What comes while that is full waits on disk: it is the
newest, so it is trained on last. A disk that takes no more, or that hangs, loses nothing either:
then trajectories stay in memory. The attempt ends only if a spilled trajectory cannot be read.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import xxhash

from agenticrun_api.names import WORK_DIR
from agenticrun_workers.launch import ActorHandle, packed
from agenticrun_workers.launch.liveness import FROZEN_POLLS, POLL_SECONDS, NoAnswer, answered
from agenticrun_workers.log_once import LogOnce
from agenticrun_workers.pod_memory import PodMemory, machine_bytes
from agenticrun_workers.serialization import pack, unpack
from agenticrun_workers.types import EpisodeKey, Trajectory

log = logging.getLogger(__name__)

T = TypeVar("T")

MEMORY_SHARE = 0.1
"""Share of the pod's memory, or of the machine's outside of pods, that a store takes."""

TRAJECTORY_BYTES = 1100
TURN_BYTES = 2750
"""Memory of the objects of a trajectory and of each turn, without the elements of their arrays.

Measured with tracemalloc: within 5 % for 1 to 20 turns of 15 to 1024 tokens.
"""


@dataclass(frozen=True, slots=True)
class StoreUse:
    """Bytes that a store has in memory, and what it has spilled since it began."""

    memory_bytes: int
    spilled_bytes: int
    spilled_trajectories: int
    unspilled_trajectories: int
    """Trajectories that stayed in full memory, because the disk did not take them."""


@dataclass(slots=True, eq=False)
class _Stored:
    """A trajectory in memory or on disk."""

    trajectory: Trajectory | None
    memory: int
    """Bytes that count as in memory. 0 from when it begins to leave."""
    block: Block | None = None


class TrajectoryStore:
    """Trajectories by key, until they are discarded.

    An async Ray actor without locks. While a trajectory is written to disk, others may come and go,
    and so may this one: `_write` looks again afterwards.

    Args:
        memory_bytes: how much stays in memory; by default a share of the pod's.
        folder: where the rest is written.
    """

    def __init__(self, memory_bytes: int | None = None, folder: Path | None = None) -> None:
        self._limit = default_limit() if memory_bytes is None else memory_bytes
        self._stored: dict[EpisodeKey, _Stored] = {}
        self._replaced: set[int] = set()
        self._memory = 0
        self._spill_file = SpillFile(folder)
        self._spilled_bytes = self._spilled_trajectories = self._unspilled_trajectories = 0
        self._warn = LogOnce(log.warning)

    @packed
    async def put(self, trajectories: list[Trajectory], worker: int = 0) -> None:
        """Store trajectories. A rerun episode replaces its earlier trajectory.

        Args:
            trajectories: the trajectories.
            worker: number of the env worker (`Endpoints.worker`).

        Raises:
            PermissionError: others rerun the worker's episodes.
        """
        # A replaced worker may only have been frozen or cut off, and send an episode that another
        # worker has rerun.
        if worker in self._replaced:
            raise PermissionError(f"env worker {worker} was replaced")
        for trajectory in trajectories:
            # A rerun replaces the first one; its memory and its block on disk must not leak.
            self._forget(trajectory.key)
            stored = _Stored(trajectory, memory_of(trajectory))
            self._stored[trajectory.key] = stored
            self._memory += stored.memory
        if self._memory > self._limit:
            # Only new ones: the earlier ones are trained on sooner, and stay in memory.
            for trajectory in reversed(trajectories):
                kept = self._stored.get(trajectory.key)
                if self._memory > self._limit and kept is not None and kept.memory:
                    await self._write(trajectory.key, kept)

    async def refuse(self, worker: int, lost: Collection[EpisodeKey] = ()) -> None:
        """Take nothing more from an env worker.

        One that was given up as frozen or out of reach may still run. Its trajectory must not
        replace the one whose rewards the driver has.

        Args:
            worker: its number.
            lost: its episodes of which the driver has no result, and gets none from this worker.
                Their trajectories are deleted, if any came before.
        """
        self._replaced.add(worker)
        # All branches of an episode, which the pool knows by the key of the first.
        for key in [key for key in self._stored if replace(key, branch=0) in lost]:
            self._forget(key)

    @packed
    async def get(self, keys: list[EpisodeKey]) -> list[Trajectory]:
        """Return trajectories in the order of `keys`.

        Raises:
            KeyError: there is no such trajectory.
            DamagedBlock: the data read back differs from what was written.
            HungDisk: the disk returns nothing.
        """
        # Looked up before the first await, so that a `discard` in between takes none of them away.
        wanted = [self._stored[key] for key in keys]
        return [await self._read(each) for each in wanted]

    async def discard(self, keys: list[EpisodeKey]) -> None:
        """Delete these. Unknown keys are ignored, because callers retry after a lost reply."""
        for key in keys:
            self._forget(key)

    async def size(self) -> int:
        return len(self._stored)

    async def use(self) -> StoreUse:
        return StoreUse(
            self._memory,
            self._spilled_bytes,
            self._spilled_trajectories,
            self._unspilled_trajectories,
        )

    async def health(self) -> None:
        """Return after some seconds: a poll that fails at once when this process dies."""
        await asyncio.sleep(POLL_SECONDS)

    async def _write(self, key: EpisodeKey, stored: _Stored) -> None:
        # Before the await, so that no other `put` writes the same trajectory.
        memory, stored.memory = stored.memory, 0
        self._memory -= memory
        try:
            block = await self._spill_file.write(pack(stored.trajectory))
        except OSError as error:
            # It may have been discarded or replaced while the disk refused.
            if self._stored.get(key) is stored:
                stored.memory = memory
                self._memory += memory
                self._unspilled_trajectories += 1
            self._warn(
                f"trajectories cannot be spilled to {self._spill_file.folder} and stay in memory: "
                f"{error.strerror} (metric rollout/unspilled_trajectories). Give the trainer pods "
                "more memory (spec.roles.trainer.memory) or more ephemeral storage "
                "(spec.roles.trainer.resources)"
            )
            return
        if self._stored.get(key) is not stored:  # discarded or replaced while it was written
            self._spill_file.free(block)
            return
        stored.block, stored.trajectory = block, None
        self._spilled_bytes += block.nbytes
        self._spilled_trajectories += 1
        self._warn(
            f"finished trajectories fill their {self._limit:,} bytes of memory: new ones wait in "
            f"{self._spill_file.folder} (metrics rollout/spilled_...). To keep them in memory, "
            "raise spec.roles.trainer.memory, or lower staleness.max or rolloutBatchSize"
        )

    async def _read(self, stored: _Stored) -> Trajectory:
        if stored.block is None:
            assert stored.trajectory is not None
            return stored.trajectory
        trajectory: Trajectory = unpack(await self._spill_file.read(stored.block))
        return trajectory

    def _forget(self, key: EpisodeKey) -> None:
        stored = self._stored.pop(key, None)
        if stored is None:
            return
        self._memory -= stored.memory
        if stored.block is not None:
            self._spill_file.free(stored.block)


def default_limit() -> int:
    """Return the bytes that a store in this pod may take."""
    return int(MEMORY_SHARE * (PodMemory().limit() or machine_bytes()))


def memory_of(trajectory: Trajectory) -> int:
    """Return about how many bytes of memory a trajectory takes."""
    arrays = sum(
        turn.prompt_T.nbytes
        + turn.response_T.nbytes
        + turn.logprobs_T.nbytes
        + turn.versions_T.nbytes
        for turn in trajectory.turns
    )
    objects = TRAJECTORY_BYTES + TURN_BYTES * len(trajectory.turns)
    return objects + trajectory.ending_T.nbytes + arrays


Stores: TypeAlias = Sequence[ActorHandle[TrajectoryStore]]
"""The trajectory stores of a run, by number."""

SEGMENT_BYTES = 64 << 20
"""A segment that has so many bytes gets no other block."""


class DamagedBlock(Exception):
    """The disk returned other bytes than were written."""


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
            # Never opened if no write has reached it.
            if self._file is not None:
                self._file[1]()

    def descriptor(self) -> int:
        """Return the descriptor of the file. The first call makes it."""
        with self._opening:
            if self._file is None:
                # A duplicate of the descriptor outlives the file object; the kernel deletes the
                # file when the duplicate is closed.
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
    """Blocks of bytes on a local disk until they are freed.

    Reads and writes run in threads, beside the event loop. The blocks lie one after the other in
    segments, which are files without a name: the kernel deletes them when this process ends, even
    if it is killed. A segment that is full is deleted with the last of its blocks. So blocks that
    are freed in about the order in which they were written keep at most one segment more than they
    need.

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
        # Another write to a disk that does not answer would keep one more thread.
        if self._late:
            raise _hung()
        segment = self._last or _Segment(self.folder)
        self._segments.add(segment)
        block = Block(segment, segment.end, len(data), xxhash.xxh3_64_intdigest(data))
        segment.end += len(data)
        self._last = segment if segment.end < SEGMENT_BYTES else None
        segment.users += 1
        try:
            await self._in_thread(
                segment, lambda: _write_at(segment.descriptor(), data, block.offset)
            )
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
            block.segment, lambda: _read_at(block.segment.descriptor(), block.nbytes, block.offset)
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
            # Shielded: a thread cannot be cancelled, and `ended` must see when it is done.
            return await answered(asyncio.shield(thread))
        except NoAnswer:
            self._late += 1
            thread.add_done_callback(arrived_late)
            raise _hung() from None

    def _close_unused(self, segment: _Segment) -> None:
        # The last segment stays open for the next block.
        if not segment.users and segment is not self._last:
            self._segments.discard(segment)
            # In a thread, because the deletion of a large file waits for the disk.
            asyncio.get_running_loop().run_in_executor(None, segment.close)


def _hung() -> HungDisk:
    seconds = FROZEN_POLLS * POLL_SECONDS
    return HungDisk(errno.ETIMEDOUT, f"the disk has not answered for {seconds:.0f} s")


def scratch_folder() -> Path:
    """Return the pod's scratch space or, outside of pods, the folder for temporary files."""
    return Path(WORK_DIR if os.access(WORK_DIR, os.W_OK) else tempfile.gettempdir())


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    # The kernel may write less than asked for; a view is cut without a copy.
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written


def _read_at(descriptor: int, nbytes: int, offset: int) -> bytes:
    parts = []
    while nbytes and (part := os.pread(descriptor, nbytes, offset)):
        parts.append(part)
        nbytes, offset = nbytes - len(part), offset + len(part)
    return b"".join(parts)
