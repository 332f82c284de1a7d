"""Fetch Prometheus and promtool for the tests of docs/monitoring.md, and print their folder.

They come from PATH, or from Debian's package, which is unpacked into the cache of the development
cluster: installed, it would start a server. tools/fresh.sh removes it with the cache. What is there
already takes no time. Standard library only: it runs before anything is installed.
"""

import shutil
import sys
from pathlib import Path

from devcluster.settings import Settings
from devcluster.shell import CommandFailed, DevclusterError, exclusive, run

PROGRAMS = ("prometheus", "promtool")


def fetch(settings: Settings) -> Path:
    """Return the folder of both programs.

    Raises:
        DevclusterError: they are not on PATH, and there is no Debian package to be had.
    """
    found = shutil.which("promtool")
    if found and shutil.which("prometheus"):
        return Path(found).parent
    folder = settings.cache / "prometheus"
    settings.cache.mkdir(parents=True, exist_ok=True)
    with exclusive(settings.cache / "apt.lock"):  # as for the packages of the cluster
        if not folder.is_dir():
            _unpack(settings.cache / ".partial-prometheus", folder)
    return folder


def obtainable(settings: Settings) -> bool:
    """Return True if `fetch` can work here."""
    there = (settings.cache / "prometheus").is_dir() or shutil.which("promtool") is not None
    return there or shutil.which("apt-get") is not None


def _unpack(partial: Path, folder: Path) -> None:
    if shutil.which("apt-get") is None:
        raise DevclusterError("put prometheus and promtool on PATH: there is no apt-get to fetch")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        run(["apt-get", "download", "prometheus"], cwd=partial)
    except CommandFailed:  # no lists of packages yet, or old ones
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
