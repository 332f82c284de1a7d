"""Faults to inject into a run or into the cluster below it. Each is undone at the end.

A fault is a context manager: it holds as long as the `with` block. Those that need the processes of
the node work on the host cluster only (docs/devcluster.md), as root.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from agenticrun_api import Role
from agenticrun_api.names import (
    DASHBOARD_PORT,
    LABEL_ROLE,
    LABEL_RUN,
    LABEL_RUN_UID,
    REPORTER_PORT,
)
from devcluster.processes import ProcessTable
from devcluster.settings import Settings
from drills import processes_in_pods
from installation import RELEASE, RUNS, Images, Operator
from lake import HEAD_CONTAINER, Pods, small_lake
from testcluster import ROOT, Cluster, devcluster
from waiting import eventually

DOOMED = "agenticrun-e2e-doomed"
"""A second namespace that the operator serves, to be deleted."""
RAY_CRD = "rayclusters.ray.io"


@dataclass(frozen=True)
class Site:
    """What a fault may touch."""

    runs: Cluster
    operator: Operator
    images: Images
    name: str
    """Of the run that is drilled."""
    pods: Pods = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pods", Pods(self.runs, self.name))


Fault = Callable[[Site], AbstractContextManager[None]]


@contextmanager
def driver_killed(site: Site) -> Iterator[None]:
    assert len(site.pods.kill_driver()) == 1
    yield


@contextmanager
def driver_frozen(site: Site) -> Iterator[None]:
    with _stopped(processes_in_pods(["-m", "agenticrun_workers.driver"])):
        yield


@contextmanager
def reporter_frozen(site: Site) -> Iterator[None]:
    with _stopped(processes_in_pods(["-m", "agenticrun_workers.reporting.sidecar"])):
        yield


@contextmanager
def head_processes_frozen(site: Site) -> Iterator[None]:
    """Everything in the Ray container of the head but the driver."""
    uid = site.pods.head()["metadata"]["uid"]
    keep = {item.pid for item in processes_in_pods(["-m", "agenticrun_workers.driver"], uid)}
    keep |= {item.pid for item in processes_in_pods(["agenticrun_workers.reporting.sidecar"], uid)}
    found = [item for item in processes_in_pods([], uid) if item.pid not in keep]
    with _stopped(found):
        yield


@contextmanager
def _stopped(processes: list[psutil.Process]) -> Iterator[None]:
    assert processes, "no such process: a SIGSTOP needs the host cluster"
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            if process.is_running():
                process.resume()


EMOJI = "\U0001f6ab \u4e0d\u884c \U0001f917"
"""Characters of three and four bytes."""
_BREAK = "/tmp/break"
BREAKING_CODE = f"""
import pathlib

def keep_all(scores):
    asked = pathlib.Path({_BREAK!r})
    if asked.exists():
        code = asked.read_text()
        asked.unlink()
        exec(code, {{}})
    return False
"""
"""A group filter, which the driver calls for each group; it runs the code of `in_the_driver`."""


def in_the_driver(code: str) -> Fault:
    """The user's code in the driver's process does this, once."""

    @contextmanager
    def fault(site: Site) -> Iterator[None]:
        script = f"cat > {_BREAK}.new && mv {_BREAK}.new {_BREAK}"
        head = site.pods.head()["metadata"]["name"]
        container = ("-c", HEAD_CONTAINER)
        site.runs.kubectl("exec", "-i", head, *container, "--", "sh", "-c", script, stdin=code)
        yield

    return fault


exit_zero = in_the_driver("import os; os._exit(0)")
exception_raised = in_the_driver(f"raise RuntimeError({EMOJI!r})")
odd_log_written = in_the_driver(f"""
import os, sys
sys.stdout.buffer.write({EMOJI!r}.encode() + b"\\0 \\xff\\xfe \\x1b[31m red\\n")
sys.stdout.flush()
os._exit(3)
""")
"""The driver fails, and the end of its log is not plain text."""

_hostile_snapshots = in_the_driver("""
import json
from agenticrun_api import Progress

well = Progress.model_dump_json

def badly(self, **options):
    time = "+292277026596-01-01T00:00:00Z"
    checkpoint = {"uri": "/checkpoints", "step": 10**20, "time": time, "savedAt": time}
    odd = {"step": 10**30, "startTime": time, "message": "\\0 \\ud83e", "checkpoint": checkpoint}
    return json.dumps(json.loads(well(self, **options)) | odd)

Progress.model_dump_json = badly
""")


@contextmanager
def hostile_snapshots_and_suspended(site: Site) -> Iterator[None]:
    """All snapshots of the driver are malformed from now on, and the user suspends the run."""
    with _hostile_snapshots(site):
        time.sleep(10)
        _suspend(site, True)
        eventually(lambda: _status(site)["phase"] == "Suspended", 120, "suspended", interval=0.5)
        yield
        _suspend(site, False)


def _suspend(site: Site, value: bool) -> None:
    _change_spec(site, {"suspend": value})


def _change_spec(site: Site, fields: dict[str, Any]) -> None:
    patch = json.dumps({"spec": fields})
    site.runs.kubectl("patch", "agenticrun", site.name, "--type=merge", f"--patch={patch}")


def _status(site: Site) -> dict[str, Any]:
    status: dict[str, Any] = (site.runs.get("agenticrun", site.name) or {}).get("status", {})
    return status


def pod_deleted(role: Role) -> Fault:
    @contextmanager
    def fault(site: Site) -> Iterator[None]:
        _delete_pod(site, role)
        yield

    return fault


def _delete_pod(site: Site, role: Role) -> None:
    (pod,) = site.pods.of(role)
    site.runs.kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")


def evicted(role: Role, times: int = 1) -> Fault:
    """Evict the role's pod as `kubectl drain` does; again each time that the run trains on."""

    @contextmanager
    def fault(site: Site) -> Iterator[None]:
        for count in range(times):
            _evict(site, role)
            if count + 1 < times:
                _await_attempt(site, count + 2)
        yield

    return fault


def _evict(site: Site, role: Role) -> None:
    (pod,) = site.pods.of(role)
    name = pod["metadata"]["name"]
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": site.runs.namespace},
    }
    path = f"/api/v1/namespaces/{site.runs.namespace}/pods/{name}/eviction"
    site.runs.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


def _await_attempt(site: Site, attempt: int) -> None:
    """Wait until this attempt has made a step."""
    began: list[int] = []

    def trains() -> bool:
        status = _status(site)
        training = any(
            item["type"] == "Training" and item["status"] == "True"
            for item in status.get("conditions", ())
        )
        if not training or status["job"]["attempt"] < attempt or status["activity"] == "starting":
            return False
        began.append(status.get("step", 0))
        return began[-1] > began[0]

    eventually(trains, 240, f"attempt {attempt} trains", interval=0.5)


@contextmanager
def ray_cluster_suspended(site: Site) -> Iterator[None]:
    """As a queue does it; it releases the same RayCluster later."""

    def suspend(value: bool) -> str:
        patch = json.dumps({"spec": {"suspend": value}})
        site.runs.kubectl("patch", "raycluster", site.name, "--type=merge", f"--patch={patch}")
        found = site.runs.get("raycluster", site.name)
        return str(found and found["metadata"]["uid"])

    uid = suspend(True)
    yield
    assert suspend(False) == uid, "the RayCluster was replaced while it was suspended"


@contextmanager
def ray_cluster_edited(site: Site) -> Iterator[None]:
    """The env group is asked for no pods."""

    def group() -> tuple[int, dict[str, Any]]:
        found = site.runs.get("raycluster", site.name)
        assert found is not None
        groups = enumerate(found["spec"]["workerGroupSpecs"])
        return next(item for item in groups if item[1]["groupName"] == Role.ENV)

    place, before = group()
    path = f"/spec/workerGroupSpecs/{place}"
    patch = [
        {"op": "replace", "path": f"{path}/replicas", "value": 0},
        {"op": "replace", "path": f"{path}/minReplicas", "value": 0},
    ]
    site.runs.kubectl("patch", "raycluster", site.name, "--type=json", "-p", json.dumps(patch))
    eventually(lambda: group()[1] == before, 30, "the group is put back", interval=0.5)
    yield


@contextmanager
def phase_written(site: Site) -> Iterator[None]:
    """The status says that the run has failed, but the operator has not written it."""
    words = ("--subresource=status", "--type=merge", "-p", '{"status": {"phase": "Failed"}}')
    site.runs.kubectl("patch", "agenticrun", site.name, *words)

    eventually(
        lambda: _status(site)["phase"] == "Running", 30, "the phase is repaired", interval=0.2
    )
    yield


_WEBHOOK = "drill-webhook"
_WEBHOOK_CODE = """
import http.server, json, os, ssl, time

class Webhook(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(float(os.environ["SECONDS"]))
        denial = os.environ["DENIAL"]
        response = {"uid": review["request"]["uid"], "allowed": not denial}
        if denial:
            response["status"] = {"message": denial, "code": 403}
        review = {key: review[key] for key in ("apiVersion", "kind")} | {"response": response}
        body = json.dumps(review).encode()
        self.send_response(int(os.environ["CODE"]))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

server = http.server.ThreadingHTTPServer(("", 8443), Webhook)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/webhook/tls.crt", "/webhook/tls.key")
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""


def webhook_server(code: int = 200, seconds: float = 0.0, denial: str = "") -> Fault:
    """A server for an admission webhook, in a pod.

    Args:
        code: HTTP status of its answers.
        seconds: that it takes for one.
        denial: why it denies; empty: it allows.
    """

    @contextmanager
    def place(site: Site) -> Iterator[None]:
        metadata = {"name": _WEBHOOK, "labels": {"app": _WEBHOOK}}
        host = f"{_WEBHOOK}.{site.runs.namespace}.svc"
        files = _certificate(host) | {"server.py": _WEBHOOK_CODE}
        settings = {"CODE": str(code), "SECONDS": str(seconds), "DENIAL": denial}
        container = {
            "name": "webhook",
            "image": site.images.operator,
            "command": ["python", "/webhook/server.py"],
            "env": [{"name": name, "value": value} for name, value in settings.items()],
            "resources": {"requests": {"cpu": "1m", "memory": "32Mi"}},
            "volumeMounts": [{"name": "webhook", "mountPath": "/webhook"}],
            "readinessProbe": {"tcpSocket": {"port": 8443}, "periodSeconds": 1},
        }
        pod = {
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            "volumes": [{"name": "webhook", "configMap": {"name": _WEBHOOK}}],
        }
        ports = [{"port": 443, "targetPort": 8443}]
        service = {"selector": {"app": _WEBHOOK}, "ports": ports}
        core = {"apiVersion": "v1", "metadata": metadata}
        site.runs.apply(
            {**core, "kind": "ConfigMap", "data": files},
            {**core, "kind": "Service", "spec": service},
            {**core, "kind": "Pod", "spec": pod},
        )
        try:
            ready = "--for=condition=Ready"
            site.runs.kubectl("wait", "pod", _WEBHOOK, ready, "--timeout=120s")
            yield
        finally:
            site.runs.kubectl("delete", "pod,service,configmap", _WEBHOOK, "--wait=true")

    return place


def _certificate(host: str) -> dict[str, str]:
    """Return a certificate for the host that signs itself, and its key, as files."""
    with TemporaryDirectory() as folder:
        files = {name: Path(folder) / name for name in ("tls.crt", "tls.key")}
        key = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
        names = ("-subj", f"/CN={host}", "-addext", f"subjectAltName=DNS:{host}", "-nodes")
        out = ("-keyout", files["tls.key"], "-out", files["tls.crt"])
        subprocess.run(["openssl", *key, *names, *out], check=True, capture_output=True)
        return {name: file.read_text() for name, file in files.items()}


@contextmanager
def webhook_called(site: Site) -> Iterator[None]:
    """The webhook of `webhook_server` is asked about RayClusters, and the run's is deleted."""
    with _webhook_configured(site), ray_cluster_deleted(site):
        yield


def runs_wait_for_webhook(count: int) -> Fault:
    """The webhook of `webhook_server` keeps the RayClusters of other runs waiting."""

    @contextmanager
    def fault(site: Site) -> Iterator[None]:
        with _webhook_configured(site), _other_runs(site, count):
            yield

    return fault


@contextmanager
def _other_runs(site: Site, count: int) -> Iterator[list[str]]:
    """Runs that train nothing: their RayClusters get no pods."""
    names = [f"other-{number}" for number in range(count)]
    documents = [small_lake(name, max_steps=1, save_steps=0) for name in names]
    for document in documents:
        document["spec"]["checkpoint"] = {"none": True}
    site.runs.apply(*documents)
    try:
        yield names
    finally:
        site.runs.kubectl("delete", "agenticruns", *names, "--wait=true", "--timeout=300s")


_HUNG_HEAD = f"""
import socket, time
listening = [socket.create_server(("", port)) for port in ({REPORTER_PORT}, {DASHBOARD_PORT})]
time.sleep(3600)
"""
"""Connections are accepted by the kernel, and nothing is ever answered."""


def hung_heads(count: int) -> Fault:
    """Other runs have heads that accept connections and never answer; KubeRay rests."""

    @contextmanager
    def fault(site: Site) -> Iterator[None]:
        with _kuberay_scaled_to_zero(site.runs), _other_runs(site, count) as names:
            for name in names:
                found = f"the RayCluster of {name} is there"
                eventually(partial(site.runs.get, "raycluster", name), 120, found, interval=0.5)
            site.runs.apply(*(_hung_head(site, name) for name in names))
            names_of_pods = [f"{name}-head" for name in names]
            ready = ("--for=condition=Ready", "--timeout=400s")
            site.runs.kubectl("wait", "pods", *names_of_pods, *ready)
            for name in names:
                _show_head(site, name)
            yield

    return fault


def _hung_head(site: Site, name: str) -> dict[str, Any]:
    """Return a head pod as KubeRay labels it, with other programs in it."""
    cluster = site.runs.get("raycluster", name)
    assert cluster is not None
    labels = cluster["spec"]["headGroupSpec"]["template"]["metadata"]["labels"]
    owner = {key: cluster[key] for key in ("apiVersion", "kind")} | {
        "name": name,
        "uid": cluster["metadata"]["uid"],
        "controller": True,
    }
    container = {
        "name": HEAD_CONTAINER,
        "image": site.images.operator,
        "command": ["python", "-c", _HUNG_HEAD],
        "resources": {"requests": {"cpu": "1m", "memory": "16Mi"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-head",
            "labels": labels | {"ray.io/cluster": name, "ray.io/node-type": "head"},
            "ownerReferences": [owner],
        },
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]},
    }


def _show_head(site: Site, name: str) -> None:
    """Write into the RayCluster's status which pod is its head, as KubeRay does it."""
    pod = site.runs.get("pod", f"{name}-head")
    assert pod is not None
    head = {"podName": f"{name}-head", "podIP": pod["status"]["podIP"]}
    patch = json.dumps({"status": {"state": "ready", "head": head}})
    words = ("--subresource=status", "--type=merge", f"--patch={patch}")
    site.runs.kubectl("patch", "raycluster", name, *words)


@contextmanager
def _webhook_configured(site: Site) -> Iterator[None]:
    files = (site.runs.get("configmap", _WEBHOOK) or {})["data"]
    namespace = site.runs.namespace
    hook = {
        "name": "drill.example.com",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "timeoutSeconds": 15,
        "clientConfig": {
            "service": {"name": _WEBHOOK, "namespace": namespace},
            "caBundle": base64.b64encode(files["tls.crt"].encode()).decode(),
        },
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "rules": [
            {
                "apiGroups": ["ray.io"],
                "apiVersions": ["*"],
                "resources": ["rayclusters"],
                "operations": ["CREATE"],
            }
        ],
    }
    document = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": _WEBHOOK},
        "webhooks": [hook],
    }
    site.runs.apply(document)
    try:
        time.sleep(3)  # until the apiserver has read it
        yield
    finally:
        site.runs.kubectl("delete", "validatingwebhookconfiguration", _WEBHOOK)


@contextmanager
def claim_deleted_and_suspended(site: Site) -> Iterator[None]:
    """The claim goes with the last pod that mounts it; a suspension would be its end."""
    site.runs.kubectl("delete", "pvc", f"{site.name}-checkpoints", "--wait=false")
    _suspend(site, True)
    yield


@contextmanager
def env_pod_not_placed(site: Site) -> Iterator[None]:
    """No node takes pods; one of two env pods is deleted, and the driver restarts."""
    nodes = site.runs.kubectl("get", "nodes", "-o", "name").split()
    site.runs.kubectl("cordon", *nodes)
    try:
        name = site.pods.of(Role.ENV)[0]["metadata"]["name"]
        site.runs.kubectl("delete", "pod", name, "--wait=true")
        assert len(site.pods.kill_driver()) == 1
        _await_attempt(site, 2)
        yield
    finally:
        site.runs.kubectl("uncordon", *nodes)


@contextmanager
def limits_quota(site: Site) -> Iterator[None]:
    """A quota that lets only pods in whose containers all have a CPU limit."""
    site.runs.apply(QUOTA | {"spec": {"hard": {"limits.cpu": "20"}}})
    try:
        yield
    finally:
        site.runs.kubectl("delete", "resourcequota", "nothing")


@contextmanager
def nothing(_: Site) -> Iterator[None]:
    """The surroundings alone are the fault."""
    yield


@contextmanager
def ray_cluster_deleted(site: Site) -> Iterator[None]:
    site.runs.kubectl("delete", "raycluster", site.name, "--wait=false")
    yield


@contextmanager
def mounted_objects_deleted(site: Site) -> Iterator[None]:
    """The run's own ConfigMap and both Secrets."""
    selector = f"--selector={LABEL_RUN}={site.name}"
    site.runs.kubectl("delete", "configmaps,secrets", selector, "--wait=false")
    yield


@contextmanager
def mounted_objects_and_head_deleted(site: Site) -> Iterator[None]:
    with mounted_objects_deleted(site):
        _delete_pod(site, Role.DRIVER)
        yield


@contextmanager
def stray_pods(site: Site) -> Iterator[None]:
    """Pods with the labels of the run's, which nobody controls; one lacks the uid, one the role."""
    run = site.runs.get("agenticrun", site.name)
    assert run is not None
    labels = {LABEL_RUN: site.name, LABEL_RUN_UID: run["metadata"]["uid"], LABEL_ROLE: "driver"}
    names: list[str] = []
    for missing in (None, LABEL_RUN_UID, LABEL_ROLE):
        names.append(f"stray-{len(names)}")
        container = {
            "name": "ray",
            "image": site.images.operator,
            "command": ["sleep", "600"],
            "resources": {"requests": {"cpu": "1m", "memory": "8Mi"}},
        }
        metadata = {
            "name": names[-1],
            "labels": {key: value for key, value in labels.items() if key != missing},
        }
        spec = {"terminationGracePeriodSeconds": 0, "containers": [container]}
        site.runs.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    try:
        yield
    finally:
        site.runs.kubectl("delete", "pods", *names, "--wait=true")


def denied_by(document: dict[str, Any], role: Role) -> Fault:
    """An object that keeps pods of the run from being created, while one of them is deleted."""

    @contextmanager
    def fault(site: Site) -> Iterator[None]:
        site.runs.apply(document)
        kind, name = document["kind"], document["metadata"]["name"]
        try:
            if kind == "ResourceQuota":  # its use is counted a moment later
                eventually(
                    lambda: "used" in (site.runs.get(kind, name) or {}).get("status", {}),
                    60,
                    "the quota is counted",
                    interval=0.2,
                )
            _delete_pod(site, role)
            yield
        finally:
            site.runs.kubectl("delete", kind, name)

    return fault


QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "nothing"},
    "spec": {"hard": {"pods": "0"}},
}
LIMIT_RANGE = {
    "apiVersion": "v1",
    "kind": "LimitRange",
    "metadata": {"name": "small"},
    "spec": {"limits": [{"type": "Container", "max": {"memory": "64Mi"}}]},
}


@contextmanager
def restricted_head_deleted(site: Site) -> Iterator[None]:
    """The namespace enforces the strictest pod security standard when the head is made again."""
    label = "pod-security.kubernetes.io/enforce"
    site.runs.kubectl("label", "namespace", RUNS, f"{label}=restricted")
    try:
        _delete_pod(site, Role.DRIVER)
        yield
    finally:
        site.runs.kubectl("label", "namespace", RUNS, f"{label}-")


@contextmanager
def kuberay_stopped(site: Site) -> Iterator[None]:
    """KubeRay's operator is scaled to 0, and the head pod is deleted."""
    with _kuberay_scaled_to_zero(site.runs):
        _delete_pod(site, Role.DRIVER)
        yield


@contextmanager
def _kuberay_scaled_to_zero(cluster: Cluster) -> Iterator[None]:
    listed = json.loads(cluster.kubectl("get", "deployments", "--all-namespaces", "-o", "json"))
    namespace = next(
        item["metadata"]["namespace"]
        for item in listed["items"]
        if item["metadata"]["name"] == "kuberay-operator"
    )
    inside = cluster.in_namespace(namespace)
    inside.kubectl("scale", "deployment/kuberay-operator", "--replicas=0")
    try:
        yield
    finally:
        inside.kubectl("scale", "deployment/kuberay-operator", "--replicas=1")
        inside.kubectl("rollout", "status", "deployment/kuberay-operator", "--timeout=300s")


@contextmanager
def kuberay_crd_removed(site: Site) -> Iterator[None]:
    """With the definition go all RayClusters and their pods."""
    found = site.runs.get("crd", RAY_CRD)
    assert found is not None
    keep = {
        key: found["metadata"][key]
        for key in ("name", "annotations", "labels")
        if key in found["metadata"]
    }
    document = {"apiVersion": found["apiVersion"], "kind": found["kind"], "metadata": keep}
    site.runs.kubectl("delete", "crd", RAY_CRD, "--wait=false")
    try:
        yield
    finally:
        eventually(lambda: not site.runs.get("crd", RAY_CRD), 120, "it is gone", interval=0.5)
        text = json.dumps(document | {"spec": found["spec"]})
        site.runs.kubectl("create", "-f", "-", stdin=text)
        site.runs.wait_for_crd(RAY_CRD)


def component_killed(name: str) -> Fault:
    """SIGKILL to a process of the node; `tools/devcluster up` starts it again."""

    @contextmanager
    def fault(_: Site) -> Iterator[None]:
        settings = Settings.from_environment()
        table = ProcessTable(settings.state / "processes", settings.logs, settings.netns_path)
        record = table.record(name)
        assert record is not None, f"{name} does not run here: the drill needs the host cluster"
        os.kill(record.pid, signal.SIGKILL)
        try:
            yield
        finally:
            assert devcluster("up").returncode == 0

    return fault


@contextmanager
def node_tainted(site: Site) -> Iterator[None]:
    """NoExecute drives all pods from the only node, those of the operators, too."""
    taint = "drill.agenticrun.dev/away"
    site.runs.kubectl("taint", "nodes", "--all", f"{taint}=true:NoExecute")
    try:
        yield
    finally:
        site.runs.kubectl("taint", "nodes", "--all", f"{taint}:NoExecute-")


@contextmanager
def two_namespaces(site: Site) -> Iterator[None]:
    """The operator serves a second namespace, where a run waits for an image."""
    site.runs.kubectl("create", "namespace", DOOMED)
    _watch(site, RUNS, DOOMED)
    try:
        yield
    finally:
        site.runs.kubectl("delete", "namespace", DOOMED, "--ignore-not-found", "--timeout=300s")
        _watch(site, RUNS)


def _watch(site: Site, *namespaces: str) -> None:
    _upgrade(site, f"--set=watchNamespaces={{{','.join(namespaces)}}}")


def _helm(site: Site, command: str, *words: str, stdin: str | None = None) -> str:
    """Run helm on the operator's release."""
    system = site.operator.system
    return system.command(
        "helm", *command.split(), RELEASE, "-n", system.namespace, *words, stdin=stdin
    )


_CHART = str(ROOT / "charts/agenticrun")
_WAIT = ("--wait", "--timeout=10m")


def _upgrade(site: Site, *changes: str) -> None:
    _helm(site, "upgrade", _CHART, "--skip-crds", "--reset-then-reuse-values", *changes, *_WAIT)


@contextmanager
def helm_upgraded(site: Site) -> Iterator[None]:
    """A changed value, then another name of the image; the release's own values at the end."""
    values = _helm(site, "get values", "-o", "json")
    try:
        _upgrade(site, "--set=logLevel=info")
        pod = site.operator.system.list("pods")[0]  # an old one may still be ending
        (container,) = pod["status"]["containerStatuses"]
        _upgrade(site, f"--set=image.digest={container['imageID'].rpartition('@')[2]}")
        yield
    finally:
        _helm(site, "upgrade", _CHART, "--skip-crds", "-f", "-", *_WAIT, stdin=values)


@contextmanager
def helm_rolled_back(site: Site) -> Iterator[None]:
    _upgrade(site, "--set=logLevel=info")
    _helm(site, "rollback", *_WAIT)
    yield


@contextmanager
def helm_reinstalled(site: Site) -> Iterator[None]:
    """The release is uninstalled, and in the end installed again with its name and values."""
    values = _helm(site, "get values", "-o", "json")
    _helm(site, "uninstall", *_WAIT)
    try:
        assert site.operator.system.get("secret", f"{RELEASE}-operator-key"), "the key is kept"
        yield
    finally:
        _helm(site, "install", _CHART, "--skip-crds", "-f", "-", *_WAIT, stdin=values)


@contextmanager
def manifests_applied_again(site: Site) -> Iterator[None]:
    """Argo CD and Flux render the chart without a cluster, and apply it again and again."""
    values = _helm(site, "get values", "-o", "json")
    system, key = site.operator.system, f"{RELEASE}-operator-key"
    before = (system.get("secret", key) or {})["data"]
    for _ in range(2):
        words = ("template", RELEASE, _CHART, "-n", system.namespace, "-f", "-")
        rendered = system.command("helm", *words, stdin=values)
        apply = ("apply", "--server-side", "--force-conflicts", "-f", "-")
        system.command("kubectl", *apply, stdin=rendered)
        site.operator.wait_ready()
    assert (system.get("secret", key) or {})["data"] == before, "the key was rotated"
    yield


@contextmanager
def two_operators(site: Site) -> Iterator[None]:
    _upgrade(site, "--set=replicas=2")
    try:
        yield
    finally:
        _upgrade(site, "--set=replicas=1")


def leader_lost(number: signal.Signals) -> Fault:
    """The operator that holds the Lease is killed or frozen, and the other one takes over."""

    @contextmanager
    def fault(site: Site) -> Iterator[None]:
        system = site.operator.system

        def holder() -> str:
            listed = json.loads(system.kubectl("get", "leases", "-A", "-o", "json"))["items"]
            held = (lease["spec"].get("holderIdentity", "") for lease in listed)
            return next((name for name in held if name.startswith(f"{RELEASE}-")), "")

        before = holder()
        (uid,) = {
            pod["metadata"]["uid"]
            for pod in system.list("pods")
            if before.startswith(pod["metadata"]["name"])
        }
        found = processes_in_pods(["agenticrun_operator"], uid)
        assert found, "no such process: a signal needs the host cluster"
        for process in found:
            process.send_signal(number)
        eventually(lambda: holder() not in ("", before), 25, "another one leads", interval=0.2)
        yield

    return fault


@contextmanager
def namespace_deleted(site: Site) -> Iterator[None]:
    site.runs.kubectl("delete", "namespace", DOOMED, "--wait=false")
    yield


def replicas_changed(role: Role) -> Fault:
    """The user asks for a second pod of a role, then for one. Not a fault: nothing restarts."""

    @contextmanager
    def fault(site: Site) -> Iterator[None]:
        def ask_for(replicas: int) -> None:
            _change_spec(site, {"roles": {role.value: {"replicas": replicas}}})

        def pods() -> tuple[int, int, int, int]:
            (seen,) = [each for each in _status(site).get("roles", []) if each["name"] == role]
            return seen["desired"], seen["ready"], seen.get("joining", 0), seen.get("leaving", 0)

        ask_for(2)
        eventually(lambda: pods() == (2, 2, 0, 0), 180, f"two {role} pods work", interval=0.5)
        yield
        ask_for(1)
        eventually(lambda: pods() == (1, 1, 0, 0), 180, f"one {role} pod works", interval=0.5)

    return fault


@contextmanager
def claim_expanded(site: Site) -> Iterator[None]:
    """The claim grows, as an administrator would do it; then the user changes the TTL."""

    def expandable(value: bool | None) -> None:
        patch = json.dumps({"allowVolumeExpansion": value})
        site.runs.kubectl("patch", "storageclass", "standard", "--type=merge", f"--patch={patch}")

    expandable(True)
    try:
        size = {"spec": {"resources": {"requests": {"storage": "2Gi"}}}}
        site.runs.kubectl(
            "patch",
            "pvc",
            f"{site.name}-checkpoints",
            "--type=merge",
            f"--patch={json.dumps(size)}",
        )
        _change_spec(site, {"ttlSecondsAfterFinished": 3600})
        yield
    finally:
        expandable(None)


SMALL_CLAIM = "small-claim"
_SMALL_FOLDER = "drill-small"


@contextmanager
def small_volume(site: Site) -> Iterator[None]:
    """A claim of a few MB, in the memory of this machine."""
    folder = _small_folder()
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=777", "tmpfs", folder], check=True)
    names = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": SMALL_CLAIM},
        "spec": {
            **names,
            "capacity": {"storage": "64Mi"},
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(folder)},
            "claimRef": {"namespace": RUNS, "name": SMALL_CLAIM},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": SMALL_CLAIM},
        "spec": {**names, "resources": {"requests": {"storage": "64Mi"}}},
    }
    try:
        site.runs.apply(volume, claim)
        yield
    finally:
        site.runs.kubectl("delete", "pvc", SMALL_CLAIM, "--ignore-not-found", "--wait=true")
        site.runs.kubectl("delete", "pv", SMALL_CLAIM, "--ignore-not-found", "--wait=true")
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()


@contextmanager
def volume_full(site: Site) -> Iterator[None]:
    file = os.open(_small_folder() / "filler", os.O_CREAT | os.O_WRONLY)
    try:
        while os.write(file, b"\0" * 65536):
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    finally:
        os.close(file)
    yield


def _small_folder() -> Path:
    return Settings.from_environment().state / "volumes" / _SMALL_FOLDER
