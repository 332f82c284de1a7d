"""Items that come one after the other, for any number of readers that each see all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Feed(Generic[T]):
    """Readers iterate: they get what is there, and wait for more until `close`."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._error: BaseException | None = None
        self._closed = False
        self._changed = asyncio.Event()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._tell()

    def close(self, error: BaseException | None = None) -> None:
        """No more items come. With an error, readers raise it where the items end. Only the first call counts."""
        if not self._closed:
            self._closed, self._error = True, error
            self._tell()

    async def __aiter__(self) -> AsyncIterator[T]:
        seen = 0
        while True:
            while seen < len(self._items):
                yield self._items[seen]
                seen += 1
            if self._closed:
                break
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
