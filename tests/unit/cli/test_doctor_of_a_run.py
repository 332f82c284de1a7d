"""`agenticrun doctor -f run.yaml`: what one run lacks, on a cluster and on this machine."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from typing_extensions import override

from agenticrun_api import AgenticRun, parse_run
from agenticrun_workers.cli import app
from agenticrun_workers.cli.doctor import machine
from agenticrun_workers.cli.doctor.cluster import GPU, code_arrives, run_there
from agenticrun_workers.cli.doctor.machine import (
    code_is_here,
    gpus_suffice,
    memory_suffices,
    model_is_reachable,
)
from agenticrun_workers.cli.doctor.placement import (
    ZONE,
    fits_quotas,
    pod_requests,
    pods_fit,
    usable_nodes,
    volume_reaches,
)
from agenticrun_workers.cli.doctor.references import images_are_known, objects_exist, references
from agenticrun_workers.cli.kubectl import Kubectl, SourceError
from agenticrun_workers.findings import Finding, Verdict
from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from tiny_runs import tiny_document

GIB = 2**30


def a_run(**spec: Any) -> AgenticRun:
    document = tiny_document()
    document["spec"] |= spec
    return parse_run(document)


def node(name: str, *, taints: Any = (), labels: Any = None, **amounts: str) -> dict[str, Any]:
    allocatable = {"cpu": "16", "memory": "64Gi", "pods": "110", **amounts}
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"taints": list(taints)},
        "status": {
            "allocatable": allocatable,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def pod(place: str, **requests: str) -> dict[str, Any]:
    return {"spec": {"nodeName": place, "containers": [{"resources": {"requests": requests}}]}}


def required(key: str, operator: str, *values: str) -> dict[str, Any]:
    expression = {"key": key, "operator": operator, "values": list(values)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


GPU_NODE = {GPU: "8"}
TAINT = {"key": GPU, "value": "present", "effect": "NoSchedule"}
TRAINS_ON_GPUS = {"trainer": {"gpus": 4, "memory": "32Gi"}, "inference": {"gpus": 4}}


@pytest.mark.parametrize(
    ("roles", "nodes", "pods", "verdict", "words"),
    [
        ({}, [node("a")], [], Verdict.OK, "all 4 pods fit on 1 nodes"),
        (TRAINS_ON_GPUS, [node("a", **GPU_NODE)], [], Verdict.OK, "all 4 pods"),
        (
            TRAINS_ON_GPUS,
            [node("a")],
            [],
            Verdict.FAILED,
            f"a pod of role trainer asks for 4 {GPU}; the largest node offers 0 {GPU}",
        ),
        (
            {"trainer": {"memory": "100Gi"}},
            [node("a"), node("b")],
            [],
            Verdict.FAILED,
            "role trainer asks for 100 GiB memory; the largest node offers 64 GiB memory",
        ),
        (
            TRAINS_ON_GPUS,
            [node("a", **GPU_NODE)],
            [pod("a", **{GPU: "6"})],
            Verdict.WARNING,
            "1 of 4 pods fit now; no room for 1 driver, 1 trainer, 1 inference",
        ),
        (
            TRAINS_ON_GPUS,
            [node("a", taints=[TAINT | {"key": "team"}], **GPU_NODE), node("b")],
            [],
            Verdict.FAILED,
            f"asks for 4 {GPU}",
        ),
        (
            {
                "trainer": {"tolerations": [{"key": GPU, "operator": "Exists"}], "gpus": 4},
                "inference": {"tolerations": [{"key": GPU, "value": "present"}], "gpus": 4},
            },
            [node("a", taints=[TAINT], **GPU_NODE), node("b")],
            [],
            Verdict.OK,
            "all 4 pods",
        ),
        (
            TRAINS_ON_GPUS,
            [node("a", taints=[TAINT], **GPU_NODE), node("b")],
            [],
            Verdict.OK,
            "all 4 pods",
        ),
        (
            {"driver": {"cpus": "9"}, "trainer": {"cpus": "9"}},
            [node("a"), node("b")],
            [],
            Verdict.FAILED,
            "a ReadWriteOnce claim puts 1 driver, 1 trainer on one node, and they ask for 18 cpu; "
            "the largest node offers 16 cpu",
        ),
        (
            {"env": {"affinity": required("disk", "In", "fast")}},
            [node("a", labels={"disk": "slow"})],
            [],
            Verdict.FAILED,
            "none of 1 ready nodes takes pods of role env",
        ),
        (
            {"env": {"affinity": required("disk", "NotIn", "fast")}},
            [node("a", labels={"disk": "slow"})],
            [],
            Verdict.OK,
            "all 4 pods",
        ),
        (
            {"env": {"nodeSelector": {"disk": "fast"}}},
            [node("a", labels={"disk": "slow"})],
            [],
            Verdict.FAILED,
            "none of 1 ready nodes takes pods of role env",
        ),
    ],
)
def test_pods_are_placed_as_a_scheduler_does(
    roles: dict[str, Any],
    nodes: list[dict[str, Any]],
    pods: list[dict[str, Any]],
    verdict: Verdict,
    words: str,
) -> None:
    finding = pods_fit(a_run(roles=roles), usable_nodes(nodes, pods))
    assert (finding.verdict, words in finding.found) == (verdict, True), finding


def test_pods_need_nodes_of_the_architecture_of_their_image() -> None:
    arm = usable_nodes([node("a", labels={"kubernetes.io/arch": "arm64"})], [])
    assert pods_fit(a_run(), arm, ["amd64"]).verdict is Verdict.FAILED
    assert pods_fit(a_run(), arm, ["amd64", "arm64"]).verdict is Verdict.OK
    assert pods_fit(a_run(), arm).verdict is Verdict.OK


def claim_of(*modes: str) -> dict[str, Any]:
    spec = {"accessModes": list(modes), "volumeName": "pv"}
    return {"kind": "PersistentVolumeClaim", "metadata": {"name": "data"}, "spec": spec}


def in_zone(name: str) -> dict[str, Any]:
    terms = required(ZONE, "In", name)["nodeAffinity"]
    affinity = {"required": terms["requiredDuringSchedulingIgnoredDuringExecution"]}
    return {"metadata": {"name": "pv"}, "spec": {"nodeAffinity": affinity}}


def storage_class(mode: str) -> dict[str, Any]:
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    return {"metadata": {"name": "disks", "annotations": default}, "volumeBindingMode": mode}


THEIRS = {"checkpoint": {"volumeClaim": {"claimName": "data"}}}


@pytest.mark.parametrize(
    ("spec", "claim", "volume", "mode", "verdict", "words"),
    [
        ({}, None, None, "WaitForFirstConsumer", Verdict.OK, ""),
        ({}, None, None, "Immediate", Verdict.WARNING, "head and trainer pods cannot run in b"),
        (THEIRS, claim_of("ReadWriteOnce"), in_zone("a"), "Immediate", Verdict.OK, ""),
        (THEIRS, claim_of("ReadWriteOnce"), in_zone("b"), "", Verdict.FAILED, "volume pv is in"),
        (THEIRS, claim_of("ReadWriteOncePod"), None, "", Verdict.FAILED, "has ReadWriteOncePod"),
    ],
)
def test_the_volume_is_where_the_head_and_trainer_pods_can_run(
    spec: dict[str, Any],
    claim: dict[str, Any] | None,
    volume: dict[str, Any] | None,
    mode: str,
    verdict: Verdict,
    words: str,
) -> None:
    nodes = [
        node("gpu", labels={ZONE: "a"}, taints=[TAINT], **GPU_NODE),
        node("cpu", labels={ZONE: "b"}),
    ]
    run = a_run(
        roles=TRAINS_ON_GPUS | {"trainer": {"gpus": 4, "nodeSelector": {ZONE: "a"}}}, **spec
    )
    finding = volume_reaches(
        run,
        usable_nodes(nodes, []),
        claim=claim,
        volume=volume,
        classes=[storage_class(mode)],
    )
    assert (finding.verdict, words in finding.found) == (verdict, True), finding


def quota(hard: dict[str, str], used: dict[str, str]) -> list[dict[str, Any]]:
    return [{"metadata": {"name": "team"}, "status": {"hard": hard, "used": used}}]


@pytest.mark.parametrize(
    ("quotas", "verdict", "words"),
    [
        ([], Verdict.OK, "none in the namespace"),
        (quota({"pods": "9", "count/secrets": "0"}, {"pods": "5"}), Verdict.OK, "1 in the"),
        (quota({"pods": "9"}, {"pods": "6"}), Verdict.WARNING, "team: 4 pods of 9, 6 used"),
        (quota({f"requests.{GPU}": "4"}, {}), Verdict.FAILED, f"8 requests.{GPU} of 4"),
        (
            quota({"limits.cpu": "99"}, {}),
            Verdict.FAILED,
            "the pods of driver, trainer, inference, env have no CPU limit",
        ),
    ],
)
def test_a_quota_allows_the_run_now_later_or_never(
    quotas: list[dict[str, Any]], verdict: Verdict, words: str
) -> None:
    finding = fits_quotas(a_run(roles=TRAINS_ON_GPUS), quotas)
    assert (finding.verdict, words in finding.found) == (verdict, True), finding


NAMES_OBJECTS: dict[str, Any] = {
    "huggingFace": {"secretName": "hub", "cacheClaimName": "models"},
    "imagePullSecrets": ["registry"],
    "priorityClassName": "high",
    "code": {"git": {"url": "git@host.example:me/mine", "secretName": "key"}},
    "checkpoint": {"volumeClaim": {"size": "1Gi", "storageClassName": "fast"}},
    "roles": {
        "env": {
            "env": [
                {"name": "A", "valueFrom": {"secretKeyRef": {"name": "api", "key": "token"}}},
                {"name": "B", "value": "plain"},
            ],
            "envFrom": [
                {"configMapRef": {"name": "settings"}},
                {"secretRef": {"name": "maybe", "optional": True}},
            ],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "items"}}],
        }
    },
}


def test_every_object_that_a_run_names_is_looked_for() -> None:
    found = {(item.kind, item.name): item for item in references(a_run(**NAMES_OBJECTS))}
    assert list(found) == [
        ("secret", "hub"),
        ("persistentvolumeclaim", "models"),
        ("secret", "registry"),
        ("priorityclass", "high"),
        ("secret", "key"),
        ("storageclass", "fast"),
        ("secret", "api"),
        ("configmap", "settings"),
        ("persistentvolumeclaim", "items"),
    ]
    assert found["secret", "key"].keys == ("ssh-privatekey", "known_hosts")
    assert found["secret", "api"].field == "spec.roles.env.env[0].valueFrom.secretKeyRef"


class Answers(Kubectl):
    """A kubectl that knows these objects, with their keys."""

    def __init__(self, **known: str) -> None:
        super().__init__()
        self._known = known
        self.denied = ""

    @override
    def run(self, *words: str, timeout: float = 60.0) -> bytes:
        _, kind, name, *_ = words
        if kind == self.denied:
            raise SourceError(f"kubectl get {kind} {name}: Forbidden")
        if name not in self._known:
            raise SourceError(f"kubectl get {kind} {name}: (NotFound): {kind} {name!r} not found")
        return self._known[name].encode()

    @override
    def json(self, *words: str) -> dict[str, Any]:
        return {"items": [node("a")] if words[0] == "nodes" else []}


def test_what_is_missing_says_who_names_it_and_how_to_create_it() -> None:
    run = a_run(huggingFace={"secretName": "hub", "cacheClaimName": "models"})
    found = objects_exist(run, Answers(hub="token "))
    assert found == {
        "secret hub": Finding(
            Verdict.FAILED,
            "it has no key HF_TOKEN (spec.huggingFace.secretName)",
            "kubectl create secret generic hub --from-literal=HF_TOKEN=...",
        ),
        "persistentvolumeclaim models": Finding(
            Verdict.FAILED,
            "it does not exist; spec.huggingFace.cacheClaimName names it",
            "create the claim, or name another one (kubectl get pvc)",
        ),
    }
    complete = Answers(hub="HF_TOKEN ", models="persistentvolumeclaim/models")
    assert {item.verdict for item in objects_exist(run, complete).values()} == {Verdict.OK}
    complete.denied = "secret"
    denied = objects_exist(run, complete)["secret hub"]
    assert (denied.verdict, "Forbidden" in denied.found) == (Verdict.NOT_CHECKED, True)


def test_a_reference_without_a_name_is_told_by_its_place() -> None:
    env = [{"name": "A", "valueFrom": {"secretKeyRef": {"key": "k"}}}]
    role = {"env": env, "envFrom": [{"secretRef": "wandb"}]}
    role["volumes"] = [{"name": "v", "mountPath": "/v", "secret": {"name": "hub"}}]
    found = objects_exist(a_run(roles={"driver": role}), Answers())
    driver = "spec.roles.driver"
    assert {name: finding.found for name, finding in found.items()} == {
        f"secret {place}": f"{place} names no secret"
        for place in (
            f"{driver}.env[0].valueFrom.secretKeyRef.name",
            f"{driver}.envFrom[0].secretRef.name",
            f"{driver}.volumes[0].secret.secretName",
        )
    }
    assert {finding.verdict for finding in found.values()} == {Verdict.FAILED}


def operator(**variables: str) -> list[dict[str, Any]]:
    env = [{"name": name, "value": value} for name, value in variables.items()]
    return [{"spec": {"template": {"spec": {"containers": [{"image": "o:1", "env": env}]}}}}]


def test_images_are_there_or_to_be_pulled_or_not_configured() -> None:
    strategy = {"actorInfer": {"strategy": {"name": "vllm"}}}
    document = tiny_document(**strategy)
    bare = operator(AGENTICRUN_WORKER_IMAGE="w:1", AGENTICRUN_WORKER_IMAGE_VLLM="")
    finding = images_are_known(parse_run(document), [], bare)
    assert (finding.verdict, finding.found) == (
        Verdict.FAILED,
        "the operator has no worker image with vllm",
    )
    document["spec"]["image"] = "mine:1"
    here = node("a")
    finding = images_are_known(parse_run(document), [here], bare)
    assert (finding.verdict, finding.found) == (
        Verdict.WARNING,
        "on no node yet: mine:1 (spec.image)",
    )
    here["status"]["images"] = [{"names": ["docker.io/library/mine:1"]}]
    assert images_are_known(parse_run(document), [here], bare).verdict is Verdict.OK


def own_env(folder: Path, **spec: Any) -> AgenticRun:
    (folder / "mine.py").write_text("class Mine: ...\n")
    document = tiny_document()
    document["spec"]["pipeline"]["envs"][0]["type"] = "mine:Mine"
    document["spec"] |= spec
    return parse_run(document)


def test_modules_of_a_run_need_a_way_into_the_pods(tmp_path: Path) -> None:
    finding = code_arrives(own_env(tmp_path), tmp_path)
    assert (finding.verdict, finding.found) == (
        Verdict.FAILED,
        "mine.py beside the run is in no pod",
    )
    by_map = own_env(tmp_path, code={"configMap": "mine"})
    assert code_arrives(by_map, tmp_path).verdict is Verdict.OK
    assert code_arrives(a_run(), tmp_path).verdict is Verdict.OK
    assert code_is_here(by_map, tmp_path).verdict is Verdict.OK
    (tmp_path / "mine.py").unlink()
    assert code_is_here(by_map, tmp_path).verdict is Verdict.FAILED


def test_everything_about_a_run_on_a_cluster_has_a_row(tmp_path: Path) -> None:
    found = run_there(a_run(imagePullSecrets=["registry"]), tmp_path, Answers())
    assert {name: item.verdict for name, item in found.items()} == {
        "pods": Verdict.OK,
        "quotas": Verdict.OK,
        "images": Verdict.OK,
        "code": Verdict.OK,
        "plan": Verdict.OK,
        "volume": Verdict.OK,
        "secret registry": Verdict.WARNING,
    }


def test_a_missing_pull_secret_is_a_warning_unless_something_needs_it() -> None:
    found = objects_exist(a_run(imagePullSecrets=["registry"]), Answers())
    assert found["secret registry"].verdict is Verdict.WARNING
    assert "docker-registry registry" in found["secret registry"].advice
    needs = {"imagePullSecrets": ["hub"], "code": {"git": {"url": "git@x:y", "secretName": "hub"}}}
    assert objects_exist(a_run(**needs), Answers())["secret hub"].verdict is Verdict.FAILED


def box(cpu: str, **fields: Any) -> dict[str, Any]:
    return {"resources": {"requests": {"cpu": cpu}}, **fields}


SIDECAR = {"restartPolicy": "Always"}


@pytest.mark.parametrize(
    ("spec", "cpus"),
    [
        ({"containers": [box("1"), box("500m"), {}]}, 1.5),
        ({"containers": [box("1")], "initContainers": [box("3")]}, 3),
        ({"containers": [box("1")], "initContainers": [box("3"), box("2")]}, 3),
        ({"containers": [box("1")], "initContainers": [box("3", **SIDECAR)]}, 4),
        (
            {"containers": [box("1")], "initContainers": [box("3", **SIDECAR), box("2")]},
            5,  # the second runs beside the sidecar
        ),
        (
            {"containers": [box("1")], "initContainers": [box("2"), box("3", **SIDECAR)]},
            4,  # the first runs before the sidecar
        ),
        ({"containers": [box("1")], "overhead": {"cpu": "250m"}}, 1.25),
        ({"containers": [{"resources": {"limits": {"cpu": "2"}}}]}, 2),
        ({"containers": [box("1")], "resources": {"requests": {"cpu": "6"}}}, 6),
    ],
)
def test_requests_of_a_pod_are_summed_by_the_rule_of_kubernetes(
    spec: dict[str, Any], cpus: float
) -> None:
    assert pod_requests(spec)["cpu"] == cpus
    (left,) = usable_nodes([node("a")], [{"spec": {"nodeName": "a", **spec}}])
    assert (left.free["cpu"], left.free["pods"]) == (16 - cpus, 109)


def test_containers_of_a_pod_template_count() -> None:
    cache = {"name": "cache", "resources": {"requests": {"memory": "63Gi"}}}
    run = a_run(roles={"env": {"podTemplate": {"spec": {"containers": [cache]}}}})
    finding = pods_fit(run, usable_nodes([node("a")], []))
    assert (finding.verdict, "role env asks for" in finding.found) == (Verdict.FAILED, True)
    more = {"name": "ray", "resources": {"requests": {"cpu": 17}}}
    run = a_run(roles={"env": {"podTemplate": {"spec": {"containers": [more]}}}})
    finding = pods_fit(run, usable_nodes([node("a")], []))
    assert "role env asks for 17 cpu" in finding.found


def a_kubectl(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a kubectl on the PATH that runs a script. Returns the file of its command lines."""
    calls = folder / "calls"
    program = folder / "kubectl"
    program.write_text(f'#!/bin/sh\necho "$*" >> {calls}\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return calls


def a_file(folder: Path, **spec: Any) -> Path:
    document = tiny_document()
    del document["metadata"]["uid"]
    document["spec"] |= spec
    file = folder / "run.yaml"
    file.write_text(json.dumps(document))
    return file


def test_each_list_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = '{"metadata": {"name": "x"}}'
    script = f"""case "$*" in
version*) echo '{{"serverVersion": {{"gitVersion": "v1.34.0"}}}}';;
*rayclusters.ray.io*) echo '{{"items": [{served}]}}';;
"get resourcequotas"*) echo Forbidden >&2; exit 1;;
*) echo '{{"items": []}}';;
esac"""
    calls = a_kubectl(tmp_path, script, monkeypatch)
    monkeypatch.setattr(machine, "_torch", lambda cards: Finding(Verdict.OK))
    done = CliRunner().invoke(app, ["doctor", "-f", str(a_file(tmp_path))])
    assert "tiny on the cluster: pods" in done.output
    lists = [line for line in calls.read_text().splitlines() if line.startswith("get ")]
    for kind in ("nodes", "pods -A", "resourcequotas", "deployments -A"):
        assert sum(line.startswith(f"get {kind}") for line in lists) == 1, lists
    assert len(lists) == len(set(lists))


def test_a_cluster_that_cannot_be_reached_is_one_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "The connection to the server 10.0.0.1:6443 was refused"
    calls = a_kubectl(tmp_path, f"echo {said} >&2; exit 1", monkeypatch)
    monkeypatch.setattr(machine, "_torch", lambda cards: Finding(Verdict.OK))
    done = CliRunner().invoke(app, ["doctor", "-f", str(a_file(tmp_path))])
    assert done.exit_code == 1, done.output
    words = " ".join(re.sub("[│┃]", " ", done.output).split())
    assert "the cluster cannot be reached: kubectl version -o json:" in words
    assert "check KUBECONFIG" in words
    assert words.endswith("to fix: the cluster: apiserver")
    assert "tiny on" not in words
    assert calls.read_text().splitlines() == ["version -o json"]


def test_a_machine_has_memory_and_gpus_or_not() -> None:
    run = a_run(roles=TRAINS_ON_GPUS)
    assert memory_suffices(run, 40 * GIB).verdict is Verdict.OK
    assert memory_suffices(run, 8 * GIB).verdict is Verdict.WARNING
    assert gpus_suffice(run, 8).verdict is Verdict.OK
    finding = gpus_suffice(run, 1)
    assert finding.verdict is Verdict.FAILED
    assert finding.advice.endswith("--set roles.inference.gpus=0 --set roles.trainer.gpus=0")


def test_a_model_is_a_folder_or_made_by_the_run(tmp_path: Path) -> None:
    assert model_is_reachable(a_run()).verdict is Verdict.OK
    stored = a_run(model={"path": str(tmp_path)}, checkpoint={"none": True})
    assert "has no config.json" in model_is_reachable(stored).found
    initialize_model(tmp_path, InitializeSpec(("a",), hidden_size=16, heads=2, layers=1))
    assert model_is_reachable(stored).verdict is Verdict.OK
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert "model.safetensors is a Git LFS pointer" in model_is_reachable(stored).found


class Hub(BaseHTTPRequestHandler):
    """Answers as huggingface.co to HEAD requests for a model's config.json."""

    def do_HEAD(self) -> None:
        status, code = {
            "/org/open/resolve/main/config.json": (200, ""),
            "/org/gated/resolve/main/config.json": (401, "GatedRepo"),
            "/org/empty/resolve/main/config.json": (404, "EntryNotFound"),
        }.get(self.path, (401, "RepoNotFound"))
        self.send_response(status)
        for name, value in (
            ("X-Error-Code", code),
            ("X-Repo-Commit", "0" * 40),
            ("ETag", '"1"'),
            ("Content-Length", "2"),
        ):
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("org/open", "org/open, on the Hub"),
        ("org/gated", "org/gated is gated"),
        ("org/empty", "org/empty on the Hub has no config.json"),
        ("org/none", "org/none is no folder, and the Hub says: 401 Client Error."),
        ("no/such/folder", "no/such/folder is no folder"),
    ],
)
def test_a_model_on_the_hub_is_asked_for_as_a_run_does(
    hub: HTTPServer, path: str, found: str
) -> None:
    finding = model_is_reachable(a_run(model={"path": path}, checkpoint={"none": True}))
    assert finding.found.startswith(found)
    assert (finding.verdict is Verdict.OK) is (path == "org/open")
    assert finding.advice or finding.verdict is Verdict.OK


@pytest.mark.usefixtures("hub")
def test_a_hub_that_does_not_answer_is_told_from_a_model_that_does_not_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        template = f"http://127.0.0.1:{closed.getsockname()[1]}/{{repo_id}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        finding = model_is_reachable(a_run(model={"path": "org/open"}, checkpoint={"none": True}))
    assert "the Hub cannot be reached: ConnectError" in finding.found


def test_the_command_ends_with_1_for_a_run_that_cannot_train_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = a_file(tmp_path, roles=TRAINS_ON_GPUS)
    monkeypatch.setattr(machine, "_torch", lambda cards: Finding(Verdict.OK))
    monkeypatch.setattr(machine, "gpus", list)
    words = ["doctor", "--local", "-f", str(file)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output
    assert "tiny on this machine: GPUs" in done.output
    on_cpus = ["--set", "roles.trainer.gpus=0", "--set", "roles.inference.gpus=0"]
    done = CliRunner().invoke(app, words + on_cpus)
    assert "tiny on this machine: GPUs" not in done.output
