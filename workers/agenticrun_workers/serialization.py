"""Serialization of lists of small values between actors: one block of bytes each.

Ray sends every NumPy array out of band, which pays off for large arrays. A rollout message is
hundreds of arrays of a few numbers each; one pickle of them all is about ten times faster.
"""

from __future__ import annotations

import pickle
from typing import Any


def pack(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def unpack(data: bytes) -> Any:
    """Invert `pack`. Use it only between actors of one run: pickle trusts its sender."""
    return pickle.loads(data)
