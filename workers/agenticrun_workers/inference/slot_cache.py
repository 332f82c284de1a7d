"""Keys and values of many sessions, each in a slot of its own, that a transformers model reads and writes in batches."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class SlotCache(Cache):  # type: ignore[misc]
    """Storage [slots, length, heads, head size] per layer; `select` says which slots and positions the next forward is about.

    It begins with `slots` of them, and grows when a longer sequence or a higher slot is selected. What lies beyond a slot's own
    length is garbage that the attention mask hides, so padding needs no care when it is written.
    """

    def __init__(self, slots: int = 16) -> None:
        super().__init__(layers=[])
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._slots = slots
        self._length = 64

    def select(self, slots_B: Tensor, starts_B: Tensor, width: int, visible: int) -> None:
        """The next forward feeds `width` tokens to each of these slots, from `starts_B` on, and sees `visible` positions.

        Args:
            slots_B: slot of each row, int64 [B], ascending.
            starts_B: number of positions that each slot holds already, int64 [B].
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
        """Store [B, heads, Q, head size] and return all visible keys and values [B, heads, visible, head size]."""
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


def _at_least(size: int, needed: int) -> int:
    while size < needed:
        size *= 2
    return size
