"""One parent cgroup of our own for all pods, so that `down` finds every one of them. Knows cgroup v1 and v2."""

import contextlib
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def is_v2(root: Path = _ROOT) -> bool:
    """Whether this machine has the unified hierarchy only."""
    return (root / "cgroup.controllers").exists()


def hierarchies(root: Path = _ROOT) -> list[Path]:
    """The mounted hierarchies: the root itself in v2; in v1 one per controller, links such as cpu -> cpu,cpuacct once."""
    return [root] if is_v2(root) else [folder for folder in sorted(root.iterdir()) if folder.is_dir() and not folder.is_symlink()]


def create(name: str, root: Path = _ROOT) -> None:
    """Makes the parents and gives them what pods need: the controllers (v2), the CPUs and memory nodes (v1 cpuset)."""
    if is_v2(root):
        for controller in (root / "cgroup.controllers").read_text().split():
            with contextlib.suppress(OSError):  # some controllers can't be delegated while the root has processes
                (root / "cgroup.subtree_control").write_text(f"+{controller}")
    for hierarchy in hierarchies(root):
        folder = hierarchy / name
        folder.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):
            source = hierarchy / setting
            if source.exists() and not is_v2(root):
                (folder / setting).write_text(source.read_text())


def processes(name: str, root: Path = _ROOT) -> set[int]:
    """Pids of every process below the parents."""
    files = [file for hierarchy in hierarchies(root) for file in (hierarchy / name).rglob("cgroup.procs")]
    return {int(pid) for file in files for pid in file.read_text().split()}


def remove(name: str, root: Path = _ROOT) -> None:
    """Removes the parents with all that is below them; the pods' processes must be gone."""
    for hierarchy in hierarchies(root):
        parent = hierarchy / name
        if parent.is_dir():
            for folder in sorted((path for path in parent.rglob("*") if path.is_dir()), reverse=True):
                folder.rmdir()
            parent.rmdir()
