"""How long an engine had work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class BusyClock:
    """Seconds in which at least one request was in flight."""

    def __init__(self) -> None:
        self._inside = 0
        self._began = self._total = 0.0

    @property
    def seconds(self) -> float:
        return self._total + (time.perf_counter() - self._began if self._inside else 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A request is in flight inside."""
        if not self._inside:
            self._began = time.perf_counter()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._total += time.perf_counter() - self._began
