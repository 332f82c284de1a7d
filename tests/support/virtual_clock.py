"""Coroutines on a clock that jumps to the next timer, so that hours take seconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualClock(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer whenever nothing else is left to do."""

    def __init__(self) -> None:
        self._now = 0.0
        selector = selectors.DefaultSelector()
        self._really = selector.select
        selector.select = self._jump  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def _jump(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._really(None if timeout is None else 0)
        if not ready and timeout:
            self._now += timeout
        return ready


def on_virtual_clock(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end. A coroutine that hangs fails at once, by its time limit."""
    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        return runner.run(coroutine)
