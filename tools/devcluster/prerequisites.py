"""The prerequisites of a node: Linux, root, and a few Debian packages, installed if missing."""

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from devcluster.configs import cni_plugin_folder
from devcluster.console import progress
from devcluster.settings import Settings
from devcluster.shell import (
    CommandFailed,
    DevclusterError,
    NoClusterPossible,
    exclusive,
    run,
    write_if_changed,
)

# A command that each package brings, and the package.
PACKAGES: Mapping[str, str] = {
    "etcd": "etcd-server",
    "containerd": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "iptables": "iptables",
    "ipset": "ipset",
    "conntrack": "conntrack",
    "nsenter": "util-linux",
    "sysctl": "procps",
    "openssl": "openssl",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
}
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # bit numbers of linux/capability.h
_APT = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def missing_packages() -> list[str]:
    """Return the Debian packages that this machine lacks, judged by their files."""
    missing = [package for command, package in PACKAGES.items() if shutil.which(command) is None]
    if cni_plugin_folder() is None:
        missing.append("containernetworking-plugins")
    if not _KEYRING.exists():
        missing.append("debian-archive-keyring")
    if not has_venv():
        missing.append(venv_package())
    return missing


def venv_package() -> str:
    """Return Debian's package with which this Python makes environments.

    python3-venv would be that of the default Python, which may be another one.
    """
    return f"python{sys.version_info.major}.{sys.version_info.minor}-venv"


def has_venv() -> bool:
    """Return False if this is Debian's Python without `venv_package`: it makes no environments."""
    ours = sys.base_prefix == "/usr"
    return not ours or Path(sysconfig.get_path("stdlib"), "ensurepip").is_dir()


def host_refusal() -> str | None:
    """Return why this machine cannot be a node, in one line; None if it can."""
    if platform.system() != "Linux":
        return f"{platform.system()} is not Linux"
    if os.geteuid() != 0:
        return "not root"
    if lacking := lacking_capabilities(Path("/proc/self/status").read_text()):
        return f"root without {', '.join(lacking)}, as in an unprivileged container"
    if not os.access("/sys/fs/cgroup", os.W_OK):
        return "/sys/fs/cgroup is read-only"
    if missing_packages() and shutil.which("apt-get") is None:
        return f"no apt-get to install {', '.join(missing_packages())}"
    return None


def lacking_capabilities(status: str) -> list[str]:
    """Return the capabilities of a node that a process lacks.

    Args:
        status: /proc/<pid>/status of the process.
    """
    (line,) = [line for line in status.splitlines() if line.startswith("CapEff:")]
    effective = int(line.split()[1], 16)
    return [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]


def require_host() -> None:
    """Raise NoClusterPossible, with one line for all kinds of cluster, if there can be none."""
    refusal = host_refusal()
    if refusal is not None:
        raise NoClusterPossible(
            "this machine can have no Kubernetes: no CONTEXT= given, no Docker with kind, and no"
            f" single node on this host ({refusal})"
        )


def install_packages(settings: Settings) -> None:
    """Install what is missing and record all new packages, so that tools/fresh.sh can purge them.

    Raises:
        CommandFailed: apt-get failed.
        DevclusterError: apt-get succeeded and something is still missing.
    """
    if missing_packages():
        with exclusive(settings.cache / "apt.lock"):
            _install(missing_packages(), settings)


def _install(missing: list[str], settings: Settings) -> None:
    if not missing:  # another command has just installed it
        return
    before = installed_packages()
    with progress(f"installing Debian packages {' '.join(missing)}"):
        log = settings.cache / "log" / "apt.log"
        try:
            run(["apt-get", "update"], env=_APT, log=log)
            install = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
            run(install, env=_APT, log=log)
        finally:
            _record(settings.installed_packages, installed_packages() - before)
    if still := missing_packages():
        raise DevclusterError(f"still missing after apt-get install: {', '.join(still)}")


def installed_packages() -> set[str]:
    """Return the names of all installed Debian packages."""
    return {name for name, status in _query("db:Status-Status") if status == "installed"}


def purgeable(recorded: Iterable[str]) -> list[str]:
    """Return the recorded packages that can be purged without taking any other with them.

    A package stays if the system cannot do without it, or if one that someone else installed
    depends on it by now.
    """
    required = {name for name, essential in _query("Essential") if essential == "yes"}
    ours = (set(recorded) & installed_packages()) - required
    if _removed_with(ours) <= ours:
        return sorted(ours)
    ours -= {name for name in sorted(ours) if not _removed_with({name}) <= ours}
    return sorted(ours) if _removed_with(ours) <= ours else []


def purge(packages: Sequence[str]) -> None:
    """Purge packages that `purgeable` returned."""
    run(["apt-get", "purge", "-y", *packages], env=_APT)
    run(["apt-get", "clean"], env=_APT)


def _removed_with(packages: Collection[str]) -> set[str]:
    """Return everything that apt-get would remove with these packages."""
    if not packages:
        return set()
    try:
        plan = run(["apt-get", "--simulate", "purge", *sorted(packages)], env=_APT)
    except CommandFailed:  # others need them in a way that apt-get cannot resolve
        return {*packages, "others"}
    lines = [line.split() for line in plan.splitlines()]
    return {words[1].partition(":")[0] for words in lines if words[:1] in (["Purg"], ["Remv"])}


def _query(field: str) -> list[tuple[str, str]]:
    """Return name and one field of every package that dpkg knows."""
    out = run(["dpkg-query", "--show", f"--showformat=${{Package}} ${{{field}}}\\n"])
    return [(name, value) for name, _, value in (line.partition(" ") for line in out.splitlines())]


def _record(record: Path, packages: Collection[str]) -> None:
    known = record.read_text().split() if record.exists() else []
    write_if_changed(record, "".join(f"{name}\n" for name in sorted({*known, *packages})))
