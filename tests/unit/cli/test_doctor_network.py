"""`agenticrun doctor --network`: two pods, a NetworkPolicy, and what their try means."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from agenticrun_workers.cli.doctor import network
from agenticrun_workers.cli.doctor.network import (
    CLIENT,
    CLOSED,
    LABEL_CHECK,
    OPEN,
    SERVER,
    client_pod,
    judge,
    network_finding,
    policy,
    server_pod,
)
from agenticrun_workers.cli.kubectl import Kubectl, SourceError
from agenticrun_workers.findings import Verdict
from network_rules import Endpoint, can_connect
from processes import free_port

IMAGE = "registry.example.org/worker:1"


class TwoPods(Kubectl):
    """A cluster in which the client pod reports something.

    Attributes:
        report: the last words of the client pod.
        refusals: what the apiserver says to the creation of a kind.
    """

    def __init__(self, report: str = "", **refusals: str) -> None:
        super().__init__("team")
        self.report = report
        self.refusals = refusals
        self.created: list[dict[str, Any]] = []
        self.deleted: list[tuple[str, ...]] = []

    @override
    def create(self, manifest: dict[str, Any]) -> None:
        if words := self.refusals.get(manifest["kind"]):
            raise SourceError(words)
        self.created.append(manifest)

    @override
    def json(self, *words: str) -> dict[str, Any]:
        if words[1].endswith("-server"):
            return {"status": {"podIP": "10.0.0.7"}}
        ended = {"terminated": {"exitCode": 0, "message": self.report}}
        return {"status": {"containerStatuses": [{"state": ended}]}}

    @override
    def run(self, *words: str, timeout: float = 60.0) -> bytes:
        self.deleted.append(words)
        return b""


def said(**found: bool) -> str:
    return json.dumps(found)


@pytest.mark.parametrize(
    ("report", "verdict", "words"),
    [
        (said(open=True, closed=True), Verdict.OK, "enforced"),
        (said(open=True, closed=False), Verdict.FAILED, "not enforced"),
        (said(open=False, closed=True), Verdict.NOT_CHECKED, "cannot connect even at a port"),
        ("Error", Verdict.NOT_CHECKED, "'Error'"),
        ("[]", Verdict.NOT_CHECKED, "'[]'"),
    ],
)
def test_the_report_of_the_client_decides(report: str, verdict: Verdict, words: str) -> None:
    finding = judge(report)
    assert finding.verdict is verdict
    assert finding.found.startswith(words) or words in finding.found
    assert bool(finding.advice) is (verdict is Verdict.FAILED)


def test_the_policy_is_there_before_the_pods_and_everything_is_deleted() -> None:
    cluster = TwoPods(said(open=True, closed=True))
    assert network_finding(cluster, IMAGE, ["amd64"]).verdict is Verdict.OK
    assert [item["kind"] for item in cluster.created] == ["NetworkPolicy", "Pod", "Pod"]
    (name,) = {item["metadata"]["labels"][LABEL_CHECK] for item in cluster.created}
    (deleted,) = cluster.deleted
    assert deleted[:2] == ("delete", "pod,networkpolicy")
    assert f"{LABEL_CHECK}={name}" in deleted
    assert "10.0.0.7" in cluster.created[-1]["spec"]["containers"][0]["command"]


@pytest.mark.parametrize("kind", ["NetworkPolicy", "Pod"])
def test_what_the_user_may_not_create_is_said_and_the_rest_deleted(kind: str) -> None:
    cluster = TwoPods(**{kind: f"{kind} is forbidden"})
    finding = network_finding(cluster, IMAGE, [])
    assert finding.verdict is Verdict.NOT_CHECKED
    assert f"{kind} is forbidden" in finding.found
    assert len(cluster.deleted) == 1


def test_without_an_installation_there_is_no_image_for_the_pods() -> None:
    cluster = TwoPods()
    assert network_finding(cluster, None, []).verdict is Verdict.NOT_CHECKED
    assert cluster.created == []


def test_a_pod_that_does_not_start_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "START_SECONDS", 0.0)
    monkeypatch.setattr(network, "POLL_SECONDS", 0.0)
    cluster = TwoPods()
    monkeypatch.setattr(cluster, "json", lambda *words: {"status": {}})
    finding = network_finding(cluster, IMAGE, [])
    assert "has not started for 0 s" in finding.found
    assert len(cluster.deleted) == 1


def test_the_policy_opens_one_of_the_two_ports_to_the_client() -> None:
    pods = (server_pod("a", IMAGE, []), client_pod("a", IMAGE, [], "10.0.0.1"))
    server, client = (
        Endpoint(f"10.0.0.{number}", "team", pod["metadata"]["labels"])
        for number, pod in enumerate(pods, 1)
    )
    made = policy("a")
    made["metadata"]["namespace"] = "team"
    assert can_connect([made], client, server, OPEN)
    assert not can_connect([made], client, server, CLOSED)


def test_the_pods_meet_the_restricted_standard_and_go_to_nodes_of_the_image() -> None:
    spec = server_pod("a", IMAGE, ["arm64"])["spec"]
    assert spec["nodeSelector"] == {"kubernetes.io/arch": "arm64"}
    assert "nodeSelector" not in server_pod("a", IMAGE, ["amd64", "arm64"])["spec"]
    (container,) = spec["containers"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False


@contextmanager
def listening(*ports: int) -> Iterator[None]:
    server = subprocess.Popen([sys.executable, "-c", SERVER, *map(str, ports)])
    try:
        yield
    finally:
        server.kill()
        server.wait()


def tried(report: Path, opened: int, closed: int, patience: float) -> str:
    words = ["127.0.0.1", str(opened), str(closed), str(patience), str(report)]
    subprocess.run([sys.executable, "-c", CLIENT, *words], check=True, timeout=60)
    return report.read_text()


@pytest.mark.parametrize(
    ("listens", "verdict"),
    [
        ((True, True), Verdict.FAILED),
        ((True, False), Verdict.OK),
        ((False, False), Verdict.NOT_CHECKED),
    ],
)
def test_the_programs_of_the_pods_find_which_ports_are_open(
    tmp_path: Path, listens: tuple[bool, bool], verdict: Verdict
) -> None:
    opened, closed = free_port(), free_port()
    ports = [port for port, is_open in zip((opened, closed), listens, strict=True) if is_open]
    with listening(*ports):
        patience = {Verdict.OK: 20.0, Verdict.FAILED: 6.0}.get(verdict, 2.0)
        assert judge(tried(tmp_path / "report", opened, closed, patience)).verdict is verdict
