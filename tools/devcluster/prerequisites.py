"""What the machine must have: root, Linux, and a few Debian packages, which are installed when they are missing."""

import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

from devcluster.configs import cni_plugin_folder
from devcluster.console import progress
from devcluster.settings import Settings
from devcluster.shell import DevclusterError, NoClusterPossible, run

# A command that each package brings, and the package.
PACKAGES: Mapping[str, str] = {
    "etcd": "etcd-server",
    "containerd": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "nsenter": "util-linux",
    "sysctl": "procps",
    "openssl": "openssl",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
}
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # bit numbers of linux/capability.h
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def missing_packages() -> list[str]:
    """Debian packages whose files this machine lacks."""
    missing = [package for command, package in PACKAGES.items() if shutil.which(command) is None]
    if cni_plugin_folder() is None:
        missing.append("containernetworking-plugins")
    if not _KEYRING.exists():
        missing.append("debian-archive-keyring")
    return missing


def host_refusal() -> str | None:
    """Why this machine can't be a node, in one line; None when it can."""
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
    """Which of the capabilities that a node needs a process lacks; `status` is its /proc/<pid>/status."""
    (line,) = [line for line in status.splitlines() if line.startswith("CapEff:")]
    effective = int(line.split()[1], 16)
    return [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]


def require_host() -> None:
    """Raises NoClusterPossible, with the reasons of all kinds of cluster in one line."""
    refusal = host_refusal()
    if refusal is not None:
        raise NoClusterPossible(
            f"no Kubernetes can be had here: no CONTEXT= given, no Docker with kind, and no single node on this host ({refusal})"
        )


def install_packages(settings: Settings) -> None:
    """Installs what is missing.

    Raises:
        CommandFailed: apt-get failed.
        DevclusterError: it succeeded and something is still missing.
    """
    missing = missing_packages()
    if not missing:
        return
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    with progress(f"installing Debian packages {' '.join(missing)}"):
        log = settings.cache / "log" / "apt.log"
        run(["apt-get", "update"], env=environment, log=log)
        run(
            ["apt-get", "install", "-y", "--no-install-recommends", *missing],
            env=environment,
            log=log,
        )
    if still := missing_packages():
        raise DevclusterError(f"still missing after apt-get install: {', '.join(still)}")
