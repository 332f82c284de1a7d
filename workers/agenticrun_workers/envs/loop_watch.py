"""LoopWatch: interrupts a user's code that blocks the event loop of an env worker.

Async judges, agents and environments run on the event loop, where one that does not await stops all
episodes of the env worker, and its own time limit, until the env worker counts as frozen and is
killed (`launch.liveness`). That would cost many episodes and name none. So a thread watches: it
raises `EventLoopBlocked` in the code, which costs that call alone.

Code that stays in C is interrupted when it returns to Python. If it never does, the env worker's
log says where it is, unless it also holds Python's lock.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Self

from agenticrun_workers.envs import calls

log = logging.getLogger(__name__)

BLOCKED_SECONDS = 30
"""Half of the time after which an env worker counts as frozen."""

DEBUGGERS = frozenset({"bdb", "pdb", "debugpy", "pydevd", "_pydevd_bundle", "IPython"})

ADVICE = (
    f"it did not await for {BLOCKED_SECONDS} s, which stops all episodes of its env worker: "
    "write a plain def, which runs in a thread"
)


class EventLoopBlocked(BaseException):
    """Raised in a user's code that blocks the event loop. No user's `except Exception` takes it."""

    def __init__(self) -> None:
        super().__init__(ADVICE)


class LoopWatch:
    """Watches the running event loop while the context is open.

    Args:
        ticks: seconds after which code is interrupted. They are counted one by one, so that a
            process that was stopped as a whole interrupts nothing.
        tick_seconds: length of a second, for tests.
    """

    def __init__(self, ticks: int = BLOCKED_SECONDS, tick_seconds: float = 1.0) -> None:
        self._ticks = ticks
        self._tick_seconds = tick_seconds
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._beats = 0
        self._beat: asyncio.TimerHandle | None = None
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        self._next_beat()
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._beat is not None:
            self._beat.cancel()

    def _next_beat(self) -> None:
        self._beats += 1
        self._beat = self._loop.call_later(self._tick_seconds, self._next_beat)

    def _watch(self) -> None:
        seen, missed = self._beats, 0
        while not self._stopped.wait(self._tick_seconds):
            if self._loop.is_closed():
                return
            missed = missed + 1 if self._beats == seen and self._loop.is_running() else 0
            seen = self._beats
            if missed and missed % self._ticks == 0:
                # Only code of the user is interrupted: ours, or a library, may be slow for a
                # moment.
                place = users_place(sys._current_frames().get(self._thread))
                if place:
                    log.warning("%s: %s", place, ADVICE)
                    calls.raise_in(self._thread, EventLoopBlocked)


def users_place(frame: FrameType | None) -> str:
    """Return file and line where a user's code is; "" if ours runs, or a debugger.

    Args:
        frame: the innermost frame of a thread.
    """
    innermost = frame
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] in DEBUGGERS:
            return ""
        if module.partition(".")[0] == __package__.partition(".")[0]:
            break
        frame = frame.f_back
    # Only these two of our functions call a user's code, and catch everything that it raises.
    users = (calls.attempt.__code__, calls.awaited.__code__)
    if frame is None or innermost is None or frame is innermost or frame.f_code not in users:
        return ""
    return f"{Path(innermost.f_code.co_filename).name}:{innermost.f_lineno}"
