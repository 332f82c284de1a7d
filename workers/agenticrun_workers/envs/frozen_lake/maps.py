"""Maps of FrozenLake: random ones, the solvable ones, and those kept for validation.

The distribution is gymnasium's. A map is one integer with a bit per cell, row by row, the top left
cell in the highest bit; 1 is a hole. A search over a whole board is then a handful of shifts, which
costs less than one call of NumPy.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np

from agenticrun_workers.envs.grid import in_holdout
from agenticrun_workers.types import BoolArray

_DIGITS = bytes.maketrans(b"\0\1", b"01")


def random_holes(seed: int, draw: int, size: int, frozen_probability: float) -> int:
    """Return map number `draw` of a seed, which may be unsolvable.

    Start (top left) and goal (bottom right) are never holes. The random numbers, 32 bits per cell,
    are
    a hash of seed and number: one call, where a new generator for each map takes five times as long
    to
    start, and the same numbers on every machine and with every release of NumPy.
    """
    cells = size * size
    drawn = np.frombuffer(
        hashlib.shake_128(b"frozen-lake:%d:%d" % (seed, draw)).digest(4 * cells), "<u4"
    )
    return _from_flat(drawn < round((1 - frozen_probability) * 2**32)) & ~(1 << cells - 1 | 1)


def from_array(holes: BoolArray) -> int:
    """Return the map of a bool array [size, size], True where there is a hole."""
    return _from_flat(holes.ravel())


def to_array(holes: int, size: int) -> BoolArray:
    """The map as bool [size, size], True where there is a hole."""
    packed = np.frombuffer(_packed(holes, size), np.uint8)
    return np.unpackbits(packed, count=size * size).reshape(size, size).astype(np.bool_)


def is_solvable(holes: int, size: int) -> bool:
    """Return whether the goal can be reached from the start."""
    ice, leaves_right, leaves_left = _masks(size)
    ice &= ~holes
    reached, before = 1 << size * size - 1, 0
    while reached != before:
        before = reached
        reached |= (reached >> size | (reached & leaves_right) >> 1) & ice  # down and right
        reached |= (reached << size | (reached & leaves_left) << 1) & ice  # up and left
        if reached & 1:
            return True
    return False


def is_holdout(holes: int, size: int, share: float) -> bool:
    """Return whether this map belongs to the validation holdout; see `in_holdout`."""
    return in_holdout(b"frozen-lake:%d:" % size + _packed(holes, size), share)


def _from_flat(holes: BoolArray) -> int:
    return int(holes.tobytes().translate(_DIGITS), 2)


def _packed(holes: int, size: int) -> bytes:
    """As `np.packbits` packs it: zero bits fill up the last byte."""
    cells = size * size
    return (holes << -cells % 8).to_bytes((cells + 7) // 8, "big")


@functools.cache
def _masks(size: int) -> tuple[int, int, int]:
    """All cells; those with a cell to the right; those with a cell to the left."""
    row = (1 << size) - 1
    rows = [number * size for number in range(size)]
    return (
        (1 << size * size) - 1,
        sum((row & ~1) << shift for shift in rows),
        sum((row >> 1) << shift for shift in rows),
    )
