"""`agenticrun doctor -f run.yaml`: Kueue and the queue of a run, and whose move it is."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typing_extensions import override

from agenticrun_api import AgenticRun, parse_run
from agenticrun_workers.cli.doctor.cluster import run_there
from agenticrun_workers.cli.doctor.queue import FRAMEWORK, queue_has_quota, queue_is_open
from agenticrun_workers.cli.kubectl import Kubectl, SourceError
from agenticrun_workers.findings import Finding, Verdict
from tiny_runs import tiny_document

GPU = "nvidia.com/gpu"
QUOTA = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "1Ti", GPU: 8}


def a_run(*, queue: Any = None, **roles: Any) -> AgenticRun:
    document = tiny_document()
    document["spec"]["queue"] = queue or {"name": "research"}
    document["spec"]["checkpoint"] = {"uri": "s3://bucket/prefix"}
    document["spec"]["roles"] = {"trainer": {"gpus": 1}} | roles
    return parse_run(document)


def flavor(name: str, quota: dict[str, Any], **fields: Any) -> dict[str, Any]:
    resources = [{"name": key, "nominalQuota": value, **fields} for key, value in quota.items()]
    return {"name": name, "resources": resources}


def a_cluster_queue(*flavors: dict[str, Any], **spec: Any) -> dict[str, Any]:
    used = flavors or (flavor("a100", QUOTA),)
    covered = [item["name"] for item in used[0]["resources"]]
    groups = [{"coveredResources": covered, "flavors": list(used)}]
    fields = {"namespaceSelector": {}, "resourceGroups": groups, **spec}
    return {"metadata": {"name": "gpus"}, "spec": fields, "status": {}}


def named(*names: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"metadata": {"name": name}, **fields} for name in names]


def local_queue(**spec: Any) -> list[dict[str, Any]]:
    metadata = {"name": "research", "namespace": "team"}
    status = {"pendingWorkloads": 3}
    return [{"metadata": metadata, "spec": {"clusterQueue": "gpus", **spec}, "status": status}]


LOCAL = local_queue()
NAMESPACES = [{"metadata": {"name": "team", "labels": {"tier": "research"}}}]


def test_a_queue_that_is_open_is_shown_with_what_waits_in_it() -> None:
    found = queue_is_open(a_run(), LOCAL, [a_cluster_queue()], [], NAMESPACES)
    assert (found.verdict, found.advice) == (Verdict.OK, "")
    assert found.found == "research leads to ClusterQueue gpus; 3 wait in it"


HELD = local_queue(stopPolicy="Hold")
INACTIVE = a_cluster_queue() | {
    "status": {"conditions": [{"type": "Active", "status": "False", "message": "no flavor h100"}]}
}


@pytest.mark.parametrize(
    ("run", "local", "cluster", "words", "move"),
    [
        (a_run(), [], a_cluster_queue(), "research does not exist", "creates it"),
        (a_run(), named("other"), a_cluster_queue(), "research does not exist", "name: other"),
        (a_run(), LOCAL, None, "gpus, which does not exist", "creates it"),
        (a_run(), HELD, a_cluster_queue(), "stopPolicy Hold", "of the LocalQueue to None"),
        (a_run(), LOCAL, a_cluster_queue(stopPolicy="HoldAndDrain"), "ClusterQueue gpus", "None"),
        (
            a_run(),
            LOCAL,
            a_cluster_queue(namespaceSelector=None),
            "takes runs of no namespace",
            "sets spec.namespaceSelector",
        ),
        (
            a_run(),
            LOCAL,
            a_cluster_queue(namespaceSelector={"matchLabels": {"tier": "production"}}),
            "takes no runs of namespace team",
            "changes spec.namespaceSelector",
        ),
        (a_run(), LOCAL, INACTIVE, "no flavor h100", "kubectl describe clusterqueue gpus"),
        (
            a_run(queue={"name": "research", "priorityClass": "urgent"}),
            LOCAL,
            a_cluster_queue(),
            "WorkloadPriorityClass urgent does not exist",
            "(low)",
        ),
    ],
)
def test_a_queue_that_admits_no_run_says_whose_move_it_is(
    run: AgenticRun, local: Any, cluster: Any, words: str, move: str
) -> None:
    found = queue_is_open(run, local, [cluster] if cluster else [], named("low"), NAMESPACES)
    assert found.verdict is Verdict.FAILED
    assert words in found.found
    assert move in found.advice


@pytest.mark.parametrize(
    "selector",
    [
        {"matchLabels": {"tier": "research"}},
        {"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["production"]}]},
    ],
)
def test_a_queue_for_the_namespace_of_the_run_is_open(selector: dict[str, Any]) -> None:
    cluster = a_cluster_queue(namespaceSelector=selector)
    assert queue_is_open(a_run(), LOCAL, [cluster], [], NAMESPACES).verdict is Verdict.OK


def test_a_namespace_that_cannot_be_read_is_no_fault() -> None:
    cluster = a_cluster_queue(namespaceSelector={"matchLabels": {"tier": "production"}})
    assert queue_is_open(a_run(), LOCAL, [cluster], [], []).verdict is Verdict.OK


def quota(
    run: AgenticRun, cluster: dict[str, Any], *flavors: str, resources: Any = None
) -> Finding:
    configuration = yaml.safe_dump({"resources": resources})
    return queue_has_quota(run, LOCAL, [cluster], named(*(flavors or ("a100",))), configuration)


def test_a_run_that_fits_into_its_queue() -> None:
    assert quota(a_run(), a_cluster_queue()).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("run", "cluster", "words"),
    [
        (
            a_run(),
            a_cluster_queue(flavor("a100", {"cpu": "64", "memory": "1Ti", GPU: 8})),
            "no quota for ephemeral-storage, which driver pods ask for",
        ),
        (
            a_run(),
            a_cluster_queue(flavor("a100", {key: QUOTA[key] for key in QUOTA if key != GPU})),
            f"no quota for {GPU}, which trainer pods ask for",
        ),
        (a_run(), a_cluster_queue(flavor("h100", QUOTA)), "ResourceFlavor h100"),
        (
            a_run(trainer={"gpus": 8, "replicas": 2}),
            a_cluster_queue(),
            f"trainer pods ask for 16 {GPU}, and each flavor of ClusterQueue gpus has less",
        ),
        (
            a_run(trainer={"gpus": 8}, inference={"gpus": 1}),
            a_cluster_queue(),
            f"the run asks for 9 {GPU}, and the quota of ClusterQueue gpus has less",
        ),
    ],
)
def test_a_run_that_its_queue_can_never_admit(
    run: AgenticRun, cluster: dict[str, Any], words: str
) -> None:
    found = quota(run, cluster)
    assert found.verdict is Verdict.FAILED
    assert words in found.found
    assert found.advice


@pytest.mark.parametrize(
    ("resources", "verdict"),
    [
        ({"excludeResourcePrefixes": ["ephemeral-"]}, Verdict.OK),
        ({"excludeResourcePrefixes": ["example.com/"]}, Verdict.FAILED),
        ({"quotaCheckStrategy": "IgnoreUndeclared"}, Verdict.OK),
        ({"quotaCheckStrategy": "BlockUndeclared"}, Verdict.FAILED),
        ({"transformations": [{"input": GPU}]}, Verdict.NOT_CHECKED),
        ({"transformations": [{"input": "example.com/mig"}]}, Verdict.FAILED),
    ],
)
def test_a_resource_that_kueue_ignores_needs_no_quota(resources: Any, verdict: Verdict) -> None:
    cluster = a_cluster_queue(flavor("a100", {"cpu": "64", "memory": "1Ti", GPU: 8}))
    assert quota(a_run(), cluster, resources=resources).verdict is verdict


def test_settings_that_cannot_be_read_may_ignore_a_resource() -> None:
    cluster = a_cluster_queue(flavor("a100", {"cpu": "64", "memory": "1Ti", GPU: 8}))
    found = queue_has_quota(a_run(), LOCAL, [cluster], named("a100"), "")
    assert found.verdict is Verdict.FAILED
    assert "which cannot be read, ignore it" in found.advice


def test_the_pods_of_a_role_go_to_one_flavor_and_roles_to_several() -> None:
    two = a_cluster_queue(flavor("a100", QUOTA), flavor("h100", QUOTA))
    both = a_run(trainer={"gpus": 8}, inference={"gpus": 8})
    assert quota(both, two, "a100", "h100").verdict is Verdict.OK
    one = a_run(trainer={"gpus": 8, "replicas": 2})
    assert quota(one, two, "a100", "h100").verdict is Verdict.FAILED


def test_a_cohort_lends_as_much_as_the_limit_says() -> None:
    run = a_run(trainer={"gpus": 8, "replicas": 2})
    lends = a_cluster_queue(flavor("a100", QUOTA), cohortName="all")
    assert quota(run, lends).verdict is Verdict.OK
    limited = a_cluster_queue(flavor("a100", QUOTA, borrowingLimit=4), cohortName="all")
    assert quota(run, limited).verdict is Verdict.FAILED


def test_min_replicas_are_what_the_queue_must_have() -> None:
    engines = {"gpus": 1, "replicas": 16}
    assert quota(a_run(inference=engines), a_cluster_queue()).verdict is Verdict.FAILED
    fewer = a_run(inference=engines | {"minReplicas": 7})
    assert quota(fewer, a_cluster_queue()).verdict is Verdict.OK


def test_a_role_with_a_topology_needs_a_flavor_with_one() -> None:
    run = a_run(inference={"replicas": 2, "topology": {"required": "rack"}})
    found = quota(run, a_cluster_queue())
    assert found.verdict is Verdict.FAILED
    assert "for cpu has a Topology, which inference" in found.found
    racks = named("a100", spec={"topologyName": "racks"})
    for topologies in (TOPOLOGIES, None):
        found = queue_has_quota(run, LOCAL, [a_cluster_queue()], racks, "{}", topologies)
        assert found.verdict is Verdict.OK


RACKS, PLAIN = {"topologyName": "racks"}, {"nodeLabels": {"pool": "plain"}}
TOPOLOGIES = named("racks", spec={"levels": [{"nodeLabel": "block"}, {"nodeLabel": "rack"}]})


def near(kind: str, level: str, **fields: Any) -> dict[str, Any]:
    return {"replicas": 2, "topology": {kind: level}, **fields}


def with_topologies(run: AgenticRun, cluster: dict[str, Any], **flavors: Any) -> Finding:
    specs = [item for name, spec in flavors.items() for item in named(name, spec=spec)]
    return queue_has_quota(run, LOCAL, [cluster], specs, "{}", TOPOLOGIES)


def test_a_topology_of_flavors_for_other_resources_does_not_help() -> None:
    cluster = a_cluster_queue(flavor("cpus", {key: QUOTA[key] for key in QUOTA if key != GPU}))
    cards = {"coveredResources": [GPU], "flavors": [flavor("a100", {GPU: 8})]}
    cluster["spec"]["resourceGroups"].append(cards)
    found = with_topologies(a_run(env=near("required", "rack")), cluster, cpus=PLAIN, a100=RACKS)
    assert found.verdict is Verdict.FAILED
    assert "for cpu has a Topology, which env pods ask for" in found.found
    assert "spec.roles.env.topology" in found.advice


@pytest.mark.parametrize("kind", ["required", "preferred"])
@pytest.mark.parametrize("role", ["inference", "env"])
def test_each_role_needs_a_topology_with_its_level(kind: str, role: str) -> None:
    roles = {"inference": near("required", "rack"), "env": near("required", "block")}
    run = a_run(**(roles | {role: near(kind, "row")}))
    found = with_topologies(run, a_cluster_queue(), a100=RACKS)
    assert found.verdict is Verdict.FAILED
    assert f"level row, which {role} pods ask for" in found.found
    assert f"spec.roles.{role}.topology" in found.advice
    assert "block, rack" in found.advice
    found = with_topologies(a_run(**roles), a_cluster_queue(), a100=RACKS)
    assert found.verdict is Verdict.OK


def test_a_topology_that_does_not_exist_has_no_level() -> None:
    run = a_run(env=near("required", "rack"))
    found = with_topologies(run, a_cluster_queue(), a100={"topologyName": "rows"})
    assert found.verdict is Verdict.FAILED
    assert "level rack" in found.found


def test_only_flavors_with_the_level_count_for_the_quota_of_a_role() -> None:
    small = {**QUOTA, GPU: 1}
    cluster = a_cluster_queue(flavor("a100", QUOTA), flavor("h100", small))
    run = a_run(inference=near("required", "rack", gpus=1))
    found = with_topologies(run, cluster, a100=PLAIN, h100=RACKS)
    assert found.verdict is Verdict.FAILED
    assert f"inference pods ask for 2 {GPU}, and each flavor with level rack" in found.found
    assert with_topologies(run, cluster, a100=RACKS, h100=PLAIN).verdict is Verdict.OK


def test_quota_that_others_hold_is_a_warning() -> None:
    cluster = a_cluster_queue()
    held = {"name": "a100", "resources": [{"name": GPU, "total": "8"}]}
    cluster["status"] = {"flavorsReservation": [held]}
    found = quota(a_run(), cluster)
    assert found.verdict is Verdict.WARNING
    assert f"1 {GPU} needed, 0 {GPU} left" in found.found


# -- Kueue -----------------------------------------------------------------------------------------


CRD = {"spec": {"versions": [{"name": "v1beta1", "served": True}]}}
NEW_CRD = {"spec": {"versions": [*CRD["spec"]["versions"], {"name": "v1beta2", "served": True}]}}


def deployment(name: str, image: str, namespace: str, **labels: str) -> dict[str, Any]:
    pod = {"containers": [{"image": image}], "serviceAccountName": name}
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"template": {"spec": pod}},
        "status": {"availableReplicas": 1},
    }


OPERATOR = {"app.kubernetes.io/name": "agenticrun", "app.kubernetes.io/component": "operator"}


class WithKueue(Kubectl):
    """The kubectl of a user on a cluster with Kueue."""

    def __init__(self) -> None:
        super().__init__()
        self.crds = [NEW_CRD]
        self.name = "kueue-controller-manager"
        self.image = "registry.k8s.io/kueue/kueue:v0.19.2"
        self.configuration: dict[str, Any] | None = {
            "integrations": {"externalFrameworks": [FRAMEWORK]}
        }
        self.denied = "nothing"
        self.unreadable: tuple[str, ...] = ()

    @override
    def run(self, *words: str, timeout: float = 60.0) -> bytes:
        if words[0] == "auth":
            if self.denied in " ".join(words):
                raise SourceError("kubectl auth can-i list: ")
            return b"yes"
        if words[1] in self.unreadable:
            raise SourceError(f"kubectl get {words[1]}: forbidden")
        return json.dumps({"items": self._items(words[1])}).encode()

    def _items(self, kind: str) -> list[dict[str, Any]]:
        operator = deployment("agenticrun", "operator:1.0", "system", **OPERATOR)
        kueue = deployment(self.name, self.image, "kueue-system")
        viz = deployment("kueueviz", "registry.k8s.io/kueue/kueueviz-backend:v0.1.0", "viz")
        data = {"controller_manager_config.yaml": yaml.safe_dump(self.configuration)}
        found: dict[str, list[dict[str, Any]]] = {
            "crd": self.crds,
            "deployments": [operator, viz, kueue],
            "namespaces": NAMESPACES,
            "configmaps": [{"data": data}] if self.configuration else [],
            "localqueues.v1beta2.kueue.x-k8s.io": LOCAL,
            "clusterqueues.v1beta2.kueue.x-k8s.io": [a_cluster_queue()],
            "resourceflavors.v1beta2.kueue.x-k8s.io": named("a100"),
            "workloadpriorityclasses.v1beta2.kueue.x-k8s.io": [],
            "topologies.v1beta2.kueue.x-k8s.io": TOPOLOGIES,
        }
        return copy.deepcopy(found.get(kind, []))


def kueue_row(kubectl: Kubectl, folder: Path) -> Finding:
    return run_there(a_run(), folder, kubectl)["Kueue"]


def test_a_run_with_a_queue_has_a_row_for_kueue_its_queue_and_its_quota(tmp_path: Path) -> None:
    found = run_there(a_run(), tmp_path, WithKueue())
    rows = {name: found[name].verdict for name in ("Kueue", "queue", "queue quota")}
    assert set(rows.values()) == {Verdict.OK}
    assert found["Kueue"].found == "kueue-system/kueue-controller-manager v0.19.2"


@pytest.mark.parametrize(
    ("change", "words", "move"),
    [
        ({"crds": []}, "does not serve Workloads", "installs Kueue 0.15 or newer"),
        ({"crds": [CRD]}, "v1beta1, and not v1beta2", "upgrades Kueue"),
        ({"image": "registry.k8s.io/kueue/kueue:v0.14.0"}, "v0.14.0", "0.15 or newer"),
        (
            {"configuration": {"integrations": {"frameworks": ["ray.io/raycluster"]}}},
            "may queue their RayClusters",
            FRAMEWORK,
        ),
        ({"denied": "list agenticruns"}, "may not read AgenticRuns", "docs/queues.md"),
        ({"denied": "update workloads"}, "may not update workloads", "kueue.enabled=true"),
        ({"denied": "get resourceflavors"}, "may not get resourceflavors", "kueue.enabled=true"),
    ],
)
def test_what_an_administrator_must_set_in_kueue(
    change: dict[str, Any], words: str, move: str, tmp_path: Path
) -> None:
    kubectl = WithKueue()
    for name, value in change.items():
        setattr(kubectl, name, value)
    found = kueue_row(kubectl, tmp_path)
    assert found.verdict is Verdict.FAILED
    assert words in found.found
    assert move in found.advice


@pytest.mark.parametrize(
    "configuration", [{"integrations": {}}, {"integrations": {"frameworks": ["batch/job"]}}]
)
def test_a_kueue_that_queues_no_rayclusters_need_not_know_runs(
    configuration: dict[str, Any], tmp_path: Path
) -> None:
    kubectl = WithKueue()
    kubectl.configuration = configuration
    assert kueue_row(kubectl, tmp_path).verdict is Verdict.OK


@pytest.mark.parametrize(
    "image",
    [
        "registry.k8s.io/kueue/kueue:v0.19.2",
        "mirror.example/kueue@sha256:" + 64 * "0",
        "mirror.example/kueue",
    ],
)
def test_a_kueue_of_any_name_is_found_by_its_image(image: str, tmp_path: Path) -> None:
    kubectl = WithKueue()
    kubectl.name, kubectl.image = "queues", image
    assert "queues" in kueue_row(kubectl, tmp_path).found


def test_a_user_who_sees_only_the_queues_gets_rows_for_them(tmp_path: Path) -> None:
    kubectl = WithKueue()
    kubectl.unreadable = ("deployments", "configmaps", "namespaces")
    found = run_there(a_run(), tmp_path, kubectl)
    assert found["Kueue"].verdict is Verdict.NOT_CHECKED
    assert found["queue"].verdict is found["queue quota"].verdict is Verdict.OK


class WithTopology(WithKueue):
    @override
    def _items(self, kind: str) -> list[dict[str, Any]]:
        racks = named("a100", spec=RACKS)
        return racks if kind.startswith("resourceflavors") else super()._items(kind)


def test_levels_are_compared_if_topologies_can_be_read(tmp_path: Path) -> None:
    run, kubectl = a_run(env=near("required", "row")), WithTopology()
    assert run_there(run, tmp_path, kubectl)["queue quota"].verdict is Verdict.FAILED
    kubectl.unreadable = ("topologies.v1beta2.kueue.x-k8s.io",)
    assert run_there(run, tmp_path, kubectl)["queue quota"].verdict is Verdict.OK


def test_settings_of_kueue_that_cannot_be_read_are_no_fault(tmp_path: Path) -> None:
    kubectl = WithKueue()
    kubectl.configuration = None
    found = kueue_row(kubectl, tmp_path)
    assert found.verdict is Verdict.OK
    assert "cannot be read" in found.found
