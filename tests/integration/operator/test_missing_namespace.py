"""The operator's own process, with the chart's rights, while a watched namespace comes and goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agenticrun_api.names import LABEL_RUN
from operator_process import OperatorProcess, Release
from runs import run_with
from testcluster import Cluster
from waiting import eventually

BLUE, GREEN = "agenticrun-test-blue", "agenticrun-test-green"


RELEASE = Release("agenticrun-missing", GREEN, (BLUE, GREEN))


@pytest.fixture
def green(place: Cluster) -> Iterator[Cluster]:
    with place.new_namespace(GREEN) as inside:
        RELEASE.grant(inside)
        yield inside
    place.kubectl("delete", "namespace", BLUE, "--ignore-not-found")


@pytest.fixture
def lease(green: Cluster) -> Iterator[dict[str, str]]:
    """Yield the Lease's settings, with the rights to it."""
    settings = RELEASE.lease(green)
    inside = green.in_namespace(settings["AGENTICRUN_LEASE_NAMESPACE"])
    RELEASE.grant(inside)
    yield settings
    name = settings["AGENTICRUN_LEASE_NAME"]
    inside.kubectl("delete", "lease", name, "--ignore-not-found")
    for item in RELEASE.rights(inside):
        inside.kubectl("delete", item["kind"], item["metadata"]["name"], "--ignore-not-found")


@pytest.fixture
def operator(green: Cluster, lease: dict[str, str], tmp_path: Path) -> Iterator[OperatorProcess]:
    process = OperatorProcess.start(
        tmp_path,
        RELEASE.kubeconfig(green),
        AGENTICRUN_NAMESPACES=f"{BLUE},{GREEN}",
        AGENTICRUN_HEAD_ACCESS="ApiserverProxy",
        **lease,
    )
    yield process
    process.stop()


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
            RELEASE.grant(blue)
            make_run(blue, name)
            wait_for_status(blue, name, operator)
        time.sleep(5)
        make_run(green, f"while-{name}-is-gone")
        wait_for_status(green, f"while-{name}-is-gone", operator)
