"""A node whose pods are network namespaces, on which kube-router enforces NetworkPolicies.

Each pod is a network namespace on one bridge, as a CNI plug-in makes it, and an object of a real
apiserver. kube-router's controller of policies runs in the network namespace of the node, so that
its rules go with it. Needs root on Linux.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from devcluster.binaries import KUBE_ROUTER, Binaries
from devcluster.components import kube_router
from devcluster.prerequisites import install_packages
from devcluster.settings import Settings
from testcluster import Cluster
from waiting import eventually

NODE = "arun-walls"
HOST_LINK = "arunwalls0"
HOST_IP, NODE_IP, LINK = "10.213.0.1", "10.213.0.2", 30
GATEWAY, PODS = "10.214.0.1", "10.214.0.0/24"
FIRST_POD = 10
CONNECT = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def connects(target):
    try:
        socket.create_connection(tuple(target), timeout=2.0).close()
    except OSError:
        return False
    return True
targets = json.loads(sys.argv[1])
with ThreadPoolExecutor(64) as pool:
    found = [target for target, ok in zip(targets, pool.map(connects, targets)) if ok]
print(json.dumps(found))
"""
"""A program: of the targets in its argument, it prints those that it connects to."""
_LISTEN = """
import socket, sys, time
servers = [socket.create_server((sys.argv[1], int(port)), backlog=512) for port in sys.argv[2:]]
print("ready", flush=True)
time.sleep(3600)
"""


def run(*words: str, stdin: str | None = None) -> str:
    """Run a program and return its output."""
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stderr}"
    return done.stdout


def _try(*words: str) -> None:
    """Run a program that may fail."""
    subprocess.run(words, capture_output=True, check=False)


@dataclass
class EnforcedNetwork:
    """The node, its pods and its agent."""

    cluster: Cluster
    folder: Path
    stack: ExitStack
    addresses: dict[str, str] = field(default_factory=dict)
    """Addresses of the pods, by namespace and name; `outside` is this machine."""

    def add_pod(
        self, namespace: str, name: str, labels: Mapping[str, str], ports: Iterable[int] = ()
    ) -> str:
        """Add a pod that listens at some ports, and return its address."""
        number = len(self.addresses)
        place, address = f"{NODE}-{number}", f"10.214.0.{FIRST_POD + number}"
        self._namespace(place)
        run("ip", "-n", NODE, "link", "add", f"pod{number}", "type", "veth", "peer", "name", "eth0",
            "netns", place)  # fmt: skip
        run("ip", "-n", NODE, "link", "set", f"pod{number}", "master", "cni0", "up")
        for words in (
            ("addr", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
            ("route", "add", "default", "via", GATEWAY),
        ):
            run("ip", "-n", place, *words)
        self.addresses[f"{namespace}/{name}"] = address
        self.listen(place, address, ports)
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": dict(labels)},
            "spec": {
                "nodeName": NODE,
                "automountServiceAccountToken": False,
                "containers": [{"name": "c", "image": "none"}],
            },
        }
        inside = self.cluster.in_namespace(namespace)
        inside.kubectl("create", "-f", "-", stdin=json.dumps(pod))
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        patch = json.dumps({"status": {**status, "hostIP": NODE_IP}})
        inside.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", patch)
        return address

    def listen(self, place: str | None, address: str, ports: Iterable[int]) -> None:
        """Listen at ports of an address, in a network namespace or on this machine."""
        wanted = [str(port) for port in ports]
        if not wanted:
            return
        inside = ["ip", "netns", "exec", place] if place else []
        words = [*inside, sys.executable, "-I", "-S", "-c", _LISTEN, address, *wanted]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.stack.callback(server.wait)
        self.stack.callback(server.kill)
        assert server.stdout is not None
        self.stack.enter_context(server.stdout)
        assert server.stdout.readline().strip() == "ready"

    def connects(self, source: str, targets: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
        """Return the addresses and ports that a pod, or `outside`, can connect to."""
        names = list(self.addresses)
        inside = (
            [] if source == "outside" else ["ip", "netns", "exec", f"{NODE}-{names.index(source)}"]
        )
        words = (*inside, sys.executable, "-I", "-S", "-c", CONNECT)
        found = json.loads(run(*words, json.dumps(sorted(targets))))
        return {(address, port) for address, port in found}

    def _namespace(self, name: str) -> None:
        _try("ip", "netns", "del", name)
        run("ip", "netns", "add", name)
        self.stack.callback(_try, "ip", "netns", "del", name)

    def make_node(self) -> None:
        """Make the network of the node, and its object."""
        _try("ip", "link", "del", HOST_LINK)
        self._namespace(NODE)
        run("ip", "link", "add", HOST_LINK, "type", "veth", "peer", "name", "eth0", "netns", NODE)
        self.stack.callback(_try, "ip", "link", "del", HOST_LINK)
        run("ip", "addr", "add", f"{HOST_IP}/{LINK}", "dev", HOST_LINK)
        run("ip", "link", "set", HOST_LINK, "up")
        run("ip", "route", "add", PODS, "via", NODE_IP, "dev", HOST_LINK)
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{NODE_IP}/{LINK}", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "add", "default", "via", HOST_IP),
            ("link", "add", "cni0", "type", "bridge"),
            ("addr", "add", f"{GATEWAY}/24", "dev", "cni0"),
            ("link", "set", "cni0", "up"),
        ):
            run("ip", "-n", NODE, *words)
        # Policies are rules of iptables, which see the packets of a bridge only with the second.
        for setting in ("net.ipv4.ip_forward=1", "net.bridge.bridge-nf-call-iptables=1"):
            run("nsenter", f"--net=/run/netns/{NODE}", "sysctl", "-qw", setting)
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        self.cluster.kubectl("create", "-f", "-", stdin=json.dumps(node))
        addresses = [{"type": "InternalIP", "address": NODE_IP}]
        patch = json.dumps({"status": {"addresses": addresses}})
        patched = ("node", NODE, "--subresource=status", "--type=merge", "-p", patch)
        self.cluster.kubectl("patch", *patched)
        self.addresses["outside"] = HOST_IP

    def start_agent(self) -> None:
        """Start kube-router's controller of NetworkPolicies."""
        settings, programs = Settings.from_environment(), (KUBE_ROUTER,)
        binaries = Binaries(settings)
        binaries.build(programs)
        install_packages(settings)
        words = kube_router(binaries.paths(programs)["kube-router"], self._kubeconfig(), NODE)
        log = self.stack.enter_context((self.folder / "kube-router.log").open("wb"))
        agent = subprocess.Popen(
            ["ip", "netns", "exec", NODE, *words], stdout=log, stderr=subprocess.STDOUT
        )
        self.stack.callback(agent.wait)
        self.stack.callback(agent.kill)

        def works() -> bool:
            assert agent.poll() is None, Path(log.name).read_text()[-2000:]
            rules = run("ip", "netns", "exec", NODE, "iptables-save", "-t", "filter")
            return "KUBE-ROUTER-FORWARD" in rules

        eventually(works, 60, "kube-router has made its first rules", interval=0.5)

    def _kubeconfig(self) -> Path:
        """Return the kubeconfig with the address at which the node sees this machine."""
        config: dict[str, Any] = yaml.safe_load(Path(self.cluster.env["KUBECONFIG"]).read_text())
        for item in config["clusters"]:
            port = item["cluster"]["server"].rpartition(":")[2]
            item["cluster"] = {
                "server": f"https://{HOST_IP}:{port}",
                "insecure-skip-tls-verify": True,
            }
        path = self.folder / "kubeconfig-of-the-node"
        path.write_text(yaml.safe_dump(config))
        return path


@contextmanager
def enforced_network(cluster: Cluster, folder: Path) -> Iterator[EnforcedNetwork]:
    """Yield a node with an agent, on a control plane of the test's own."""
    assert os.geteuid() == 0, "network namespaces need root"
    with ExitStack() as stack:
        network = EnforcedNetwork(cluster, folder, stack)
        network.make_node()
        network.start_agent()
        yield network
