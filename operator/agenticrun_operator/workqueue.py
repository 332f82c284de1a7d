"""A work queue of keys: a key waits at most once, and one reconcile worker at a time handles it.

`add` reports a change, `add_throttled` one of many; `add_after` schedules another look at the key.
A key that is added while it is being handled is handled once more afterwards. Of several due times,
the earliest wins.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

Key = tuple[str, str]
"""(namespace, name)"""


@dataclass(frozen=True)
class Item:
    """A key to reconcile."""

    key: Key
    changed: bool
    """True if a change was reported (`add`), False if only a delay has passed (`add_after`)."""


class WorkQueue:
    """A queue that merges equal keys, handles each key serially and supports delays.

    Not thread-safe: use it in one event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: dict[Key, float] = {}
        """Since when each key waits, in the order of the queue."""
        self._changed: set[Key] = set()
        self._handled: set[Key] = set()
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._throttled: dict[Key, bool] = {}
        """Keys with a change a moment ago. True: there was another one since."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest_seconds(self) -> float:
        """Time that the first key has waited; 0 if none waits."""
        since = next(iter(self._waiting.values()), None)
        return 0.0 if since is None else self._clock() - since

    def add(self, key: Key) -> None:
        """Report a change: the key is handled as soon as possible."""
        self._changed.add(key)
        self._enqueue(key)

    def add_throttled(self, key: Key, seconds: float) -> None:
        """Report one of many changes: the first is handled at once, the next after `seconds`."""
        # A thousand pods that start make thousands of events, and one look sees them all.
        if key in self._throttled:
            self._throttled[key] = True
            return
        self._throttled[key] = False
        asyncio.get_running_loop().call_later(seconds, self._end_throttling, key, seconds)
        self.add(key)

    def _end_throttling(self, key: Key, seconds: float) -> None:
        if self._throttled.pop(key):
            self.add_throttled(key, seconds)

    def add_after(self, key: Key, seconds: float) -> None:
        """Handle the key after `seconds`, unless it is handled earlier."""
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        timer = self._timers.get(key)
        if timer is not None:
            # The earlier time counts: each look plans its own next one.
            if timer.when() <= due:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(due, self._enqueue, key)

    async def get(self) -> Item:
        """Wait for the next key and return it. Call `done` after handling it."""
        key = await self._ready.get()
        del self._waiting[key]
        self._handled.add(key)
        changed = key in self._changed
        # Before the handling: a change that comes during it counts for the next time.
        self._changed.discard(key)
        return Item(key, changed)

    def done(self, key: Key) -> None:
        """Mark the key as handled. If it was added in the meantime, it is queued again."""
        self._handled.discard(key)
        if key in self._again:
            self._again.discard(key)
            self._enqueue(key)

    def _enqueue(self, key: Key) -> None:
        # The handling to come replaces the delayed one; it will ask for a new delay.
        if timer := self._timers.pop(key, None):
            timer.cancel()
        # Never twice at once: two looks at one run would race for its status.
        if key in self._handled:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting[key] = self._clock()
            self._ready.put_nowait(key)
