"""Log each kind of problem once, even if an environment fails a thousand times."""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_KINDS = 20

NUMBERS = re.compile(r"\b0x[0-9a-fA-F]+\b|(?<![\w'\"/:.])-?\d+(?:\.\d+)?(?![\w'\"/])")
"""Addresses and free-standing numbers, which differ between messages of one kind.

Numbers inside names, quotes and line references (`lake4`, `'7'`, `maze.py:31`) do not match.
"""


class LogOnce:
    """Calls `log` once per kind of message, for at most `MAX_KINDS` kinds.

    Messages that differ only in numbers are of one kind. Returns True if the message was new.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._logged: set[str] = set()

    def __call__(self, message: str) -> bool:
        kind = NUMBERS.sub("#", message)
        if kind in self._logged or len(self._logged) >= MAX_KINDS:
            return False
        self._logged.add(kind)
        self._log(message)
        return True
