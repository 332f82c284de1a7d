"""The parent cgroup of all pods, v1 or v2, by which `down` finds every one of them."""

import contextlib
import os
from pathlib import Path

from devcluster.waiting import wait_for

_GONE_SECONDS = 60
_ROOT = Path("/sys/fs/cgroup")
_CPU_WEIGHTS = {"cpu.shares": "20480", "cpu.weight": "2000"}
"""CPU weight of all pods together, by the file of v1 and v2: that of 20 processes outside.

The default is that of one: beside a test run, pods would get a tenth of the processor and Ray would
not start in time.
"""


def is_v2(root: Path = _ROOT) -> bool:
    """Return True if this machine has the unified hierarchy only."""
    return (root / "cgroup.controllers").exists()


def hierarchies(root: Path = _ROOT) -> list[Path]:
    """Return the mounted hierarchies: the root in v2, one per controller in v1, without links."""
    return (
        [root]
        if is_v2(root)
        else [
            folder
            for folder in sorted(root.iterdir())
            if folder.is_dir() and not folder.is_symlink()
        ]
    )


def create(name: str, root: Path = _ROOT) -> None:
    """Make the parents with what pods need: controllers (v2), CPUs and memory nodes (v1 cpuset)."""
    if is_v2(root):
        for controller in (root / "cgroup.controllers").read_text().split():
            with contextlib.suppress(
                OSError
            ):  # some controllers can't be delegated while the root has processes
                (root / "cgroup.subtree_control").write_text(f"+{controller}")
    for hierarchy in hierarchies(root):
        folder = hierarchy / name
        folder.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):
            source = hierarchy / setting
            if source.exists() and not is_v2(root):
                (folder / setting).write_text(source.read_text())
        for setting, weight in _CPU_WEIGHTS.items():
            if (folder / setting).exists():
                (folder / setting).write_text(weight)


def processes(name: str, root: Path = _ROOT) -> set[int]:
    """Return the pids of all processes below the parents; some may have ended since."""
    found: set[int] = set()
    for hierarchy in hierarchies(root):
        for folder, _, _ in os.walk(hierarchy / name):
            with contextlib.suppress(OSError):
                found.update(map(int, Path(folder, "cgroup.procs").read_text().split()))
    return found


def remove(name: str, root: Path = _ROOT) -> None:
    """Remove the parents with all that is below them.

    The processes of the pods must have been killed; their last threads may still be there.

    Raises:
        DevclusterError: something keeps them for a minute.
    """
    parents = [hierarchy / name for hierarchy in hierarchies(root)]

    def gone() -> bool:
        for parent in parents:
            for folder, _, _ in os.walk(parent, topdown=False):
                with contextlib.suppress(OSError):  # busy, or removed by its owner
                    os.rmdir(folder)
        return not any(parent.exists() for parent in parents)

    wait_for(f"the cgroups {name} to be empty", gone, seconds=_GONE_SECONDS)
