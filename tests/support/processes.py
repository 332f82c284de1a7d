"""Whether processes live: asked of the kernel once, because they may end between two questions."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def lives(pid: int) -> bool:
    """False for a zombie, too: whoever inherited it may not reap it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def children(pid: int) -> list[int]:
    """Zombies, too."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(file.read_text(errors="replace").rpartition(")")[2].split()[1]) == pid:
                found.append(int(file.parent.name))
    return found
