"""One parent cgroup of our own for all pods, so that `down` finds every one of them. Knows cgroup v1 and v2."""

import contextlib
import os
from pathlib import Path

from devcluster.waiting import wait_for

_GONE_SECONDS = 60
_ROOT = Path("/sys/fs/cgroup")


def is_v2(root: Path = _ROOT) -> bool:
    """Whether this machine has the unified hierarchy only."""
    return (root / "cgroup.controllers").exists()


def hierarchies(root: Path = _ROOT) -> list[Path]:
    """The mounted hierarchies: the root itself in v2; in v1 one per controller, links such as cpu -> cpu,cpuacct once."""
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
    """Makes the parents and gives them what pods need: the controllers (v2), the CPUs and memory nodes (v1 cpuset)."""
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


def processes(name: str, root: Path = _ROOT) -> set[int]:
    """Pids of every process below the parents, of which some may vanish meanwhile."""
    found: set[int] = set()
    for hierarchy in hierarchies(root):
        for folder, _, _ in os.walk(hierarchy / name):
            with contextlib.suppress(OSError):
                found.update(map(int, Path(folder, "cgroup.procs").read_text().split()))
    return found


def remove(name: str, root: Path = _ROOT) -> None:
    """Removes the parents with all that is below them; the pods' processes must be killed, but their last threads may still be there.

    Raises:
        DevclusterError: something keeps them for a minute.
    """
    parents = [hierarchy / name for hierarchy in hierarchies(root)]

    def gone() -> bool:
        for parent in parents:
            for folder, _, _ in os.walk(parent, topdown=False):
                with contextlib.suppress(OSError):  # busy, or removed by whoever made it
                    os.rmdir(folder)
        return not any(parent.exists() for parent in parents)

    wait_for(f"the cgroups {name} to be empty", gone, seconds=_GONE_SECONDS)
