"""Processes of this machine and what descends from them, as /proc tells it. Empty where there is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A pid alone may come back as another process."""

    pid: int
    started: int
    """In clock ticks since boot."""


def parents() -> dict[Process, int]:
    """The pid of the parent of each living process; zombies have ended."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = (
                stat.read_bytes().rpartition(b")")[2].split()
            )  # the name before may be no text: it is cut after 15 bytes
            if fields[0] not in b"ZX":
                found[Process(int(stat.parent.name), int(fields[19]))] = int(fields[1])
    return found


def children(pid: int) -> set[Process]:
    """Those that live."""
    return {process for process, parent in parents().items() if parent == pid}


def families(processes: Iterable[Process]) -> set[Process]:
    """Those of these processes that live, and all that descend from them."""
    living = parents()
    found = [process for process in processes if process in living]
    return {*found, *_descendants([process.pid for process in found], living)}


def family(pid: int) -> list[int]:
    """A process and all its descendants that live, the nearest first."""
    return [pid, *(process.pid for process in _descendants([pid], parents()))]


def _descendants(pids: Iterable[int], living: Mapping[Process, int]) -> list[Process]:
    children: dict[int, list[Process]] = {}
    for process, parent in living.items():
        children.setdefault(parent, []).append(process)
    found = [child for pid in pids for child in children.get(pid, [])]
    for process in found:  # which grows
        found += children.get(process.pid, [])
    return found
