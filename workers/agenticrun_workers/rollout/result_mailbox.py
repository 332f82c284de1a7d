"""Long polling between actors: many small results, few remote calls.

A remote call costs about a millisecond of CPU whatever it carries. So the one side puts what it has, and the other side keeps
one `take` under way, which answers with all that is there.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Results waiting for whoever asks. One taker at a time."""

    def __init__(self, gather_seconds: float = 0.002) -> None:
        self._items: list[T] = []
        self._failure: BaseException | None = None
        self._filled = asyncio.Event()
        self._gather_seconds = gather_seconds

    def put(self, item: T) -> None:
        self._items.append(item)
        self._filled.set()

    def fail(self, error: BaseException) -> None:
        """There may be items that never come: every `take` raises this from now on."""
        self._failure = self._failure or error
        self._filled.set()

    async def take(self, patience: float = 5.0) -> list[T]:
        """All items; waits for the first one at most `patience` seconds (then: none) and for its neighbours a moment.

        Raises what `fail` was told.
        """
        try:
            async with asyncio.timeout(patience):  # wait_for can swallow a cancellation
                await self._filled.wait()
        except TimeoutError:
            return []
        await asyncio.sleep(self._gather_seconds)
        if self._failure is not None:
            raise self._failure
        items, self._items = self._items, []
        self._filled.clear()
        return items
