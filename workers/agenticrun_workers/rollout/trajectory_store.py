"""TrajectoryStore: owns the bytes of finished trajectories, on a trainer pod.

A trajectory counts only when it lies here: what an env worker holds dies with its pod.
"""

from __future__ import annotations

import asyncio

from agenticrun_workers.serialization import pack, unpack
from agenticrun_workers.types import EpisodeKey, Trajectory


class TrajectoryStore:
    """Trajectories by key, until they are discarded. An async Ray actor without locks: every method runs to its end."""

    def __init__(self) -> None:
        self._kept: dict[EpisodeKey, Trajectory] = {}

    async def put(self, trajectories: bytes) -> None:
        """Keep this `list[Trajectory]`. A key that is here already is replaced: its episode was played again."""
        for trajectory in unpack(trajectories):
            self._kept[trajectory.key] = trajectory

    async def get(self, keys: list[EpisodeKey]) -> bytes:
        """`list[Trajectory]` in the order of `keys`. Raises `KeyError` for one that is not here."""
        return pack([self._kept[key] for key in keys])

    async def discard(self, keys: list[EpisodeKey]) -> None:
        """Forget these; keys that are not here are no error, since a lost answer makes the caller ask twice."""
        for key in keys:
            self._kept.pop(key, None)

    async def size(self) -> int:
        return len(self._kept)

    async def until_death(self) -> None:
        """Never returns: the caller's future fails when this process dies."""
        await asyncio.Event().wait()
