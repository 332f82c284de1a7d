"""TrajectoryStore: holds finished trajectories on a trainer pod.

A trajectory counts only once it is stored here: data in an env worker is lost with its pod.

The store takes a tenth of its pod's memory. What comes while that is full waits on disk: it is the
newest, so it is trained on last. A disk that takes no more, or that hangs, loses nothing either:
then trajectories stay in memory. The attempt ends only if a spilled trajectory cannot be read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from agenticrun_workers.launch.liveness import POLL_SECONDS
from agenticrun_workers.pod_memory import PodMemory, machine_bytes
from agenticrun_workers.rollout.log_once import LogOnce
from agenticrun_workers.rollout.spill_file import Block, SpillFile
from agenticrun_workers.serialization import pack, unpack
from agenticrun_workers.types import EpisodeKey, Trajectory

log = logging.getLogger(__name__)

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

    async def put(self, trajectories: bytes, worker: int = 0) -> None:
        """Store a packed `list[Trajectory]`. A rerun episode replaces its earlier trajectory.

        Args:
            trajectories: packed.
            worker: number of the env worker (`Endpoints.worker`).

        Raises:
            PermissionError: others rerun the worker's episodes.
        """
        if worker in self._replaced:
            raise PermissionError(f"env worker {worker} was replaced")
        received = unpack(trajectories)
        for trajectory in received:
            self._forget(trajectory.key)
            stored = _Stored(trajectory, memory_of(trajectory))
            self._stored[trajectory.key] = stored
            self._memory += stored.memory
        if self._memory > self._limit:
            await self._spill(trajectory.key for trajectory in reversed(received))

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
        for key in [key for key in self._stored if replace(key, branch=0) in lost]:
            self._forget(key)

    async def get(self, keys: list[EpisodeKey]) -> bytes:
        """Return a packed `list[Trajectory]` in the order of `keys`.

        Raises:
            KeyError: there is no such trajectory.
            DamagedBlock: the data read back differs from what was written.
            HungDisk: the disk returns nothing.
        """
        wanted = [self._stored[key] for key in keys]
        return pack([await self._read(each) for each in wanted])

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

    async def _spill(self, keys: Iterable[EpisodeKey]) -> None:
        """Write some of these trajectories to disk, until the others fit into memory."""
        for key in keys:
            if self._memory <= self._limit:
                return
            stored = self._stored.get(key)
            if stored is not None and stored.memory:
                await self._write(key, stored)

    async def _write(self, key: EpisodeKey, stored: _Stored) -> None:
        memory, stored.memory = stored.memory, 0
        self._memory -= memory
        try:
            block = await self._spill_file.write(pack(stored.trajectory))
        except OSError as error:
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
