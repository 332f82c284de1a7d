"""Ports of this machine: a free one, and whose it is. Linux's /proc."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

from agenticrun_workers.processes import family

FIRST, LAST = 20_000, 32_000
"""Below the range that the kernel gives to outgoing connections (from 32768), so those do not take a server's port."""
LISTEN = "0A"


def free_port(host: str) -> int:
    """A port that nothing listens on at this moment. Random, so that programs that look at once rarely find the same."""
    while True:
        port = random.SystemRandom().randint(FIRST, LAST)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port


def listeners_of(port: int) -> set[int]:
    """Inodes of the sockets that listen on a TCP port, on any address."""
    found: set[int] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(int(fields[9]))
    return found


def listens_alone(pid: int, port: int) -> bool:
    """Whether a process and its descendants are the only ones that listen on the port.

    Servers that set SO_REUSEPORT can share one without an error, and the kernel would deal out the requests between them.
    """
    listeners = listeners_of(port)
    return bool(listeners) and listeners <= {
        inode for each in family(pid) for inode in _sockets(each)
    }


def _sockets(pid: int) -> set[int]:
    """Inodes of the sockets that a process holds."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                kind, _, inode = os.readlink(entry).rpartition(":[")
                if kind == "socket":
                    found.add(int(inode.rstrip("]")))
    return found
