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
from runs import run_with
from testcluster import ROOT, Cluster
from waiting import eventually

BLUE, GREEN, RELEASE = "agenticrun-test-blue", "agenticrun-test-green", "agenticrun-missing"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def grant(inside: Cluster) -> None:
    """Apply the chart's Role in this namespace, as `helm upgrade` would."""
    rendered = inside.command(
        *("helm", "template", RELEASE, str(ROOT / "charts/agenticrun"), "--namespace", GREEN),
        *("--set", f"watchNamespaces={{{BLUE},{GREEN}}}"),
    )
    kinds = ("ServiceAccount", "Role", "RoleBinding")
    wanted = [
        document
        for document in yaml.safe_load_all(rendered)
        if document
        and document["kind"] in kinds
        and document["metadata"]["namespace"] == inside.namespace
    ]
    assert wanted
    inside.apply(*wanted)


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
            assert json.load(answer)["workers"] == 4


@pytest.fixture
def green(place: Cluster) -> Iterator[Cluster]:
    with place.new_namespace(GREEN) as inside:
        grant(inside)
        yield inside
    place.kubectl("delete", "namespace", BLUE, "--ignore-not-found")


@pytest.fixture
def operator(green: Cluster, tmp_path: Path) -> Iterator[OperatorProcess]:
    config: dict[str, Any] = yaml.safe_load(Path(green.env["KUBECONFIG"]).read_text())
    token = green.kubectl("create", "token", RELEASE, "--duration=1h").strip()
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    probe_port, log = free_port(), tmp_path / "log"
    settings = {
        "KUBECONFIG": str(kubeconfig),
        "AGENTICRUN_NAMESPACES": f"{BLUE},{GREEN}",
        "AGENTICRUN_WORKER_IMAGE": "worker:1",
        "AGENTICRUN_HEAD_ACCESS": "ApiserverProxy",
        "AGENTICRUN_LEASE_NAMESPACE": GREEN,
        "AGENTICRUN_LEASE_NAME": RELEASE,
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
