"""Deltas: the elements of a bucket that changed in a sync, encoded exactly.

Elements are compared as bits, so that -0.0, infinities and NaNs of any payload survive.

Encoding: [number of values, uint64][values][gaps, uint16]. A gap is the distance to the previous
changed element (of the first: to the start of the bucket). The code `ESCAPE` adds that much to the
gap that follows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ESCAPE = 0xFFFF

Bits = NDArray[np.unsignedinteger]
"""Elements as unsigned integers of their size."""


def encode(indices_K: NDArray[np.int64], values_K: Bits) -> NDArray[np.uint8]:
    """Encode the new elements `values_K` at the ascending `indices_K`."""
    gaps_K = np.diff(indices_K, prepend=0)
    # Nearly always: changes of an optimizer step lie close together.
    if gaps_K.max(initial=0) < ESCAPE:
        codes = gaps_K.astype(np.uint16)
    else:
        escapes_K, rest_K = np.divmod(gaps_K, ESCAPE)
        ends_K = np.cumsum(escapes_K + 1) - 1
        codes = np.full(int(ends_K[-1]) + 1, ESCAPE, np.uint16)
        codes[ends_K] = rest_K
    parts = (np.array([len(values_K)], np.uint64), np.ascontiguousarray(values_K), codes)
    return np.concatenate([part.view(np.uint8) for part in parts])


def encoded_bytes(changed: int, elements: int, item_bytes: int) -> int:
    """Return an upper bound of the size of `encode`, for `changed` of `elements`."""
    return 8 + changed * (item_bytes + 2) + 2 * (elements // ESCAPE)


def patch(elements_N: Bits, delta: NDArray[np.uint8]) -> int:
    """Write the changed elements in place. Returns their number."""
    count = int(delta[:8].view(np.uint64)[0])
    split = 8 + count * elements_N.itemsize
    values_K = delta[8:split].view(elements_N.dtype)
    codes = delta[split:].view(np.uint16)
    # An escape moves on without writing, so gaps of any length fit into 16 bits.
    positions = np.cumsum(codes, dtype=np.int64)
    elements_N[positions[codes != ESCAPE]] = values_K
    return count
