"""Fetch Prometheus and promtool for the tests of docs/monitoring.md, and print their folder.

They come from PATH, or from Debian's package, which is unpacked into the cache of the development
cluster: installed, it would start a server. tools/fresh.sh removes it with the cache. What is there
already takes no time. Standard library only: it runs before anything is installed.
"""

import os
import shutil
import sys
from pathlib import Path

from devcluster.settings import Settings
from devcluster.shell import CommandFailed, DevclusterError, exclusive, run

PROGRAMS = ("prometheus", "promtool")
LISTS = Path("/var/lib/apt/lists")
"""Lists of packages, without which apt-get downloads nothing. Only root can renew them."""


def fetch(settings: Settings) -> Path:
    """Return the folder of both programs.

    Raises:
        DevclusterError: they are not on PATH, and there is no Debian package to be had.
    """
    if reason := refusal(settings):
        raise DevclusterError(reason)
    if found := _on_path():
        return found
    folder = settings.cache / "prometheus"
    settings.cache.mkdir(parents=True, exist_ok=True)
    with exclusive(settings.cache / "apt.lock"):  # as for the packages of the cluster
        if not folder.is_dir():
            _unpack(settings.cache / ".partial-prometheus", folder)
    return folder


def refusal(settings: Settings) -> str | None:
    """Return why this machine cannot have the programs, and what to do; None if it can."""
    if _on_path() or (settings.cache / "prometheus").is_dir():
        return None
    if shutil.which("apt-get") is None:
        return "put prometheus and promtool on PATH: there is no apt-get to fetch them"
    if os.geteuid() != 0 and not any(LISTS.glob("*_Packages*")):
        return _renew("there are no lists of packages")
    return None


def _on_path() -> Path | None:
    """Return the folder on PATH that has both programs."""
    folders = map(Path, os.get_exec_path())
    return next((f for f in folders if all(shutil.which(p, path=f) for p in PROGRAMS)), None)


def _renew(reason: object) -> str:
    return f"put prometheus and promtool on PATH, or run `apt-get update` as root: {reason}"


def _unpack(partial: Path, folder: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        run(["apt-get", "download", "prometheus"], cwd=partial)
    except CommandFailed as error:  # no lists of packages yet, or old ones
        if os.geteuid() != 0:
            raise DevclusterError(_renew(error)) from error
        run(["apt-get", "update"])
        run(["apt-get", "download", "prometheus"], cwd=partial)
    (package,) = partial.glob("prometheus_*.deb")
    run(["dpkg-deb", "--extract", package, partial / "all"])
    programs = partial / "programs"
    programs.mkdir()
    for name in PROGRAMS:
        (partial / "all/usr/bin" / name).rename(programs / name)
    programs.rename(folder)
    shutil.rmtree(partial)


if __name__ == "__main__":
    try:
        print(fetch(Settings.from_environment()))
    except DevclusterError as error:
        sys.exit(f"prometheus: {error}")
