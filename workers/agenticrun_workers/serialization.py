"""How lists of small values travel between actors: one block of bytes per call.

Ray sends every NumPy array out of band, which pays for large ones. A rollout message is hundreds of arrays of a few
numbers each, and pickling them in one piece is about ten times faster.
"""

from __future__ import annotations

import pickle
from typing import Any


def pack(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def unpack(data: bytes) -> Any:
    """The inverse of `pack`. Only for what the actors of one run send to each other: pickle trusts its sender."""
    return pickle.loads(data)
