"""The Workload of a run on a real apiserver with Kueue's CRD, with the rights of the chart."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agenticrun_api import parse_run
from agenticrun_operator.resources import Manifest, WorkerImages, workloads
from control_plane import control_plane
from devcluster.binaries import find_go
from devcluster.settings import KUEUE_VERSION, Settings
from operator_process import Release
from runs import run_with
from testcluster import Cluster, CommandFailed
from waiting import eventually

NAMESPACE, SYSTEM = "runs", "default"
RELEASE = Release("agenticrun", SYSTEM, (NAMESPACE,))
WORKLOADS = "workloads.kueue.x-k8s.io"
NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
REFUSED = "give quota back, but never reserve it"


def kueue_module() -> Path:
    """Return the folder of Kueue's module, which the Go module proxy has."""
    go = find_go(Settings.from_environment())
    command = (go, "mod", "download", "-json", f"sigs.k8s.io/kueue@{KUEUE_VERSION}")
    out = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/").stdout
    return Path(json.loads(out)["Dir"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with control_plane(tmp_path_factory.mktemp("plane")) as cluster:
        RELEASE.set_up(cluster)
        cluster.apply(*RELEASE.cluster_rights(cluster))
        bases = kueue_module() / "config/components/crd/bases"
        cluster.kubectl(
            "apply", "--server-side", "-f", str(bases / "kueue.x-k8s.io_workloads.yaml")
        )
        cluster.wait_for_crd(WORKLOADS)
        yield cluster.in_namespace(NAMESPACE)


def as_operator(runs: Cluster, verb: str, manifest: Manifest, *options: str) -> None:
    who = f"--as=system:serviceaccount:{SYSTEM}:{RELEASE.name}"
    runs.kubectl(verb, *options, "-f", "-", who, stdin=json.dumps(manifest))


def stored(runs: Cluster, name: str) -> Manifest:
    found = runs.get(WORKLOADS, name)
    assert found is not None
    return found


def true(kind: str) -> dict[str, Any]:
    return {
        "type": kind,
        "status": "True",
        "reason": "Because",
        "message": "words",
        "lastTransitionTime": NOW,
    }


def test_the_operator_makes_a_workload_and_gives_its_quota_back_but_never_takes_quota(
    runs: Cluster,
) -> None:
    runs.apply(
        run_with(
            ("spec.queue", {"name": "research", "priorityClass": "urgent"}),
            ("spec.roles.trainer", {"gpus": 1}),
            ("spec.checkpoint.uri", "s3://bucket/prefix"),
            name="lake",
        )
    )
    document = runs.get("agenticruns", "lake")
    assert document is not None
    workload = workloads.build(parse_run(document), WorkerImages("worker:1"), 1000)
    name, status = workload["metadata"]["name"], ("--subresource=status",)

    def refuses() -> bool:
        other = workload | {"metadata": workload["metadata"] | {"name": "another"}}
        try:
            as_operator(runs, "create", other, "--dry-run=server")
        except CommandFailed as error:
            return REFUSED in error.stderr
        return False

    eventually(refuses, 60, "the policy is in force", interval=0.5)
    as_operator(runs, "create", workload, "--validate=strict")
    reserved = stored(runs, name) | {"status": {"conditions": [true("QuotaReserved")]}}
    with pytest.raises(CommandFailed, match=REFUSED):
        as_operator(runs, "replace", reserved, *status)

    counts = [
        {"name": item["name"], "count": item["count"]} for item in workload["spec"]["podSets"]
    ]
    admission = {"clusterQueue": "gpus", "podSetAssignments": counts}
    conditions = [true(kind) for kind in ("QuotaReserved", "Admitted", "Evicted")]
    admitted = stored(runs, name) | {"status": {"conditions": conditions, "admission": admission}}
    runs.kubectl("replace", *status, "-f", "-", stdin=json.dumps(admitted))
    moved = copy.deepcopy(stored(runs, name))
    moved["status"]["admission"]["clusterQueue"] = "of-others"
    with pytest.raises(CommandFailed, match=REFUSED):
        as_operator(runs, "replace", moved, *status)

    ready = workloads.with_ready_pods(stored(runs, name), LATER)
    assert ready is not None
    as_operator(runs, "replace", ready, *status)
    as_operator(runs, "replace", workloads.with_fewer_pods(stored(runs, name), {"env": 0}), *status)
    assert stored(runs, name)["status"]["reclaimablePods"] == [{"name": "env", "count": 1}]
    as_operator(runs, "replace", workloads.released(stored(runs, name), LATER), *status)
    released = stored(runs, name)
    assert not workloads.holds_quota(released)
    assert "admission" not in released["status"]
    as_operator(
        runs,
        "replace",
        workloads.finished(released, LATER, succeeded=True, message="done"),
        *status,
    )
    assert workloads.is_finished(stored(runs, name))
    as_operator(runs, "delete", workload)
    assert runs.get(WORKLOADS, name) is None
