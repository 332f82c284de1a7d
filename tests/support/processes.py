"""The living processes, from one query of the kernel, and the folders of local runs' Ray.

Processes may end between two queries.
"""

from __future__ import annotations

import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil


def free_port() -> int:
    """Return a port that nobody used a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def lives(pid: int) -> bool:
    """False for a zombie, too: whoever inherited it may not reap it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def family(pid: int) -> list[int]:
    """Return a pid and the pids of its living descendants, parents before their children."""
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(pid).children(recursive=True)
        return [pid, *(child.pid for child in found if lives(child.pid))]
    return [pid]


def children(pid: int) -> list[int]:
    """Zombies, too."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(file.read_text(errors="replace").rpartition(")")[2].split()[1]) == pid:
                found.append(int(file.parent.name))
    return found


def of_session(leader: int) -> list[str]:
    """Return state and command of each living process of a session.

    Zombies are left out: they only wait for init to notice.
    """
    found = subprocess.run(
        ["ps", "-o", "stat=,args=", "--sid", str(leader)], capture_output=True, text=True
    )
    return [line for line in found.stdout.splitlines() if not line.startswith("Z")]


def ray_folders(driver: int | str = "*") -> set[Path]:
    """Of local runs on this machine, also of those that were killed: their pids come back."""
    return set(Path("/tmp").glob(f"arun-{driver}-*"))
