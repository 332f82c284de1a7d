"""The operator's own process, with the chart's rights, while a watched namespace comes and goes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from agenticrun_api.names import LABEL_RUN
from agenticrun_operator.reconcile_workers import WORKERS
from runs import run_with
from testcluster import ROOT, Cluster
from waiting import eventually

BLUE, GREEN, RELEASE = "agenticrun-test-blue", "agenticrun-test-green", "agenticrun-missing"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def chart(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the chart's objects for an operator of both namespaces."""
    rendered = cluster.command(
        *("helm", "template", RELEASE, str(ROOT / "charts/agenticrun"), "--namespace", GREEN),
        *("--set", f"watchNamespaces={{{BLUE},{GREEN}}}"),
    )
    return [document for document in yaml.safe_load_all(rendered) if document]


def rights(inside: Cluster) -> list[dict[str, Any]]:
    """Return the chart's rights in this namespace."""
    kinds = ("ServiceAccount", "Role", "RoleBinding")
    return [
        document
        for document in chart(inside)
        if document["kind"] in kinds and document["metadata"]["namespace"] == inside.namespace
    ]


def grant(inside: Cluster) -> None:
    """Give the operator its rights in this namespace, as `helm upgrade` would."""
    inside.apply(*rights(inside))


def lease_settings(cluster: Cluster) -> dict[str, str]:
    """Return the settings of the Lease that the chart gives the operator."""
    (deployment,) = [item for item in chart(cluster) if item["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    names = ("AGENTICRUN_LEASE_NAME", "AGENTICRUN_LEASE_NAMESPACE")
    return {item["name"]: item["value"] for item in container["env"] if item["name"] in names}


@dataclass
class OperatorProcess:
    """`python -m agenticrun_operator` with the rights of the chart."""

    process: subprocess.Popen[bytes]
    probe_port: int
    log: Path

    def check_alive(self) -> None:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        url = f"http://127.0.0.1:{self.probe_port}/healthz"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert json.load(answer)["workers"] == WORKERS


@pytest.fixture
def green(place: Cluster) -> Iterator[Cluster]:
    with place.new_namespace(GREEN) as inside:
        grant(inside)
        yield inside
    place.kubectl("delete", "namespace", BLUE, "--ignore-not-found")


@pytest.fixture
def lease(green: Cluster) -> Iterator[dict[str, str]]:
    """Yield the Lease's settings, with the rights to it."""
    settings = lease_settings(green)
    inside = green.in_namespace(settings["AGENTICRUN_LEASE_NAMESPACE"])
    grant(inside)
    yield settings
    name = settings["AGENTICRUN_LEASE_NAME"]
    inside.kubectl("delete", "lease", name, "--ignore-not-found")
    for item in rights(inside):
        inside.kubectl("delete", item["kind"], item["metadata"]["name"], "--ignore-not-found")


@pytest.fixture
def operator(green: Cluster, lease: dict[str, str], tmp_path: Path) -> Iterator[OperatorProcess]:
    config: dict[str, Any] = yaml.safe_load(Path(green.env["KUBECONFIG"]).read_text())
    token = green.kubectl("create", "token", RELEASE, "--duration=1h").strip()
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    probe_port, log = free_port(), tmp_path / "log"
    settings = {
        "KUBECONFIG": str(kubeconfig),
        "AGENTICRUN_NAMESPACES": f"{BLUE},{GREEN}",
        "AGENTICRUN_OPERATOR_KEY": "k" * 32,
        "AGENTICRUN_WORKER_IMAGE": "worker:1",
        "AGENTICRUN_HEAD_ACCESS": "ApiserverProxy",
        **lease,
        "AGENTICRUN_PROBE_PORT": str(probe_port),
        "AGENTICRUN_METRICS_PORT": str(free_port()),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "agenticrun_operator"],
            env=os.environ | settings,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield OperatorProcess(process, probe_port, log)
    finally:
        process.terminate()
        process.wait(60)


def make_run(inside: Cluster, name: str) -> None:
    """Create a run that waits for an object of another owner, so that it gets no pods."""
    metadata = {"name": f"{name}-run", "labels": {LABEL_RUN: "none"}}
    inside.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    inside.apply(run_with(name=name))


def wait_for_status(inside: Cluster, name: str, operator: OperatorProcess) -> None:
    def seen() -> bool:
        operator.check_alive()
        status = (inside.get("agenticruns", name) or {}).get("status", {})
        return status.get("phase") == "Pending" and "conditions" in status

    eventually(seen, 30, f"status of {inside.namespace}/{name}", interval=0.3)


def test_a_namespace_that_is_missing_or_deleted_stops_nothing_else_and_recovers(
    place: Cluster, green: Cluster, operator: OperatorProcess
) -> None:
    eventually(
        lambda: "create it and run helm upgrade" in operator.log.read_text(), 60, "the advice"
    )
    make_run(green, "while-blue-is-missing")
    wait_for_status(green, "while-blue-is-missing", operator)
    for name in ("first", "after-deletion"):
        with place.new_namespace(BLUE) as blue:
            grant(blue)
            make_run(blue, name)
            wait_for_status(blue, name, operator)
        time.sleep(5)
        make_run(green, f"while-{name}-is-gone")
        wait_for_status(green, f"while-{name}-is-gone", operator)
