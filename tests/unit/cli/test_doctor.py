"""`agenticrun doctor`: what it finds, from the objects of a cluster."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from typing_extensions import override

from agenticrun_api.crd import custom_resource_definition
from agenticrun_workers.cli import app
from agenticrun_workers.cli.doctor.cluster import (
    GPU,
    cluster_findings,
    crd_matches,
    default_class,
    deployments_run,
    gpus_left,
    kubernetes,
    numbers,
    quotas_left,
)
from agenticrun_workers.cli.doctor.machine import space
from agenticrun_workers.cli.doctor.placement import usable_nodes
from agenticrun_workers.cli.kubectl import Kubectl, SourceError
from agenticrun_workers.findings import Verdict


def crd() -> dict[str, Any]:
    return copy.deepcopy(custom_resource_definition())


def spec_of(definition: dict[str, Any]) -> dict[str, Any]:
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    fields: dict[str, Any] = schema["properties"]["spec"]["properties"]
    return fields


def test_the_crd_of_this_version_is_fine() -> None:
    assert crd_matches(crd()).verdict is Verdict.OK


def test_an_older_crd_is_named_with_what_it_lacks() -> None:
    older = crd()
    del spec_of(older)["suspend"]
    finding = crd_matches(older)
    assert finding.verdict is Verdict.FAILED
    assert "it lacks 1 fields" in finding.found
    assert "spec.suspend" in finding.found
    assert "kubectl apply --server-side" in finding.advice


def test_a_field_inside_a_list_counts_too() -> None:
    older = crd()
    envs = spec_of(older)["pipeline"]["properties"]["envs"]
    del envs["items"]["properties"]["tag"]
    assert "spec.pipeline.envs[].tag" in crd_matches(older).found


def test_a_newer_crd_is_a_warning() -> None:
    newer = crd()
    spec_of(newer)["future"] = {"type": "string"}
    finding = crd_matches(newer)
    assert (finding.verdict, "spec.future" in finding.found) == (Verdict.WARNING, True)


def test_a_crd_without_our_version_is_refused() -> None:
    other = crd()
    other["spec"]["versions"][0]["name"] = "v2"
    assert crd_matches(other).verdict is Verdict.FAILED


def node(
    name: str, gpus: int = 0, *, ready: str = "True", cordoned: bool = False
) -> dict[str, Any]:
    allocatable = {"cpu": "8", **({GPU: str(gpus)} if gpus else {})}
    conditions = [{"type": "Ready", "status": ready}]
    return {
        "metadata": {"name": name},
        "spec": {"unschedulable": True} if cordoned else {},
        "status": {"allocatable": allocatable, "conditions": conditions},
    }


def pod(node_name: str, gpus: int) -> dict[str, Any]:
    box = {"resources": {"requests": {GPU: str(gpus)}}}
    return {"spec": {"nodeName": node_name, "containers": [box, {}]}}


@pytest.mark.parametrize(
    ("nodes", "pods", "verdict", "found"),
    [
        ([], [], Verdict.FAILED, "no node is ready and takes pods"),
        ([node("a", 8, ready="False")], [], Verdict.FAILED, "no node is ready and takes pods"),
        ([node("a")], [], Verdict.WARNING, f"1 nodes are ready, none with {GPU}"),
        (
            [node("a", 8), node("b", 8), node("c", 8, cordoned=True)],
            [pod("a", 3), pod("c", 8), pod("gone", 1)],
            Verdict.OK,
            "13 of 16 free on 2 nodes; at most 8 on one node",
        ),
    ],
)
def test_free_gpus_are_counted_on_nodes_that_take_pods(
    nodes: list[dict[str, Any]], pods: list[dict[str, Any]], verdict: Verdict, found: str
) -> None:
    finding = gpus_left(usable_nodes(nodes, pods))
    assert (finding.verdict, finding.found) == (verdict, found)


def test_a_quota_that_is_used_up_is_named() -> None:
    quota = {
        "metadata": {"name": "team"},
        "status": {
            "hard": {f"requests.{GPU}": "8", "requests.memory": "64Gi"},
            "used": {f"requests.{GPU}": "8", "requests.memory": "1024Mi"},
        },
    }
    finding = quotas_left([quota])
    assert finding.verdict is Verdict.WARNING
    assert f"team: requests.{GPU} 8 of 8" in finding.found
    assert "memory" not in finding.found
    assert quotas_left([]).verdict is Verdict.OK


def test_a_quota_on_what_pods_do_not_use_stops_no_run() -> None:
    hard = {"services.loadbalancers": "0", "count/secrets": "3", "pods": "9"}
    used = {"services.loadbalancers": "0", "count/secrets": "3", "pods": "4"}
    finding = quotas_left([{"metadata": {"name": "team"}, "status": {"hard": hard, "used": used}}])
    assert (finding.verdict, finding.found) == (Verdict.OK, "pods 4 of 9")


@pytest.mark.parametrize(
    "name",
    ["pods", "count/pods", "cpu", "limits.memory", "persistentvolumeclaims", "requests.storage"],
)
def test_a_quota_on_what_pods_use_counts(name: str) -> None:
    status = {"hard": {name: "2"}, "used": {name: "2"}}
    assert (
        f"team: {name} 2 of 2"
        in quotas_left([{"metadata": {"name": "team"}, "status": status}]).found
    )


def storage_class(name: str, default: str | None = None) -> dict[str, Any]:
    key = "storageclass.kubernetes.io/is-default-class"
    return {"metadata": {"name": name, "annotations": {key: default} if default else None}}


@pytest.mark.parametrize(
    ("classes", "verdict"),
    [
        ([], Verdict.WARNING),
        ([storage_class("slow"), storage_class("fast", "false")], Verdict.WARNING),
        ([storage_class("slow"), storage_class("fast", "true")], Verdict.OK),
    ],
)
def test_without_a_default_storage_class_there_is_a_warning(
    classes: list[dict[str, Any]], verdict: Verdict
) -> None:
    assert default_class(classes).verdict is verdict


def deployment(image: str, available: int, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "system", "name": "operator", "labels": labels},
        "spec": {"template": {"spec": {"containers": [{"image": image}]}}},
        "status": {"availableReplicas": available} if available else {},
    }


def test_a_deployment_that_somebody_stopped_is_told_from_one_that_does_not_start() -> None:
    down = deployment("quay.io/kuberay/operator:v1.6.1", 0)
    stopped = {**down, "spec": {**down["spec"], "replicas": 0}}
    said = [deployments_run([item], lambda version: True, "1.6").advice for item in (down, stopped)]
    assert "kubectl describe deployment -n system operator" in said[0]
    assert "was stopped: kubectl scale deployment -n system operator --replicas=1" in said[1]


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (deployment("quay.io/kuberay/operator:v1.6.1", 1), Verdict.OK),
        (deployment("quay.io/kuberay/operator:v1.5.0", 1), Verdict.FAILED),
        (deployment("quay.io/kuberay/operator:v1.6.1", 0), Verdict.FAILED),
        (deployment("registry/operator:nightly", 1), Verdict.OK),
        (deployment("x:1.0", 1, **{"app.kubernetes.io/version": "1.6.0"}), Verdict.OK),
    ],
)
def test_an_operator_needs_a_pod_and_a_version(found: dict[str, Any], verdict: Verdict) -> None:
    assert deployments_run([found], lambda v: numbers(v) >= (1, 6), "1.6").verdict is verdict


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("v1.30.0", Verdict.OK), ("v1.34.4+k3s1", Verdict.OK), ("v1.29.9", Verdict.FAILED)],
)
def test_kubernetes_has_a_lowest_version(version: str, verdict: Verdict) -> None:
    assert kubernetes({"gitVersion": version}).verdict is verdict


def test_a_folder_has_space_or_not(tmp_path: Path) -> None:
    assert space(tmp_path, 0.0, "tests", "").verdict is Verdict.OK
    assert space(tmp_path, 1e9, "tests", "buy a disk").verdict is Verdict.FAILED
    assert space(tmp_path / "nowhere", 0.0, "tests", "mount it").found.endswith("does not exist")


def test_without_a_cluster_only_the_machine_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no kubectl
    result = CliRunner().invoke(app, ["doctor"])
    assert "kubectl is not installed" in result.output
    assert "PyTorch" in result.output
    assert result.exit_code == 0, result.output


def test_a_kubectl_without_a_cluster_is_told_from_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\necho connection to localhost:8080 was refused >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    finding = cluster_findings(Kubectl())["apiserver"]
    assert (finding.verdict, "set KUBECONFIG" in finding.found) == (Verdict.NOT_CHECKED, True)


class Account(Kubectl):
    """A kubectl of somebody who may do everything but one thing, and reads no objects."""

    def __init__(self, denied: str) -> None:
        super().__init__()
        self._denied = denied

    @override
    def run(self, *words: str, timeout: float = 60.0) -> bytes:
        if words[0] == "version":
            return b'{"serverVersion": {"gitVersion": "v1.34.0"}}'
        if words[:2] == ("auth", "can-i"):
            return b"no" if " ".join(words[2:]) == self._denied else b"yes"
        raise SourceError("not now")


@pytest.mark.parametrize(
    ("denied", "lost"),
    [
        ("create pods/exec", "trace, checkpoint and logs"),
        ("delete pods", "the pod that has read such a run (it stays for 20 minutes)"),
        ("get pods/log", "logs --role reporter"),
    ],
)
def test_a_missing_right_is_named_with_what_needs_it(denied: str, lost: str) -> None:
    finding = cluster_findings(Account(denied))["rights"]
    assert finding.verdict is Verdict.WARNING
    assert finding.found == f"you may not {denied}"
    assert f"{lost}. Ask" in finding.advice
