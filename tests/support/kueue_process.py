"""Kueue itself, as a process beside a control plane of a test's own.

Its controllers and its scheduler work as in a pod. Its webhooks are not registered, because no
Service leads to a process; what they check of a Workload, the schema of its CRD checks in part.
"""

from __future__ import annotations

import base64
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from devcluster.binaries import KUEUE, Binaries
from devcluster.settings import Settings
from processes import free_port
from testcluster import Cluster
from waiting import eventually

SYSTEM = "kueue-system"
CERTIFICATES = "kueue-webhook-server-cert"
READY_SECONDS = 180


@contextmanager
def kueue(cluster: Cluster, folder: Path) -> Iterator[Path]:
    """Run Kueue until the end of the block.

    Args:
        cluster: the control plane.
        folder: for configuration, certificates and the log.

    Yields:
        The log.
    """
    binaries = Binaries(Settings.from_environment())
    binaries.build([KUEUE])
    program = binaries.paths([KUEUE])[KUEUE.name]
    crds = program.parent / "config/components/crd"
    cluster.kubectl("apply", "--server-side", "-k", str(crds))
    for kind in ("workloads", "localqueues", "clusterqueues", "resourceflavors"):
        cluster.wait_for_crd(f"{kind}.kueue.x-k8s.io")
    cluster.kubectl("create", "namespace", SYSTEM)
    inside = cluster.in_namespace(SYSTEM)
    inside.kubectl("create", "secret", "generic", CERTIFICATES)
    certificates, probe_port = folder / "certificates", free_port()
    certificates.mkdir()
    config = folder / "kueue.yaml"
    config.write_text(yaml.safe_dump(_configuration(certificates, probe_port)))
    log = folder / "kueue.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            # If this process is killed, so is the child.
            ["setpriv", "--pdeathsig", "KILL", "--", str(program), f"--config={config}"],
            env=os.environ | {"KUBECONFIG": cluster.env["KUBECONFIG"]},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        eventually(lambda: _mount(inside, certificates), READY_SECONDS, "Kueue's certificates")
        eventually(lambda: _is_ready(process, probe_port, log), READY_SECONDS, "Kueue is ready")
        yield log
    finally:
        process.kill()
        process.wait()


def _configuration(certificates: Path, probe_port: int) -> dict[str, object]:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": SYSTEM,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{probe_port}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": free_port(), "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {
            "enable": True,
            "webhookServiceName": "kueue-webhook-service",
            "webhookSecretName": CERTIFICATES,
        },
        "integrations": {
            "frameworks": ["ray.io/raycluster"],
            "externalFrameworks": ["AgenticRun.v1alpha1.agenticrun.dev"],
        },
        "featureGates": {"VisibilityOnDemand": False},
    }


def _mount(inside: Cluster, folder: Path) -> bool:
    """Do what the kubelet does with the Secret that Kueue writes its certificates to."""
    data = (inside.get("secret", CERTIFICATES) or {}).get("data") or {}
    for name, value in data.items():
        (folder / name).write_bytes(base64.b64decode(value))
    return "tls.crt" in data


def _is_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-3000:]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
