"""One parent cgroup of our own for all pods, so that `down` finds every one of them. Knows cgroup v1 and v2."""

import contextlib
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def is_v2(root: Path = _ROOT) -> bool:
    """Whether this machine has the unified hierarchy only."""
    return (root / "cgroup.controllers").exists()


def parents(name: str, root: Path = _ROOT) -> list[Path]:
    """The folder `name` in each hierarchy: one in v2, one per controller in v1 (links such as cpu -> cpu,cpuacct once)."""
    if is_v2(root):
        return [root / name]
    return [folder / name for folder in sorted(root.iterdir()) if folder.is_dir() and not folder.is_symlink() and folder.name != "unified"]


def create(name: str, root: Path = _ROOT) -> None:
    """Makes the parents and gives them what pods need: the controllers (v2), the CPUs and memory nodes (v1 cpuset)."""
    if is_v2(root):
        for controller in (root / "cgroup.controllers").read_text().split():
            with contextlib.suppress(OSError):  # some controllers can't be delegated while the root has processes
                (root / "cgroup.subtree_control").write_text(f"+{controller}")
    for folder in parents(name, root):
        folder.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):
            source = folder.parent / setting
            if source.exists() and not is_v2(root):
                (folder / setting).write_text(source.read_text())


def remove(name: str, root: Path = _ROOT) -> None:
    """Removes the parents with all that is below them; the pods' processes must be gone."""
    for parent in parents(name, root):
        if parent.is_dir():
            for folder in sorted((path for path in parent.rglob("*") if path.is_dir()), reverse=True):
                folder.rmdir()
            parent.rmdir()
