"""The processes of the cluster with their flags.

Pure: settings and paths in, process specifications out.
"""

from pathlib import Path

from devcluster import configs
from devcluster.pki import FRONT_PROXY
from devcluster.processes import ProcessSpec
from devcluster.settings import Settings


class Components:
    """The process specifications of the one-node cluster.

    Args:
        programs: path of each program that we built, by name.
    """

    def __init__(self, settings: Settings, programs: dict[str, Path]) -> None:
        """See the class."""
        self._settings = settings
        self._programs = programs

    def etcd(self) -> ProcessSpec:
        """One member; no fsync, because the data never outlives the machine's uptime."""
        url = f"http://127.0.0.1:{self._settings.etcd_port}"
        argv = [
            "etcd",
            "--data-dir",
            f"{self._settings.state}/etcd",
            "--unsafe-no-fsync",
            "--listen-client-urls",
            url,
        ]
        argv += ["--advertise-client-urls", url, "--listen-peer-urls", "http://127.0.0.1:2380"]
        return ProcessSpec("etcd", (*argv, "--logger", "zap", "--log-level", "warn"))

    def apiserver(self) -> ProcessSpec:
        """RBAC and the Node authorizer on, as on a production cluster."""
        settings, pki = self._settings, self._settings.pki
        flags = {
            "etcd-servers": f"http://127.0.0.1:{settings.etcd_port}",
            "bind-address": "0.0.0.0",
            "advertise-address": settings.node_ip,
            "secure-port": settings.apiserver_port,
            "service-cluster-ip-range": settings.service_cidr,
            "service-account-issuer": "https://kubernetes.default.svc.cluster.local",
            "service-account-key-file": pki / "service-accounts.pub",
            "service-account-signing-key-file": pki / "service-accounts.key",
            "client-ca-file": pki / "ca.crt",
            "tls-cert-file": pki / "apiserver.crt",
            "tls-private-key-file": pki / "apiserver.key",
            "kubelet-client-certificate": pki / "apiserver-kubelet.crt",
            "kubelet-client-key": pki / "apiserver-kubelet.key",
            "kubelet-certificate-authority": pki / "ca.crt",
            "kubelet-preferred-address-types": "InternalIP",
            "requestheader-client-ca-file": pki / f"{FRONT_PROXY}.crt",
            "requestheader-allowed-names": FRONT_PROXY,
            "requestheader-username-headers": "X-Remote-User",
            "requestheader-group-headers": "X-Remote-Group",
            "requestheader-extra-headers-prefix": "X-Remote-Extra-",
            "proxy-client-cert-file": pki / "front-proxy-client.crt",
            "proxy-client-key-file": pki / "front-proxy-client.key",
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "allow-privileged": "true",
            "profiling": "false",
        }
        return self._kubernetes("kube-apiserver", flags)

    def controller_manager(self) -> ProcessSpec:
        """All default controllers, with the flex volume folder out of /usr/libexec."""
        settings, pki = self._settings, self._settings.pki
        flags = {
            "kubeconfig": pki / "kube-controller-manager.kubeconfig",
            "leader-elect": "false",
            "bind-address": "127.0.0.1",
            "use-service-account-credentials": "true",
            "service-account-private-key-file": pki / "service-accounts.key",
            "root-ca-file": pki / "ca.crt",
            "cluster-signing-cert-file": pki / "ca.crt",
            "cluster-signing-key-file": pki / "ca.key",
            "flex-volume-plugin-dir": settings.state / "kubelet" / "volume-plugins",
            "profiling": "false",
        }
        return self._kubernetes("kube-controller-manager", flags)

    def scheduler(self) -> ProcessSpec:
        """The default scheduler."""
        flags = {
            "kubeconfig": self._settings.pki / "kube-scheduler.kubeconfig",
            "leader-elect": "false",
            "bind-address": "127.0.0.1",
            "profiling": "false",
        }
        return self._kubernetes("kube-scheduler", flags)

    def kubelet(self) -> ProcessSpec:
        """The node agent; pods get a resolv.conf with nothing but cluster DNS."""
        settings = self._settings
        config = settings.etc / "kubelet.yaml"
        flags = {
            "config": config,
            "kubeconfig": settings.pki / "kubelet.kubeconfig",
            "root-dir": settings.state / "kubelet",
            "cert-dir": settings.state / "kubelet-pki",
            "hostname-override": settings.node_name,
            "node-ip": settings.node_ip,
        }
        return self._kubernetes(
            "kubelet", flags, {config: configs.kubelet(settings), settings.etc / "resolv.conf": ""}
        )

    def proxy(self) -> ProcessSpec:
        """Services, by iptables in the node's network namespace."""
        config = self._settings.etc / "kube-proxy.yaml"
        return self._kubernetes(
            "kube-proxy", {"config": config}, {config: configs.kube_proxy(self._settings)}
        )

    def containerd(self) -> ProcessSpec:
        """The container runtime, with the CNI and registry configuration that it reads."""
        settings = self._settings
        config = settings.etc / "containerd.toml"
        files = {
            config: configs.containerd(
                settings, configs.cni_plugin_folder() or configs.CNI_FOLDERS[0]
            ),
            settings.etc / "cni" / "10-bridge.conflist": configs.cni(settings),
            settings.etc / "registries" / settings.registry / "hosts.toml": configs.registry_hosts(
                settings
            ),
        }
        return ProcessSpec("containerd", ("containerd", "--config", str(config)), files)

    def registry(self) -> ProcessSpec:
        """The image registry, on the host's side."""
        config = self._settings.etc / "registry.yaml"
        argv = (str(self._programs["registry"]), "serve", str(config))
        return ProcessSpec(
            "registry", argv, {config: configs.registry(self._settings)}, in_netns=False
        )

    def coredns(self) -> ProcessSpec:
        """Cluster DNS as a plain process on the Service address."""
        config = self._settings.etc / "Corefile"
        return ProcessSpec(
            "coredns",
            (str(self._programs["coredns"]), "-conf", str(config)),
            {config: configs.coredns(self._settings)},
        )

    def fake_gpus(self) -> ProcessSpec:
        """The device plugin that advertises imaginary GPUs."""
        return ProcessSpec(
            "fakegpu", (str(self._programs["fakegpu"]), "-count", str(self._settings.fake_gpus))
        )

    def volumes(self) -> ProcessSpec:
        """The provisioner behind the default StorageClass."""
        settings = self._settings
        argv = [str(self._programs["volumes"]), "-kubeconfig", f"{settings.pki}/volumes.kubeconfig"]
        argv += ["-folder", f"{settings.state}/volumes", "-node", settings.node_name]
        return ProcessSpec("volumes", tuple(argv))

    def network_policies(self, program: Path) -> ProcessSpec:
        """The agent that enforces NetworkPolicies on the pods of the node."""
        kubeconfig = self._settings.pki / "kube-router.kubeconfig"
        return ProcessSpec(
            "kube-router", kube_router(program, kubeconfig, self._settings.node_name)
        )

    def _kubernetes(
        self, name: str, flags: dict[str, object], files: dict[Path, str] | None = None
    ) -> ProcessSpec:
        argv = (str(self._programs[name]), *(f"--{flag}={value}" for flag, value in flags.items()))
        return ProcessSpec(name, argv, files or {})


def kube_router(program: Path, kubeconfig: Path, node: str) -> tuple[str, ...]:
    """Return the command of kube-router with its controller of NetworkPolicies and nothing else."""
    flags = {
        "kubeconfig": kubeconfig,
        "hostname-override": node,
        "run-firewall": "true",
        "run-router": "false",
        "run-service-proxy": "false",
        "run-loadbalancer": "false",
        "metrics-port": "0",
        "iptables-sync-period": "1m0s",
    }
    return (str(program), *(f"--{flag}={value}" for flag, value in flags.items()))
