"""Requests in flight and the keys and values that they compute with.

A session (trajectory) keeps a slot of one large cache between its turns (`SessionCaches`), or each
request has a cache of its own (`PrivateCaches`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, IntArray


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of many sessions, which a transformers model reads and writes in batches.

    Each layer stores [slots, length, heads, head size]; `select` chooses the slots and positions of
    the next forward pass. The storage grows for a longer sequence or a higher slot. Positions
    beyond a slot's own length hold garbage, which the attention mask hides, so padding may be
    written there.

    Args:
        slots: initial number of slots.
    """

    def __init__(self, slots: int = 16) -> None:
        super().__init__(layers=[])
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._slots = slots
        self._length = 64

    def select(self, slots_B: Tensor, starts_B: Tensor, width: int, visible: int) -> None:
        """Choose the slots and positions of the next forward pass.

        Args:
            slots_B: slot of each row, int64 [B], ascending.
            starts_B: number of positions that each slot holds already, int64 [B].
            width: number of tokens that each row adds from there.
            visible: number of positions that attention sees.
        """
        self._slots = _at_least(self._slots, int(slots_B[-1]) + 1)
        self._length = _at_least(self._length, visible)
        positions_BQ = starts_B[:, None] + torch.arange(width, device=slots_B.device)
        self._write_at = (slots_B[:, None] * self._length + positions_BQ).flatten()
        self._visible = visible
        first, last = int(slots_B[0]), int(slots_B[-1])
        self._range = (first, last + 1) if last - first + 1 == len(slots_B) else None
        self._rows = slots_B

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values and return all visible ones.

        Args:
            key_states: [B, heads, Q, head size].
            value_states: [B, heads, Q, head size].
            layer_idx: index of the layer.

        Returns:
            keys and values, [B, heads, visible, head size].
        """
        if layer_idx == len(self._keys):
            _, heads, _, size = key_states.shape
            self._keys.append(key_states.new_zeros(0, 0, heads, size))
            self._values.append(value_states.new_zeros(0, 0, heads, value_states.shape[-1]))
        return (
            self._exchange(self._keys, layer_idx, key_states),
            self._exchange(self._values, layer_idx, value_states),
        )

    def _exchange(self, store: list[Tensor], layer: int, states: Tensor) -> Tensor:
        held = store[layer]
        if held.shape[:2] != (self._slots, self._length):
            grown = held.new_zeros(self._slots, self._length, *held.shape[2:])
            grown[: held.shape[0], : held.shape[1]] = held
            store[layer] = held = grown
        held.flatten(0, 1).index_copy_(0, self._write_at, states.transpose(1, 2).flatten(0, 1))
        rows = held[self._range[0] : self._range[1]] if self._range else held[self._rows]
        return rows[:, : self._visible].transpose(1, 2)


@dataclass
class RunningRequest:
    """A request in flight and the tokens sampled for it so far."""

    request: GenerationRequest
    done: asyncio.Future[Generation]
    session: str
    cache: SlotCache | None = None
    """Holds its keys and values. None until the request is admitted."""
    slot: int = -1
    cached: int = 0
    """Leading tokens of `context_T` whose keys and values the slot holds."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def context_T(self) -> IntArray:
        return np.concatenate([self.request.prompt_tokens, np.asarray(self.tokens, np.int32)])

    @property
    def pending(self) -> int:
        """Number of tokens to compute before the next one can be sampled."""
        return len(self.request.prompt_tokens) + len(self.tokens) - self.cached

    @property
    def pending_T(self) -> IntArray:
        """The tokens to compute, without a copy of the whole context."""
        prompt = len(self.request.prompt_tokens)
        sampled_T = np.asarray(self.tokens[max(0, self.cached - prompt) :], np.int32)
        return np.concatenate([self.request.prompt_tokens[self.cached :], sampled_T])

    def restart(self) -> int:
        """Drop the sampled tokens and return their number."""
        count = len(self.tokens)
        self.tokens, self.logprobs, self.versions = [], [], []
        return count

    def finish(self, reason: FinishReason) -> None:
        if not self.done.done():
            self.done.set_result(
                Generation(
                    np.asarray(self.tokens, np.int32),
                    np.asarray(self.logprobs, np.float32),
                    np.asarray(self.versions, np.int32),
                    reason,
                )
            )


class Caches(Protocol):
    """Assigns caches to requests."""

    def open(self, running: RunningRequest) -> None:
        """Set `cache`, `slot` and `cached` of a new request."""
        ...

    def close(self, running: RunningRequest) -> None:
        """Release the cache of a finished request."""
        ...

    def invalidate(self) -> None:
        """Drop all keys and values: the weights have changed."""
        ...


@dataclass
class _Session:
    """A slot of the cache, and the tokens for which it holds keys and values."""

    slot: int
    cached_T: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    busy: bool = False


class SessionCaches:
    """Slots of one cache. A session keeps its slot until another needs it (LRU)."""

    def __init__(self, slots: int) -> None:
        self._cache = SlotCache()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._free_slots = list(range(slots - 1, -1, -1))

    def open(self, running: RunningRequest) -> None:
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

    def close(self, running: RunningRequest) -> None:
        """See `Caches`. The session keeps its keys and values."""
        session = self._sessions[running.session]
        session.busy = False
        session.cached_T = running.context_T[: running.cached]

    def invalidate(self) -> None:
        """See `Caches`."""
        for session in self._sessions.values():
            session.cached_T = session.cached_T[:0]

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        oldest = next(name for name, session in self._sessions.items() if not session.busy)
        return self._sessions.pop(oldest).slot


class PrivateCaches:
    """A new cache for each request: shapes, strides and alignment depend on that request alone.

    A prefix from an earlier turn would save work. But then evictions and the choice of the engine
    would decide whether a prompt is computed in one piece or in two, and floating point sums of the
    two differ in their last bits.
    """

    def open(self, running: RunningRequest) -> None:
        """See `Caches`."""
        running.cache, running.slot, running.cached = SlotCache(slots=1), 0, 0

    def close(self, running: RunningRequest) -> None:
        """See `Caches`."""

    def invalidate(self) -> None:
        """See `Caches`."""


def _common_prefix(a_T: IntArray, b_T: IntArray) -> int:
    length = min(len(a_T), len(b_T))
    different = np.flatnonzero(a_T[:length] != b_T[:length])
    return int(different[0]) if len(different) else length


def _at_least(size: int, needed: int) -> int:
    while size < needed:
        size *= 2
    return size
