"""Which cache a request computes in: a slot that its session keeps between turns, or one of its own."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from agenticrun_workers.inference.in_flight import Running
from agenticrun_workers.inference.slot_cache import SlotCache
from agenticrun_workers.types import IntArray


class Caches(Protocol):
    """Gives requests a place to compute in."""

    def open(self, running: Running) -> None:
        """Set `cache`, `slot` and `cached` of a request that begins."""
        ...

    def close(self, running: Running) -> None:
        """The request is over."""
        ...

    def forget(self) -> None:
        """The weights have changed: nothing that was computed is worth anything."""
        ...


@dataclass
class _Session:
    """A slot of the cache and the tokens whose keys and values it holds."""

    slot: int
    cached_T: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    busy: bool = False


class SessionCaches:
    """Slots of one cache. A session keeps its slot until others need it, least recently used first."""

    def __init__(self, slots: int) -> None:
        self._cache = SlotCache()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._free_slots = list(range(slots - 1, -1, -1))

    def open(self, running: Running) -> None:
        """See `Caches`. A second request of a busy session gets a slot of its own."""
        if running.session in self._sessions and self._sessions[running.session].busy:
            running.session = running.request.request_id
        session = self._sessions.get(running.session)
        if session is None:
            session = self._sessions[running.session] = _Session(self._take_slot())
        session.busy = True
        self._sessions.move_to_end(running.session)
        prompt_T = running.request.prompt_tokens
        running.cache = self._cache
        running.slot = session.slot
        running.cached = min(_common_prefix(session.cached_T, prompt_T), len(prompt_T) - 1)

    def close(self, running: Running) -> None:
        """See `Caches`. The session keeps what was computed."""
        session = self._sessions[running.session]
        session.busy = False
        session.cached_T = running.context_T[: running.cached]

    def forget(self) -> None:
        """See `Caches`."""
        for session in self._sessions.values():
            session.cached_T = session.cached_T[:0]

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        oldest = next(name for name, session in self._sessions.items() if not session.busy)
        return self._sessions.pop(oldest).slot


class PrivateCaches:
    """A new cache for each request, so that shapes, strides and alignment of all tensors depend on that request alone.

    A prefix kept from an earlier turn would save work, but then the same prompt is computed in one piece or in two, depending
    on evictions and on which engine serves it, and floating point sums differ in their last bits between the two.
    """

    def open(self, running: Running) -> None:
        """See `Caches`."""
        running.cache, running.slot, running.cached = SlotCache(slots=1), 0, 0

    def close(self, running: Running) -> None:
        """See `Caches`."""

    def forget(self) -> None:
        """See `Caches`."""


def _common_prefix(a_T: IntArray, b_T: IntArray) -> int:
    length = min(len(a_T), len(b_T))
    different = np.flatnonzero(a_T[:length] != b_T[:length])
    return int(different[0]) if len(different) else length
