"""Put this machine back into the state of one that has never seen AgenticRun.

Stops the development cluster, purges the Debian packages that it installed, and removes its caches
and images, the Python environments and outputs of this clone, and what killed runs left in /tmp.
After it, `make demo` and `make test` do what they do for a new user.

It lists everything with its size and asks. It touches nothing while a run, a test or another
command of AgenticRun is alive. Standard library only: it removes the environments.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from devcluster import prerequisites
from devcluster.settings import Settings
from devcluster.shell import DevclusterError, run

DEVCLUSTER = [sys.executable, str(Path(__file__).resolve().parent / "devcluster")]
IN_THE_CLONE = (
    *(".venv", ".engines", "runs", "build", "dist", ".mypy_cache", ".ruff_cache"),
    *(".pytest_cache", ".import_linter_cache", ".hypothesis"),
)
TMP = Path("/tmp")
OURS = re.compile(
    r"tools/(devcluster|demo\.py|ci\.py|prepare\.py|stalls\.py)\b|\bagenticrun_workers\b"
    r"|/bin/agenticrun\b"
)
PYTEST = re.compile(r"(^|/)pytest\b|-m pytest\b")
FINAL = ("Succeeded", "Failed")


@dataclass(frozen=True)
class Item:
    """One thing to remove.

    Attributes:
        name: what it is.
        size: bytes on disk.
        remove: removes it.
        shared: other projects on this machine use it too; it costs them time, not data.
    """

    name: str
    size: int
    remove: Callable[[], object]
    shared: bool = False


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when everything is gone, 1 when something failed or is alive, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="fresh.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dry-run", action="store_true", help="list, and remove nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--keep-shared", action="store_true", help="leave the caches of Go, uv, pip and apt"
    )
    options = parser.parse_args(arguments)
    settings = Settings.from_environment({**os.environ, "CONTEXT": ""})
    try:
        if not options.dry_run and _refused(settings):
            return 1
        items = [
            item
            for item in listing(settings, os.environ)
            if not (item.shared and options.keep_shared)
        ]
        show(items)
        if not items or options.dry_run:
            return 0
        if not options.yes:
            if not sys.stdin.isatty():
                parser.error("there is no terminal to ask on; pass --yes or --dry-run")
            if input("\nRemove all of this? [y/N] ").strip().lower() not in ("y", "yes"):
                print("Nothing was removed.")
                return 1
            if _refused(settings):
                return 1
        for item in items:
            print(f"removing {item.name}", flush=True)
            item.remove()
    except (DevclusterError, OSError) as error:
        print(f"fresh: {error}", file=sys.stderr)
        return 1
    print("This machine is fresh.")
    return 0


def _refused(settings: Settings) -> bool:
    """Print what is alive, if anything is."""
    alive = [*alive_processes(settings.name), *alive_runs(settings)]
    if alive:
        print("Nothing was removed, because this is alive:", *alive, sep="\n  ")
    return bool(alive)


def listing(settings: Settings, environment: Mapping[str, str]) -> list[Item]:
    """Return what there is to remove, in the order of removal.

    The cluster goes first: stopping it needs the packages and the programs in the cache.
    """
    items = [*cluster(settings), *packages(settings), *docker_images()]
    home = Path(environment.get("HOME") or Path.home())
    protected = (home, settings.repository)
    paths = [(settings.cache, "cache of the development cluster: programs, images, logs", False)]
    paths += [(settings.state, "state of the development cluster", False)]
    paths += [(Path("/var/lib/containers/cache"), "blob cache of buildah", True)]
    paths += [(settings.repository / name, f"{name} of this clone", False) for name in IN_THE_CLONE]
    paths += [(path, "left by a killed run", False) for path in sorted(TMP.glob("arun-*"))]
    paths += [(path, words, True) for words, path in shared_caches(environment, home).items()]
    for path, words, shared in paths:
        if path.is_symlink() or path.exists():
            if any(place.is_relative_to(path) for place in protected):
                raise DevclusterError(f"{path} ({words}) is more than ours: not removed")
            items.append(Item(f"{path} ({words})", disk_usage(path), remover(path), shared))
    return items


def cluster(settings: Settings) -> list[Item]:
    """Return the cluster that is up on this machine, if any."""

    def down() -> None:
        run([*DEVCLUSTER, "down"], env={"CONTEXT": ""})

    if settings.state.exists():
        return [Item(f"the cluster that is up ({settings.state})", 0, down)]
    if shutil.which("kind") and settings.name in _output("kind", "get", "clusters").split():
        return [Item(f"the kind cluster {settings.name}", 0, down)]
    return []


def packages(settings: Settings) -> list[Item]:
    """Return the Debian packages that `devcluster up` installed and nothing else needs by now."""
    record = settings.installed_packages
    if not record.exists():
        return []
    recorded = record.read_text().split()
    ours = prerequisites.purgeable(recorded)
    needed = sorted(prerequisites.installed_packages() & set(recorded) - set(ours))
    kept = f" (kept, because others need them: {' '.join(needed)})" if needed else ""
    if not ours:
        return [Item(f"{record}, the list of installed packages{kept}", 0, record.unlink)]

    def purge() -> None:
        prerequisites.purge(ours)
        record.unlink()

    query = _output("dpkg-query", "--show", "--showformat=${Installed-Size}\n", *ours)
    size = sum(int(line) * 1024 for line in query.split())
    return [Item(f"Debian packages: {' '.join(ours)}{kept}", size, purge)]


def docker_images() -> list[Item]:
    """Return the images of AgenticRun in Docker's store."""
    if shutil.which("docker") is None:
        return []
    arguments = ("--filter", "reference=agenticrun/*", "--format", "{{.Repository}}:{{.Tag}}")
    names = _output("docker", "image", "ls", *arguments).split()
    return [
        Item(f"Docker image {name}", 0, partial(run, ["docker", "image", "rm", name]))
        for name in names
    ]


def shared_caches(environment: Mapping[str, str], home: Path) -> dict[str, Path]:
    """Return the caches that set-up shares with other projects, by description."""
    caches = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    go_path = Path(environment.get("GOPATH", "").partition(":")[0] or home / "go")
    return {
        "Go modules": Path(environment.get("GOMODCACHE") or go_path / "pkg" / "mod"),
        "compiled Go packages": Path(environment.get("GOCACHE") or caches / "go-build"),
        "uv's cache": Path(environment.get("UV_CACHE_DIR") or caches / "uv"),
        "pip's cache": Path(environment.get("PIP_CACHE_DIR") or caches / "pip"),
    }


def alive_processes(name: str, proc: Path = Path("/proc")) -> list[str]:
    """Return the processes of AgenticRun that are alive, of any clone.

    Our own parents do not count, nor do processes of pods: `alive_runs` finds running runs.

    Args:
        name: of the cluster, and of the cgroup of its pods.
    """
    parents = _ancestors(os.getpid(), proc)
    found = []
    for folder in sorted(proc.iterdir()):
        if not folder.name.isdigit() or int(folder.name) in parents:
            continue
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            where = Path(os.readlink(folder / "cwd"))
            in_pod = f":/{name}/" in (folder / "cgroup").read_text()
        except OSError:  # it has ended, or it is a thread of the kernel
            continue
        command = " ".join(" ".join(words).split())
        testing = PYTEST.search(command) and (where / "tools" / "devcluster").is_dir()
        if not in_pod and (OURS.search(command) or testing):
            found.append(f"process {folder.name}: {command[:100]}")
    return found


def alive_runs(settings: Settings) -> list[str]:
    """Return the runs in the cluster that have not finished."""
    kubectl = settings.cache / "bin" / "current" / "kubectl"
    if not settings.kubeconfig.exists() or not kubectl.exists():
        return []
    ask = [str(kubectl), f"--kubeconfig={settings.kubeconfig}", "--request-timeout=20s"]
    answer = _output(*ask, "get", "agenticruns", "--all-namespaces", "--output=json")
    return [
        f"run {item['metadata']['namespace']}/{item['metadata']['name']} in the cluster"
        for item in (json.loads(answer)["items"] if answer else ())
        if item.get("status", {}).get("phase") not in FINAL
    ]


def _ancestors(pid: int, proc: Path) -> set[int]:
    found = set()
    while pid:
        found.add(pid)
        try:
            pid = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found


def disk_usage(path: Path) -> int:
    """Return the bytes that a file or folder takes on disk; a file with two names counts once."""
    sizes: dict[tuple[int, int], int] = {}
    waiting = [path]
    while waiting:
        entry = waiting.pop()
        try:
            info = entry.lstat()
            sizes[info.st_dev, info.st_ino] = info.st_blocks * 512
            if stat.S_ISDIR(info.st_mode) and not os.path.ismount(entry):
                waiting += [Path(found) for found in os.scandir(entry)]
        except OSError:  # it is already gone
            continue
    return sum(sizes.values())


def remover(path: Path) -> Callable[[], None]:
    """Return a function that removes a file, a link (never what it leads to) or a folder."""

    def remove() -> None:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():  # it may have gone with the cluster
            if os.geteuid() != 0:
                run(["chmod", "-R", "u+w", path])  # Go's module cache is read-only
            shutil.rmtree(path)

    return remove


def show(items: list[Item]) -> None:
    """Print the listing."""
    if not items:
        print("There is nothing to remove.")
        return
    for item in items:
        shared = "  [shared with other projects]" if item.shared else ""
        print(f"{human(item.size):>9}  {item.name}{shared}")
    print(f"{human(sum(item.size for item in items)):>9}  in all")


def human(size: int) -> str:
    """Return a size in the unit that suits it."""
    if size < 1e5:
        return ""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _output(*command: str) -> str:
    """Return stdout of a command, "" when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
