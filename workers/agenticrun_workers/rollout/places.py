"""EpisodePlaces: says when the episodes of an env worker may begin.

At most `maxEnvsPerWorker` run at once. While the pod's memory is nearly full, episodes that run go
on, and none begins beside them: a worker that waits is slow, one that the kernel kills loses its
episodes. One episode may always run, so nothing waits forever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from agenticrun_workers.pod_memory import PodMemory
from agenticrun_workers.rollout.log_once import LogOnce

log = logging.getLogger(__name__)

FULL_SHARE = 0.9
"""Share of its limit above which a pod's memory counts as nearly full.

Ray kills processes from 0.95 on (`RAY_memory_usage_threshold`), the kernel at 1.
"""
LOOK_SECONDS = 0.1
LOOK_EPISODES = 16
"""The memory is read again after so many seconds, or when so many episodes have begun."""
WAIT_SECONDS = 1.0
"""Time between two readings while episodes wait."""


class EpisodePlaces:
    """Places for the running episodes of one env worker.

    Args:
        limit: largest number of episodes at once.
        make_room: called when the memory is nearly full: frees what can be made again.
        memory: of the pod. Without a limit, episodes do not wait for it.
    """

    def __init__(
        self, limit: int, make_room: Callable[[], None], memory: PodMemory | None = None
    ) -> None:
        self._memory = memory or PodMemory()
        self._bytes = self._memory.limit()
        self._make_room = make_room
        self._places = asyncio.Semaphore(limit)
        self._turn = asyncio.Lock()
        """Held by the episode that begins next, so that a single one waits for memory."""
        self._running = 0
        self._ended = asyncio.Event()
        self._full = self._roomy = False
        """Memory was nearly full; no episode has ended since room was made."""
        self._looked_at = float("-inf")
        self._begun = 0
        """Episodes that have begun since the memory was read."""
        self._warn = LogOnce(log.warning)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[float]:
        """Wait for a place, and keep it inside the `with` block.

        Yields:
            Seconds that the episode waited for memory while there was a place.
        """
        async with self._places:
            waited = 0.0
            if self._bytes is not None:
                async with self._turn:
                    waited = await self._wait_for_memory(self._bytes)
            self._running += 1
            try:
                yield waited
            finally:
                self._running -= 1
                self._roomy = False
                self._ended.set()

    async def _wait_for_memory(self, limit: int) -> float:
        clock, waited = asyncio.get_running_loop().time, 0.0
        while self._running and self._nearly_full(limit):
            began = clock()
            self._ended.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_SECONDS):
                    await self._ended.wait()
            waited += clock() - began
        self._begun += 1
        return waited

    def _nearly_full(self, limit: int) -> bool:
        """Return True if the pod's memory was nearly full a moment ago."""
        now = asyncio.get_running_loop().time()
        if now - self._looked_at < LOOK_SECONDS and self._begun < LOOK_EPISODES:
            return self._full
        self._full = self._used() > FULL_SHARE * limit
        if self._full and not self._roomy:
            self._make_room()
            self._roomy = True
            self._full = self._used() > FULL_SHARE * limit
        self._looked_at, self._begun = now, 0
        if self._full:
            self._warn(
                f"{FULL_SHARE:.0%} of the pod's memory is in use: episodes wait until it is less "
                "(metric rollout/memory_wait_seconds). Raise spec.roles.env.memory, or lower "
                "trainEnvs.maxEnvsPerWorker"
            )
        return self._full

    def _used(self) -> int:
        """Return the memory in use; 0 if the kernel does not tell, so that episodes begin."""
        try:
            return self._memory.used()
        except OSError as error:
            self._warn(
                f"the memory of the pod cannot be read: {error}. Episodes begin as if it were free"
            )
            return 0
