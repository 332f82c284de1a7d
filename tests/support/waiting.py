"""Waiting for what becomes true by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(
    probe: Callable[[], T | None], seconds: float, what: str, interval: float = 0.02
) -> T:
    """Return the first truthy result of `probe`.

    Fails if there is none within `seconds`; `what` names the expected event.
    """
    end = time.monotonic() + seconds
    while not (found := probe()):
        _fail_after(end, seconds, what)
        time.sleep(interval)
    return found


async def eventually_in_loop(
    probe: Callable[[], T | None], seconds: float, what: str, interval: float = 0.02
) -> T:
    """`eventually` for what only becomes true while the event loop runs."""
    end = time.monotonic() + seconds
    while not (found := probe()):
        _fail_after(end, seconds, what)
        await asyncio.sleep(interval)
    return found


def _fail_after(end: float, seconds: float, what: str) -> None:
    if time.monotonic() > end:
        raise AssertionError(f"not within {seconds:.0f} s: {what}")
