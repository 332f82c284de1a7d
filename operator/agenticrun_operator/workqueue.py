"""A queue of keys: each key waits at most once, is handled by one worker at a time, and may be asked for later.

`add` says that something has happened; `add_after` asks for another look. A key that is added while it is handled is handled
again afterwards. The first due time wins.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

Key = tuple[str, str]
"""(namespace, name)"""


@dataclass(frozen=True)
class Item:
    """A key to look at."""

    key: Key
    changed: bool
    """Whether something has happened, as opposed to a look that was asked for."""


class WorkQueue:
    """Coalescing, per-key serial, with delays. For one event loop."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: set[Key] = set()
        self._changed: set[Key] = set()
        self._handled: set[Key] = set()
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Key) -> None:
        """Something has happened to the key: look at it as soon as possible."""
        self._changed.add(key)
        self._enqueue(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Look at the key after `seconds`, unless an earlier look comes first."""
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= due:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(due, self._enqueue, key)

    async def get(self) -> Item:
        """The next key. Call `done` when it is handled."""
        key = await self._ready.get()
        self._waiting.discard(key)
        self._handled.add(key)
        changed = key in self._changed
        self._changed.discard(key)
        return Item(key, changed)

    def done(self, key: Key) -> None:
        """The key has been handled; if it was added meanwhile, it waits again."""
        self._handled.discard(key)
        if key in self._again:
            self._again.discard(key)
            self._enqueue(key)

    def _enqueue(self, key: Key) -> None:
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if key in self._handled:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.put_nowait(key)
