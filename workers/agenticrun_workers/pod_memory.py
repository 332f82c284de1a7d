"""Memory of this pod: its limit, and how much of it is in use.

From the kernel's control groups, version 1 or 2: a container sees its own below /sys/fs/cgroup.
"""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


class PodMemory:
    """Memory of this process's control group, which it shares with the other processes of the pod.

    Args:
        root: where the control groups are mounted.
    """

    def __init__(self, root: Path = CGROUPS) -> None:
        if (root / "memory.current").exists():
            self._limit, self._usage = root / "memory.max", root / "memory.current"
            self._stat, self._cache = root / "memory.stat", ("inactive_file", "active_file")
        else:
            group = root / "memory"
            self._limit = group / "memory.limit_in_bytes"
            self._usage = group / "memory.usage_in_bytes"
            self._stat = group / "memory.stat"
            self._cache = ("total_inactive_file", "total_active_file")

    def limit(self) -> int | None:
        """Return the limit in bytes; None if there is none below the machine's memory."""
        try:
            limit = self._limit.read_text().strip()
        except OSError:
            return None
        if limit == "max" or int(limit) >= machine_bytes():
            return None
        return int(limit)

    def used(self) -> int:
        """Return the bytes that the kernel cannot take back: cached files do not count."""
        stat = dict(line.split() for line in self._stat.read_text().splitlines())
        cached = sum(int(stat.get(name, 0)) for name in self._cache)
        return max(0, int(self._usage.read_text()) - cached)


def machine_bytes() -> int:
    """Return the memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
