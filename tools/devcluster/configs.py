"""Configuration files of the components, as text. Pure: settings in, text out.

Where a value is unusual, the comment beside it says what broke without it.
"""

import json
from pathlib import Path

from devcluster.settings import Settings

PAUSE_IMAGE = "localhost/agenticrun/pause:1"


CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
"""Folders of the CNI plugins: Debian's package, then upstream."""


def cni_plugin_folder() -> Path | None:
    """Return the folder with the CNI plugins, or None before they are installed."""
    return next((folder for folder in CNI_FOLDERS if (folder / "bridge").exists()), None)


def containerd(settings: Settings, cni_plugins: Path) -> str:
    """Return the configuration of containerd, in version 2 that 1.6, 1.7 and 2.x read."""
    return f"""\
version = 2
root = "{settings.containerd_root}"
state = "{settings.run_dir}/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", \
"io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", \
"io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing"]
[grpc]
  address = "{settings.containerd_socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{settings.containerd_root}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  disable_apparmor = true
  restrict_oom_score_adj = true  # without CAP_SYS_RESOURCE runc can't lower the score \
and no sandbox starts
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    discard_unpacked_layers = true  # the local registry has the blobs already: \
a second copy of the worker image is 5 GB
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni_plugins}"
    conf_dir = "{settings.etc}/cni"
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{settings.etc}/registries"
"""


def registry_hosts(settings: Settings) -> str:
    """Return the entry that tells containerd that our registry speaks plain HTTP."""
    return f"""\
server = "http://{settings.registry}"
[host."http://{settings.registry}"]
  capabilities = ["pull", "resolve"]
"""


def registry(settings: Settings) -> str:
    """Return the image registry: a folder in the cache, served on the host end of the veth pair."""
    return f"""\
version: 0.1
log: {{level: warn, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: "{settings.cache}/registry"}}
  delete: {{enabled: true}}
http:
  addr: {settings.registry}
"""


def cni(settings: Settings) -> str:
    """Return the pod network: a hairpin bridge, addresses from the pod CIDR, host ports."""
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(settings.run_dir / "cni-ipam"),
            "ranges": [[{"subnet": settings.pod_cidr}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return (
        json.dumps(
            {"cniVersion": "0.4.0", "name": settings.name, "plugins": [bridge, ports]}, indent=2
        )
        + "\n"
    )


def kubelet(settings: Settings) -> str:
    """Return the configuration of the kubelet: for cgroup v1 and v2, all paths below our state."""
    return f"""\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: {settings.node_ip}
authentication: {{anonymous: {{enabled: false}}, webhook: {{enabled: true}}, \
x509: {{clientCAFile: "{settings.pki}/ca.crt"}}}}
authorization: {{mode: Webhook}}
tlsCertFile: {settings.pki}/kubelet.crt
tlsPrivateKeyFile: {settings.pki}/kubelet.key
containerRuntimeEndpoint: unix://{settings.containerd_socket}
cgroupDriver: cgroupfs
cgroupRoot: /{settings.name}
failCgroupV1: false
failSwapOn: false
clusterDomain: cluster.local
clusterDNS: [{settings.dns_ip}]
resolvConf: {settings.etc}/resolv.conf
podLogsDir: {settings.state}/pod-logs
volumePluginDir: {settings.state}/kubelet/volume-plugins
imageGCHighThresholdPercent: 100
evictionHard: {{memory.available: 100Mi}}
nodeStatusUpdateFrequency: 5s
maxPods: 250
serializeImagePulls: false
"""


def kube_proxy(settings: Settings) -> str:
    """Return kube-proxy with iptables, without conntrack sysctls.

    A network namespace may not write those.
    """
    return f"""\
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
clusterCIDR: {settings.pod_cidr}
clientConnection: {{kubeconfig: "{settings.pki}/kube-proxy.kubeconfig"}}
hostnameOverride: {settings.node_name}
metricsBindAddress: 127.0.0.1:10249
healthzBindAddress: 127.0.0.1:10256
conntrack: {{maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}}
iptables: {{minSyncPeriod: 200ms}}
"""


def coredns(settings: Settings) -> str:
    """Return the DNS server: cluster names, and NXDOMAIN for all others.

    These have a block of their own, because `template` would answer first in the same block.
    """
    return f"""\
cluster.local:53 in-addr.arpa:53 {{
  bind {settings.dns_ip}
  errors
  health 127.0.0.1:8053
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {settings.pki}/coredns.kubeconfig
    pods insecure
    ttl 5
  }}
  cache 5
}}
.:53 {{
  bind {settings.dns_ip}
  template ANY ANY {{
    rcode NXDOMAIN
  }}
}}
"""
