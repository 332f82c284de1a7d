"""Every name, address, path and version of the dev cluster, in one value."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KUBERNETES_VERSION = "v1.34.4"
KUBERAY_VERSION = "v1.6.1"
KUEUE_VERSION = "v0.19.2"
HELM_VERSION = "v3.19.2"


@dataclass(frozen=True)
class Settings:
    """Places and names of the cluster.

    Attributes:
        repository: root of the source tree.
        cache: what is expensive to make (programs, base image, image stores); kept by `down`.
        state: everything that a running cluster writes; removed by `down`.
        context: kubeconfig context that CONTEXT= names, or "" for a cluster of our own.
        image_registry: where images go when `context` is used, from IMAGE_REGISTRY.
        name: of the network namespace, of the cgroup and, with suffixes, of node and interface.
        fake_gpus: number of nvidia.com/gpu that the node advertises.
    """

    repository: Path
    cache: Path
    state: Path
    context: str = ""
    image_registry: str = ""
    name: str = "agenticrun"
    fake_gpus: int = 8

    host_ip: str = "10.123.0.1"
    node_ip: str = "10.123.0.2"
    link_prefix: int = 24
    pod_cidr: str = "10.244.0.0/16"
    service_cidr: str = "10.96.0.0/16"
    apiserver_service_ip: str = "10.96.0.1"
    dns_ip: str = "10.96.0.10"
    apiserver_port: int = 6443
    etcd_port: int = 2379
    registry_port: int = 5000

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """Read AGENTICRUN_CACHE, AGENTICRUN_DEVCLUSTER_STATE, CONTEXT and IMAGE_REGISTRY."""
        home = Path(environment.get("HOME") or Path.home())
        return cls(
            repository=Path(__file__).resolve().parents[2],
            cache=Path(environment.get("AGENTICRUN_CACHE") or home / ".cache" / "agenticrun"),
            state=Path(
                environment.get("AGENTICRUN_DEVCLUSTER_STATE") or "/var/lib/agenticrun-devcluster"
            ),
            context=environment.get("CONTEXT", ""),
            image_registry=environment.get("IMAGE_REGISTRY", "").rstrip("/"),
        )

    @property
    def node_name(self) -> str:
        """Name of the one node."""
        return f"{self.name}-node"

    @property
    def host_interface(self) -> str:
        """Host end of the veth pair; at most 15 characters."""
        return f"{self.name[:13]}-h"

    @property
    def netns_path(self) -> Path:
        """The node's network namespace, as `ip netns` keeps it."""
        return Path("/run/netns") / self.name

    @property
    def registry(self) -> str:
        """host:port of the image registry, the same for the host and for the node's containerd."""
        return f"{self.host_ip}:{self.registry_port}"

    @property
    def pki(self) -> Path:
        """Keys, certificates and kubeconfigs; readable by root only."""
        return self.state / "pki"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig of the host cluster."""
        return self.state / "kubeconfig"

    @property
    def installed_packages(self) -> Path:
        """Names of the Debian packages that `up` installed; beside the state, to outlive it."""
        return self.state.with_name(f"{self.state.name}-packages.txt")

    @property
    def etc(self) -> Path:
        """Rendered configuration files."""
        return self.state / "etc"

    @property
    def run_dir(self) -> Path:
        """Sockets and run-time state."""
        return self.state / "run"

    @property
    def logs(self) -> Path:
        """One log file per process."""
        return self.state / "logs"

    @property
    def containerd_socket(self) -> Path:
        """Containerd's gRPC socket, which also serves the CRI."""
        return self.run_dir / "containerd.sock"

    @property
    def containerd_root(self) -> Path:
        """Images and snapshots of containerd; in the cache, as unpacking them takes minutes."""
        return self.cache / "containerd"
