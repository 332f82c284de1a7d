"""What passes between an env worker and a process with an environment in it: pickled frames, each after its length.

Both ends belong to one user: pickle is a format here, not a border. A frame from an isolated environment is bounded all the same.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from typing import Any

LENGTH = struct.Struct("<Q")

NUMBER = struct.Struct("<Q")
"""Number of an environment, as its worker counts them; the end of its socket comes with it."""

STATUS = struct.Struct("<Qi")
"""Number of an environment whose process ended, and the exit status as `os.waitstatus_to_exitcode` has it."""

MAX_FRAME = 64 * 1024 * 1024
"""Bytes: text of the longest observation that is allowed, a picture of 4,000 x 4,000 pixels, and room."""


class TooLong(Exception):
    """A frame of more than `MAX_FRAME` bytes."""


def encoded(value: Any) -> bytes:
    """A frame. Raises what pickling raises."""
    body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


def receive(end: socket.socket) -> Any:
    """The next frame, waiting for it. Raises `EOFError` when the other end is closed."""
    (length,) = LENGTH.unpack(_exactly(end, LENGTH.size))
    return pickle.loads(_exactly(end, length))


async def receive_async(reader: asyncio.StreamReader) -> Any:
    """The next frame. Raises `EOFError` when the other end is closed, `TooLong`, or what unpickling raises."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MAX_FRAME:
        raise TooLong(f"{length:,} bytes; {MAX_FRAME:,} are allowed")
    return pickle.loads(await reader.readexactly(length))


def _exactly(end: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = end.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
