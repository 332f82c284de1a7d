"""Problems told once: an environment that fails a thousand times says so in one line."""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_TOLD = 20

NUMBERS = re.compile(r"\b0x[0-9a-fA-F]+\b|(?<![\w'\"/:.])-?\d+(?:\.\d+)?(?![\w'\"/])")
"""What differs each time: addresses, and numbers that are no part of a name, a version or a line (`lake4`, `'7'`, `maze.py:31`)."""


class LogOnce:
    """Passes each message on once, at most `MAX_TOLD` of them; messages that differ in a number only are one. Returns whether it did."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._told: set[str] = set()

    def __call__(self, message: str) -> bool:
        kind = NUMBERS.sub("#", message)
        if kind in self._told or len(self._told) >= MAX_TOLD:
            return False
        self._told.add(kind)
        self._tell(message)
        return True
