"""Commands on a run of a cluster: a real apiserver and kubectl, and pods that never run.

No kubelet starts pods or answers `kubectl exec`, so a stand-in for kubectl on the PATH says of pods
that are created that they run, and runs such commands here. It passes everything else on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agenticrun_api.names import ExitCode
from agenticrun_api.version import __version__
from control_plane import control_plane
from run_folders import SECRET, make_run_folder
from runs import run_with
from testcluster import ROOT, Cluster
from waiting import eventually

NAMESPACE = "agenticrun-test-cli"
NOW = "2026-11-23T10:00:00Z"
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]

STAND_IN = """#!{python}
import json, os, subprocess, sys
words = sys.argv[1:]
if words[-3:] == ["create", "-f", "-"]:
    given = sys.stdin.buffer.read()
    subprocess.run([{kubectl!r}, *words], input=given, check=True)
    name = json.loads(given)["metadata"]["name"]
    status = {{"name": "reader", "ready": True, "restartCount": 0, "image": "i", "imageID": "i"}}
    status["state"] = {{"running": {{}}}}
    patch = json.dumps({{"status": {{"phase": "Running", "containerStatuses": [status]}}}})
    words = [*words[:-3], "patch", "pod", name, "--subresource=status"]
    words += ["--type=merge", "-p", patch]
if "exec" in words:
    command = words[words.index("--") + 1:]
    command = [word.replace("/tmp/ray/session_latest/logs", {logs!r}) for word in command]
    os.execvp(command[0], command)
os.execv({kubectl!r}, [{kubectl!r}, *words])
"""


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with control_plane(tmp_path_factory.mktemp("plane")) as cluster:
        cluster.kubectl("create", "namespace", NAMESPACE)
        place = cluster.in_namespace(NAMESPACE)
        eventually(lambda: place.get("serviceaccount", "default"), 60, "a service account")
        yield place


class Commands:
    """`agenticrun` with the kubeconfig of the control plane."""

    def __init__(self, plane: Cluster, folder: Path) -> None:
        self.logs = folder / "ray-logs"
        self.logs.mkdir()
        kubectl = plane.command("sh", "-c", "command -v kubectl").strip()
        stand_in = folder / "bin" / "kubectl"
        stand_in.parent.mkdir()
        stand_in.write_text(
            STAND_IN.format(python=sys.executable, logs=str(self.logs), kubectl=kubectl)
        )
        stand_in.chmod(0o755)
        self._env = {**plane.env, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        self._with_pods = {"PATH": f"{stand_in.parent}{os.pathsep}{plane.env['PATH']}"}

    def __call__(
        self, *words: str, pods: bool = True, kubeconfig: Path | None = None
    ) -> tuple[int, str]:
        """Run a command.

        Args:
            pods: False uses kubectl itself, which reaches no pod.
            kubeconfig: of somebody who has fewer rights.
        """
        other = {"KUBECONFIG": str(kubeconfig)} if kubeconfig else {}
        done = subprocess.run(
            [sys.executable, "-m", "agenticrun_workers.cli", *words],
            env={**self._env, **(self._with_pods if pods else {}), **other},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    def plugin(self, *words: str) -> str:
        """Run `kubectl agenticrun`."""
        module, _, function = SCRIPTS["kubectl-agenticrun"].partition(":")
        file = Path(self._with_pods["PATH"].split(os.pathsep)[0]) / "kubectl-agenticrun"
        file.write_text(f"#!{sys.executable}\nfrom {module} import {function}\n{function}()\n")
        file.chmod(0o755)
        return subprocess.run(
            ["kubectl", "agenticrun", *words],
            env={**self._env, **self._with_pods},
            check=True,
            capture_output=True,
            text=True,
        ).stdout


@pytest.fixture
def cli(plane: Cluster, tmp_path: Path) -> Commands:
    return Commands(plane, tmp_path)


@pytest.fixture
def run(plane: Cluster, tmp_path: Path) -> Iterator[str]:
    """A run in its fourth step, whose head pod has the output folder."""
    plane.apply(
        run_with(
            ("spec.checkpoint", {"uri": str(tmp_path / "storage")}),
            ("spec.tracking", {"renderDir": "films"}),
            ("spec.roles.driver.env", [{"name": "WANDB_API_KEY", "value": SECRET}]),
            name="lake",
        )
    )
    found = plane.get("agenticruns", "lake")
    assert found is not None
    make_run_folder(tmp_path / "storage" / f"lake-{found['metadata']['uid'][:8]}", finished=False)
    set_status(
        plane,
        phase="Running",
        activity="rollout",
        step=4,
        maxSteps=10,
        startTime=NOW,
        metrics=[{"name": "actor/entropy", "value": "0.5"}],
        roles=[{"name": "driver", "desired": 1, "ready": 1, "gpus": 0}],
        job={"attempt": 1, "submissionId": "lake-1-x"},
        restarts=2,
        checkpoint={"step": 3, "uri": "/checkpoints/step-3", "time": NOW},
    )
    pods = {
        "lake-head": "driver",
        "lake-env-0": "env",
        "lake-env-1": "env",
        "lake-engine": "inference",
    }
    plane.apply(*(pod(name, role) for name, role in pods.items()))
    for name in pods:
        patch = json.dumps({"status": {"phase": "Running"}})
        plane.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", patch)
    yield "lake"
    plane.kubectl("delete", "pods", "--all", "--grace-period=0", "--force")
    plane.kubectl("delete", "agenticrun", "lake")


def pod(name: str, role: str) -> dict[str, Any]:
    labels = {"agenticrun.dev/run": "lake", "agenticrun.dev/role": role}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "automountServiceAccountToken": False,
            "nodeName": "nowhere",
            "containers": [{"name": "ray", "image": "none"}],
        },
    }


def set_status(plane: Cluster, **status: Any) -> None:
    patch = json.dumps({"status": status})
    plane.kubectl(
        "patch", "agenticrun", "lake", "--subresource=status", "--type=merge", "-p", patch
    )


def test_watch_shows_status_and_curves(cli: Commands, run: str) -> None:
    code, shown = cli("watch", run, "-n", NAMESPACE)
    assert code == 0, shown
    for piece in (
        "Running rollout",
        "4/10",
        "driver 1/1",
        "restarts",
        "step 3, /checkpoints/step-3",
        "entropy 0.500",
        "▁▃▆█ 0.4 (0.1 to 0.4)",
        "action 'Down', valid",
    ):
        assert piece in shown, shown
    assert "missing" not in shown


def test_a_report_of_a_cluster_run_is_complete(cli: Commands, run: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code, said = cli("report", run, "-n", NAMESPACE, "-o", str(page))
    assert code == 0, said
    text = page.read_text()
    for piece in ("rollout/score/mean", "data:image/gif;base64,", "Attempt 1", "renderDir: films"):
        assert piece in text, piece
    assert "Not on this page" not in text
    assert SECRET not in text


@pytest.fixture
def ended(plane: Cluster, run: str) -> Iterator[str]:
    """A run that has ended: its pods are gone, its claim is there. New pods must be restricted."""
    plane.kubectl("delete", "pods", "--all", "--grace-period=0", "--force")
    image = {"name": "driver", "desired": 1, "ready": 0, "gpus": 0, "image": "worker:1"}
    set_status(plane, phase="Succeeded", volumeClaim="lake-checkpoints", roles=[image])
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": spec}
    plane.apply({**claim, "metadata": {"name": "lake-checkpoints"}})
    label = "pod-security.kubernetes.io/enforce"
    plane.kubectl("label", "namespace", NAMESPACE, f"{label}=restricted")
    yield run
    plane.kubectl("label", "namespace", NAMESPACE, f"{label}-")
    # No controller takes the finalizer away.
    plane.kubectl(
        *("patch", "pvc", "lake-checkpoints", "--type=merge"),
        *("-p", '{"metadata":{"finalizers":null}}'),
    )
    plane.kubectl("delete", "pvc", "lake-checkpoints")


def test_a_run_that_has_ended_is_read_from_its_claim(
    cli: Commands, ended: str, plane: Cluster, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    code, said = cli("report", ended, "-n", NAMESPACE, "-o", str(page))
    assert code == 0, said
    assert "the run has ended: reading its output from claim lake-checkpoints" in said
    text = page.read_text()
    for piece in ("rollout/score/mean", "data:image/gif;base64,", "Attempt 1"):
        assert piece in text, piece
    assert "Not on this page" not in text
    assert not plane.list("pods"), "the pod is deleted"


def test_who_may_not_create_pods_is_told_what_to_do(
    cli: Commands, ended: str, plane: Cluster, tmp_path: Path
) -> None:
    config = tmp_path / "kubeconfig"
    access = yaml.safe_load(Path(plane.env["KUBECONFIG"]).read_text())
    access["users"][0]["user"]["as"] = "eve"
    config.write_text(yaml.safe_dump(access))
    reads = ("--verb=get,list", "--resource=pods,agenticruns.agenticrun.dev")
    plane.kubectl("create", "role", "reads", *reads)
    plane.kubectl("create", "rolebinding", "reads", "--role=reads", "--user=eve")
    page = tmp_path / "report.html"
    code, said = cli("report", ended, "-n", NAMESPACE, "-o", str(page), kubeconfig=config)
    assert code == 0, said
    text = page.read_text()
    assert "Not on this page" in text
    assert "only a pod can read claim lake-checkpoints" in text
    assert "actor/entropy" in text  # from the status
    assert "renderDir: films" in text  # from the spec
    assert "WANDB_API_KEY" in text
    assert SECRET not in text
    # What it prints is what the person would do with more rights.
    commands = said[said.index("kubectl create") : said.index("\nEOF") + 4]
    plane.command("bash", "-c", commands)
    (pod,) = plane.list("pods")
    assert pod["metadata"]["ownerReferences"][0]["name"] == ended


def test_pods_that_cannot_be_reached_are_named(cli: Commands, run: str) -> None:
    code, shown = cli("watch", run, "-n", NAMESPACE, pods=False)
    assert code == 0
    assert "4/10" in shown
    assert "missing" in shown
    assert "kubectl exec lake-head" in shown


def test_samples_of_a_cluster_run(cli: Commands, run: str) -> None:
    code, shown = cli("samples", run, "-n", NAMESPACE, "--list")
    assert code == 0, shown
    assert "step 4, validation: tag Lake" in shown


def test_logs_of_the_driver_and_of_all_pods_of_a_role(cli: Commands, run: str) -> None:
    (cli.logs / "job-driver-lake-1-x.log").write_text("step 3\nstep 4\n")
    (cli.logs / "worker-1.out").write_text("episode done\n")
    assert cli("logs", run, "-n", NAMESPACE, "--lines", "1") == (0, "step 4\n")
    code, shown = cli("logs", run, "-n", NAMESPACE, "--role", "env")
    assert (code, sorted(shown.splitlines())) == (
        0,
        ["[lake-env-0] episode done", "[lake-env-1] episode done"],
    )
    (cli.logs / "vllm-7-8000.log").write_text("server ready\n")
    code, shown = cli("logs", run, "-n", NAMESPACE, "--role", "inference")
    assert (code, sorted(shown.splitlines())) == (0, ["episode done", "server ready"])
    code, shown = cli("logs", run, "-n", NAMESPACE, "--role", "critic")
    assert (code, "no running pod of the role critic" in shown) == (ExitCode.INVALID_CONFIG, True)


def test_stop_suspends_and_resume_resumes(cli: Commands, run: str, plane: Cluster) -> None:
    def suspended() -> object:
        found = plane.get("agenticruns", "lake")
        assert found is not None
        return found["spec"].get("suspend")

    for command, expected in (("stop", True), ("resume", False), ("suspend", True)):
        code, said = cli(command, run, "-n", NAMESPACE)
        assert (code, suspended()) == (0, expected), said
    set_status(plane, phase="Succeeded")
    code, said = cli("resume", run, "-n", NAMESPACE)
    assert (code, suspended()) == (ExitCode.INVALID_CONFIG, True)
    assert "lake has ended: its phase is Succeeded" in said


def test_a_checkpoint_needs_a_head_pod(cli: Commands, run: str, plane: Cluster) -> None:
    plane.kubectl("delete", "pod", "lake-head", "--grace-period=0", "--force")
    code, said = cli("checkpoint", run, "-n", NAMESPACE)
    assert code == ExitCode.INVALID_CONFIG
    assert "only a run that trains saves a checkpoint" in said


def test_a_run_that_does_not_exist_is_named(cli: Commands, plane: Cluster) -> None:
    code, said = cli("watch", "nobody", "-n", NAMESPACE)
    assert code == ExitCode.INVALID_CONFIG
    assert "there is no AgenticRun nobody in this namespace" in said


def test_kubectl_runs_the_plugin(cli: Commands, run: str) -> None:
    assert cli.plugin("--version") == f"{__version__}\n"
    assert "4/10" in cli.plugin("watch", run, "-n", NAMESPACE)


def test_the_doctor_says_what_a_bare_control_plane_lacks(cli: Commands, plane: Cluster) -> None:
    quota = {"hard": {"pods": "0"}}
    plane.apply(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": quota}
    )
    try:
        patch = json.dumps({"status": {**quota, "used": {"pods": "0"}}})
        plane.kubectl(
            "patch", "resourcequota", "none", "--subresource=status", "--type=merge", "-p", patch
        )
        code, said = cli("doctor", "-n", NAMESPACE)
    finally:
        plane.kubectl("delete", "resourcequota", "none")
    found = {
        cells[1].strip(): cells[2].strip()
        for cells in (line.split("│") for line in said.splitlines())
        if len(cells) > 3 and cells[1].strip()
    }
    assert code == 1, said
    assert {name: found[name] for name in ("apiserver", "CRD", "rights")} == dict.fromkeys(
        ("apiserver", "CRD", "rights"), "ok"
    ), said
    assert {name: found[name] for name in ("operator", "GPUs")} == dict.fromkeys(
        ("operator", "GPUs"), "FAILED"
    ), said
    assert {name: found[name] for name in ("KubeRay", "quotas", "storage")} == dict.fromkeys(
        ("KubeRay", "quotas", "storage"), "warning"
    ), said
    assert "to fix: the cluster: operator, the cluster: GPUs" in said


def test_the_doctor_looks_for_what_a_run_names(
    cli: Commands, plane: Cluster, tmp_path: Path
) -> None:
    hugging_face = {"secretName": "hub", "cacheClaimName": "models"}
    claim = {"size": "1Gi", "storageClassName": "fast"}
    document = run_with(
        ("spec.huggingFace", hugging_face),
        ("spec.checkpoint", {"volumeClaim": claim}),
        ("spec.roles.env", {"envFrom": [{"configMapRef": {"name": "settings"}}]}),
    )
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(document))
    plane.kubectl("create", "secret", "generic", "hub", "--from-literal=HF_TOKEN=x")
    plane.kubectl("create", "configmap", "settings")
    try:
        code, said = cli("doctor", "-f", str(file), "-n", NAMESPACE)
    finally:
        plane.kubectl("delete", "secret/hub", "configmap/settings")
    name = document["metadata"]["name"]
    failed = said[said.index("to fix:") :].replace("\n", " ")
    assert code == 1, said
    for place in ("pods", "persistentvolumeclaim models", "storageclass fast"):
        assert f"{name} on the cluster: {place}" in failed, said
    for place in ("quotas", "code", "secret hub", "configmap settings"):
        assert f"{name} on the cluster: {place}" not in failed, said
    assert "HF_TOKEN=x" not in said
