"""Problems told once: an environment that fails a thousand times says so in one line."""

from __future__ import annotations

from collections.abc import Callable

MAX_TOLD = 20


class Once:
    """Passes each distinct message on once, at most `MAX_TOLD` of them. Returns whether it did."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._told: set[str] = set()

    def __call__(self, message: str) -> bool:
        if message in self._told or len(self._told) >= MAX_TOLD:
            return False
        self._told.add(message)
        self._tell(message)
        return True
