"""A kube-apiserver with etcd of a test's own, on ports of its own: no node, no pod ever runs.

Of the controllers only the garbage collector, those of namespaces and of service accounts run.
Programs, certificates and flags are those of the development cluster (tools/devcluster).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from devcluster import pki
from devcluster.binaries import PROGRAMS, Binaries
from devcluster.components import Components
from devcluster.settings import Settings
from processes import free_port
from testcluster import ROOT, Cluster, CommandFailed
from waiting import eventually

CONTROLLERS = "garbage-collector-controller,namespace-controller,serviceaccount-controller"

NEEDED = ("kube-all", "kuberay-operator", "helm")
"""Programs that are built unless the development cluster has built them."""


@contextmanager
def control_plane(folder: Path) -> Iterator[Cluster]:
    """Yield a control plane with the CRDs of AgenticRun and KubeRay.

    Args:
        folder: for data, certificates, kubeconfig and logs.
    """
    settings = replace(
        Settings.from_environment(),
        state=folder,
        node_ip="127.0.0.1",
        apiserver_port=free_port(),
        etcd_port=free_port(),
    )
    binaries = Binaries(settings)
    binaries.build([program for program in PROGRAMS if program.name in NEEDED])
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
        start("kube-apiserver", *components.apiserver().argv)
        folders = (programs["kubectl"].parent, programs["helm"].parent, os.environ["PATH"])
        path = os.pathsep.join(map(str, folders))
        cluster = Cluster(os.environ | {"KUBECONFIG": str(settings.kubeconfig), "PATH": path})
        # Each look is a process: many would keep a slow machine from starting the apiserver.
        eventually(lambda: _is_ready(cluster), 300, "the apiserver is ready", interval=1.0)
        start("controllers", *components.controller_manager().argv, *controllers)
        kuberay = programs["kuberay-operator"].parent / "config/crd/bases"
        for file in (kuberay / "ray.io_rayclusters.yaml", ROOT / "crds/agenticruns.yaml"):
            cluster.kubectl("apply", "--server-side", "-f", str(file))
        for name in ("rayclusters.ray.io", "agenticruns.agenticrun.dev"):
            cluster.wait_for_crd(name)
        yield cluster


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
