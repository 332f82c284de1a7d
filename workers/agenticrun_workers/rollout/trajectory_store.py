"""TrajectoryStore: holds finished trajectories on a trainer pod.

A trajectory counts only once it is stored here: data in an env worker is lost with its pod.
"""

from __future__ import annotations

import asyncio

from agenticrun_workers.launch.liveness import POLL_SECONDS
from agenticrun_workers.serialization import pack, unpack
from agenticrun_workers.types import EpisodeKey, Trajectory


class TrajectoryStore:
    """Trajectories by key, until they are discarded.

    An async Ray actor without locks: no method awaits while it changes state.
    """

    def __init__(self) -> None:
        self._kept: dict[EpisodeKey, Trajectory] = {}
        self._replaced: set[int] = set()

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
        for trajectory in unpack(trajectories):
            self._kept[trajectory.key] = trajectory

    async def refuse(self, worker: int) -> None:
        """Take nothing from an env worker any more.

        One that was given up as frozen or out of reach may go on. Its trajectory must not replace
        the one of which the driver has the rewards.
        """
        self._replaced.add(worker)

    async def get(self, keys: list[EpisodeKey]) -> bytes:
        """Return a packed `list[Trajectory]` in the order of `keys`. Raises `KeyError`."""
        return pack([self._kept[key] for key in keys])

    async def discard(self, keys: list[EpisodeKey]) -> None:
        """Delete these. Unknown keys are ignored, because callers retry after a lost reply."""
        for key in keys:
            self._kept.pop(key, None)

    async def size(self) -> int:
        return len(self._kept)

    async def health(self) -> None:
        """Return after some seconds: a poll that fails at once when this process dies."""
        await asyncio.sleep(POLL_SECONDS)
