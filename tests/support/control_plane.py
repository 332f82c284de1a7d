"""A kube-apiserver with etcd of a test's own, on ports of its own: no container ever runs.

Of the controllers only the garbage collector, those of namespaces and of service accounts run; and
if pods are asked for, KubeRay's, the scheduler, and KWOK, which simulates a kubelet. Programs,
certificates and flags are those of the development cluster (tools/devcluster).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import yaml

from agenticrun_api.placement import ARCHITECTURE, HOSTNAME
from agenticrun_operator.resources import Manifest
from devcluster import pki
from devcluster.binaries import KWOK, PROGRAMS, Binaries
from devcluster.components import Components
from devcluster.settings import Settings
from processes import free_port
from testcluster import ROOT, Cluster, CommandFailed
from waiting import eventually

CONTROLLERS = "garbage-collector-controller,namespace-controller,serviceaccount-controller"

NEEDED = ("kube-all", "kuberay-operator", "helm")
"""Programs that are built unless the development cluster has built them."""
BUSY = ("--kube-api-qps=1000", "--kube-api-burst=2000")
"""Thousands of objects come and go at once; the default is 20 requests per second."""
POD_READY = """
{{ $now := Now }}
phase: Running
startTime: {{ $now | Quote }}
{{ with PodIPsWith .spec.nodeName false .metadata.uid .metadata.name .metadata.namespace }}
podIP: {{ index . 0 | Quote }}
podIPs: [{ip: {{ index . 0 | Quote }}}]
{{ end }}
conditions:
{{ range $kind := list "Initialized" "ContainersReady" "Ready" }}
- {type: {{ $kind }}, status: "True", lastTransitionTime: {{ $now | Quote }}}
{{ end }}
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  imageID: {{ .image | Quote }}
  containerID: kwok://{{ $.metadata.uid }}
  ready: true
  restartCount: 0
  state: {running: {startedAt: {{ $now | Quote }}}}
{{ end }}
"""
"""The status of a pod that a kubelet has started, as a template of KWOK. The operator needs the ids
of containers, which KWOK's own template lacks."""


@contextmanager
def control_plane(folder: Path, pods_at: str = "") -> Iterator[Cluster]:
    """Yield a control plane with the CRDs of AgenticRun and KubeRay.

    Args:
        folder: for data, certificates, kubeconfig and logs.
        pods_at: the addresses that pods get, such as 127.2.0.0/16. Pods become ready on a node that
            has room for all. KWOK is built the first time. Empty: there is no node.
    """
    settings = replace(
        Settings.from_environment(),
        state=folder,
        node_ip="127.0.0.1",
        apiserver_port=free_port(),
        etcd_port=free_port(),
    )
    binaries = Binaries(settings)
    needed = [program for program in PROGRAMS if program.name in NEEDED]
    binaries.build([*needed, KWOK] if pods_at else needed)
    assert shutil.which("etcd"), "there is no etcd: apt-get install etcd-server"
    programs = binaries.paths()
    pki.create(settings)
    components = Components(settings, programs)
    peers = f"--listen-peer-urls=http://127.0.0.1:{free_port()}"
    controllers = (f"--controllers={CONTROLLERS}", "--secure-port=0")
    with ExitStack() as stack:

        def start(name: str, *argv: str) -> None:
            stack.enter_context(_running(argv, folder / f"{name}.log"))

        start("etcd", *components.etcd().argv, peers)
        # Debian's etcd cannot stream lists, and KWOK does not list without if it seems possible.
        start("kube-apiserver", *components.apiserver().argv, "--feature-gates=WatchList=false")
        folders = (programs["kubectl"].parent, programs["helm"].parent, os.environ["PATH"])
        path = os.pathsep.join(map(str, folders))
        cluster = Cluster(os.environ | {"KUBECONFIG": str(settings.kubeconfig), "PATH": path})
        # Each look is a process: many would keep a slow machine from starting the apiserver.
        eventually(lambda: _is_ready(cluster), 300, "the apiserver is ready", interval=1.0)
        busy = BUSY if pods_at else ()
        start("controllers", *components.controller_manager().argv, *controllers, *busy)
        kuberay = programs["kuberay-operator"].parent / "config/crd/bases"
        # Its operator needs the CRDs of jobs and services, too.
        kuberay = kuberay if pods_at else kuberay / "ray.io_rayclusters.yaml"
        for file in (kuberay, ROOT / "crds/agenticruns.yaml"):
            cluster.kubectl("apply", "--server-side", "-f", str(file))
        for name in ("rayclusters.ray.io", "agenticruns.agenticrun.dev"):
            cluster.wait_for_crd(name)
        if pods_at:
            kubeconfig = f"--kubeconfig={settings.kubeconfig}"
            start("scheduler", *components.scheduler().argv, "--secure-port=0", *busy)
            ports = ("--metrics-addr=0", "--health-probe-bind-address=0")
            flags = (kubeconfig, "--enable-leader-election=false", *ports)
            start("kuberay", str(programs["kuberay-operator"]), *flags)
            stages = folder / "kwok.yaml"
            stages.write_text(yaml.safe_dump_all(_stages()))
            kwok = (str(binaries.paths([KWOK])[KWOK.name]), kubeconfig, f"--config={stages}")
            start("kwok", *kwok, "--manage-all-nodes", "--node-port=0")
            amounts = dict.fromkeys(("cpu", "pods", "nvidia.com/gpu"), "1M")
            amounts |= dict.fromkeys(("memory", "ephemeral-storage"), "1E")
            add_node(cluster, "simulated", {}, amounts, pods_at)
        yield cluster


def _stages() -> list[Manifest]:
    """Return what KWOK does: it starts pods, and ends pods and nodes that are deleted."""
    deleted = {"key": ".metadata.deletionTimestamp"}
    gone: list[Manifest] = [deleted | {"operator": "Exists"}]
    pending = {"key": ".status.phase", "operator": "In", "values": ["Pending"]}
    new: list[Manifest] = [deleted | {"operator": "DoesNotExist"}, pending]
    stages: list[tuple[str, str, list[Manifest], Manifest]] = [
        ("ready", "Pod", new, {"statusTemplate": POD_READY}),
        ("deleted", "Pod", gone, {"delete": True}),
        # Without a stage of nodes it takes no node over.
        ("node-deleted", "Node", gone, {"delete": True}),
    ]
    return [
        {
            "apiVersion": "kwok.x-k8s.io/v1alpha1",
            "kind": "Stage",
            "metadata": {"name": name},
            "spec": {
                "resourceRef": {"apiGroup": "v1", "kind": kind},
                "selector": {"matchExpressions": when},
                "next": then,
            },
        }
        for name, kind, when, then in stages
    ]


def add_node(
    cluster: Cluster, name: str, labels: dict[str, str], amounts: dict[str, str], pods_at: str = ""
) -> None:
    """Create a node, as a kubelet does that is ready.

    Args:
        cluster: the control plane.
        name: of the node.
        labels: its labels, in addition to its name and architecture.
        amounts: what it has room for, by resource.
        pods_at: the addresses of its pods.
    """
    labels = labels | {HOSTNAME: name, ARCHITECTURE: "amd64"}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
    cluster.apply(node | ({"spec": {"podCIDR": pods_at}} if pods_at else {}))
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    status = {"allocatable": amounts, "capacity": amounts, "conditions": [ready]}
    patch = ("patch", "node", name, "--type=merge", "-p")
    cluster.kubectl(*patch, json.dumps({"status": status}), "--subresource=status")
    cluster.kubectl(*patch, '{"spec": {"taints": null}}')  # a new node is not ready


@contextmanager
def _running(argv: tuple[str, ...], log: Path) -> Iterator[None]:
    # If this process is killed, so is the child.
    argv = ("setpriv", "--pdeathsig", "KILL", "--", *argv)
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _is_ready(cluster: Cluster) -> bool:
    try:
        return cluster.kubectl("get", "--raw", "/readyz") == "ok"
    except CommandFailed:
        return False
