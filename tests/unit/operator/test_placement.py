"""Where the pods of a run may go: volumes of one node, special nodes, architectures."""

from __future__ import annotations

from typing import Any

import pytest

from agenticrun_api import AgenticRun, Role, parse_run
from agenticrun_operator.resources import Manifest, WorkerImages, ray_cluster
from gpu_examples import FILES, read
from runs import Change, run_with
from scheduler import Machine, pods_of, schedule

IMAGES = WorkerImages("worker:1", {"sglang": "worker-sglang:1", "vllm": "worker-vllm:1"})
GPU = "nvidia.com/gpu"
RWX: Change = ("spec.checkpoint.volumeClaim", {"size": "1Gi", "accessMode": "ReadWriteMany"})


def a_run(*changes: Change) -> AgenticRun:
    document = run_with(*changes, name="lake")
    document["metadata"] |= {"uid": "1234-uid", "namespace": "team"}
    return parse_run(document)


def cluster_of(
    *changes: Change, images: WorkerImages = IMAGES, claim: Manifest | None = None
) -> Manifest:
    return ray_cluster(a_run(*changes), images, "tokens", claim)


def pods_by_role(cluster: Manifest) -> dict[str, Manifest]:
    return {pod["metadata"]["labels"]["agenticrun.dev/role"]: pod for pod in pods_of(cluster)}


def cpu_node(name: str, cpus: float = 16, **more: Any) -> Machine:
    return Machine(name, {"cpu": cpus, "memory": 64 * 2**30}, **more)


def gpu_node(name: str, gpus: float = 8, taint: str | None = GPU, **more: Any) -> Machine:
    taints = [{"key": taint, "value": "present", "effect": "NoSchedule"}] if taint else []
    free = {"cpu": 64.0, "memory": 512 * 2**30, GPU: gpus}
    return Machine(name, free, taints=taints, **more)


def example(stem: str) -> Manifest:
    (file,) = [file for file in FILES if file.stem == stem]
    document = read(file)
    document["metadata"]["uid"] = "1234-uid"
    return ray_cluster(parse_run(document), IMAGES, "tokens")


@pytest.mark.parametrize("stem", ["one-gpu", "vllm", "colocated"])
@pytest.mark.parametrize("taint", [GPU, None])
def test_gpu_examples_start_beside_cpu_nodes_whether_or_not_the_gpu_pool_is_tainted(
    stem: str, taint: str | None
) -> None:
    nodes = [*(cpu_node(f"cpu-{n}") for n in range(8)), gpu_node("gpu-0", taint=taint)]
    placed = schedule(pods_of(example(stem)), nodes)
    assert all(node for nodes_of_role in placed.values() for node in nodes_of_role), placed
    assert placed["driver"] == placed["trainer"] == ["gpu-0"]


def test_the_head_goes_to_the_node_that_has_room_for_the_trainer() -> None:
    nodes = [gpu_node("full", gpus=0), gpu_node("free", gpus=1), cpu_node("cpu")]
    placed = schedule(pods_of(example("one-gpu")), nodes)
    assert placed["driver"] == placed["trainer"] == ["free"]


def test_a_pod_that_comes_back_goes_to_the_node_of_the_others() -> None:
    for lost in ("driver", "trainer"):
        nodes = [gpu_node("gpu-0"), gpu_node("gpu-1"), cpu_node("cpu")]
        by_role = pods_by_role(example("one-gpu"))
        nodes[1].pods = [pod for role, pod in by_role.items() if role not in (lost, "env")]
        assert schedule([by_role[lost]], nodes) == {lost: ["gpu-1"]}


def test_pods_that_save_to_a_volume_of_one_node_share_it() -> None:
    trainers: Change = ("spec.roles.trainer.replicas", 3)
    nodes = [cpu_node("a"), cpu_node("b"), cpu_node("c")]
    placed = schedule(pods_of(cluster_of(trainers)), nodes)
    assert placed["driver"] != [""]
    assert len({*placed["driver"], *placed["trainer"]}) == 1


def test_pods_that_save_elsewhere_may_go_anywhere() -> None:
    for change in (RWX, ("spec.checkpoint.none", True), ("spec.checkpoint.uri", "s3://a/b")):
        for pod in pods_of(cluster_of(change)):
            assert "affinity" not in pod["spec"]


def test_only_pods_that_save_are_bound() -> None:
    by_role = pods_by_role(cluster_of())
    assert {role for role, pod in by_role.items() if "affinity" in pod["spec"]} == {
        "driver",
        "trainer",
    }


def test_the_users_affinity_to_pods_wins_and_one_to_nodes_is_added() -> None:
    nodes: Manifest = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}
    choices: tuple[Manifest, ...] = ({"nodeAffinity": nodes}, {"podAffinity": {}})
    for theirs in choices:
        pod = pods_by_role(cluster_of(("spec.roles.trainer.affinity", theirs)))["trainer"]
        assert pod["spec"]["affinity"].items() >= theirs.items()
        assert "podAffinity" in pod["spec"]["affinity"]


@pytest.mark.parametrize("where", ["spec.roles.trainer", "spec.roles.trainer.podTemplate.spec"])
def test_the_head_gets_what_lets_the_trainer_onto_its_nodes_and_its_own_wins(where: str) -> None:
    pool = {"key": "pool", "value": "rl", "effect": "NoSchedule"}
    own = {"key": "other", "operator": "Exists"}
    changes: tuple[Change, ...] = (
        (f"{where}.nodeSelector", {"pool": "rl", "kubernetes.io/arch": "arm64"}),
        (f"{where}.tolerations", [pool]),
        ("spec.roles.driver.nodeSelector", {"disk": "ssd"}),
        ("spec.roles.driver.tolerations", [own]),
    )
    head = pods_by_role(cluster_of(*changes))["driver"]["spec"]
    assert head["nodeSelector"] == {"pool": "rl", "kubernetes.io/arch": "arm64", "disk": "ssd"}
    assert head["tolerations"] == [pool, own]
    apart = pods_by_role(cluster_of(*changes, RWX))["driver"]["spec"]
    assert apart["nodeSelector"] == {"disk": "ssd", "kubernetes.io/arch": "amd64"}
    assert apart["tolerations"] == [own]


def test_pods_with_gpus_tolerate_a_taint_that_is_named_after_them() -> None:
    gpus = {"gpus": 1, "gpuResourceName": "amd.com/gpu"}
    by_role = pods_by_role(cluster_of(("spec.roles.inference", gpus)))
    expected = [{"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert by_role["inference"]["spec"]["tolerations"] == expected
    assert "tolerations" not in by_role["env"]["spec"]


def claim_with(*modes: str) -> Manifest:
    return {"kind": "PersistentVolumeClaim", "spec": {"accessModes": list(modes)}}


def test_a_claim_of_the_users_binds_pods_if_it_is_of_one_node() -> None:
    theirs: Change = ("spec.checkpoint.volumeClaim", {"claimName": "data"})
    for claim, bound in (
        (claim_with("ReadWriteOnce"), True),
        (claim_with("ReadWriteOnce", "ReadWriteMany"), False),
        (None, False),
    ):
        pod = pods_by_role(cluster_of(theirs, claim=claim))["trainer"]
        assert ("affinity" in pod["spec"]) is bound


def test_pods_go_to_nodes_of_the_architecture_of_their_image() -> None:
    arm, amd = {"kubernetes.io/arch": "arm64"}, {"kubernetes.io/arch": "amd64"}
    assert all(pod["spec"]["nodeSelector"] == amd for pod in pods_of(cluster_of()))
    chosen = cluster_of(("spec.roles.env.nodeSelector", arm))
    assert pods_by_role(chosen)["env"]["spec"]["nodeSelector"] == arm
    any_node = cluster_of(RWX, images=WorkerImages("w", {}, ()))
    assert all("nodeSelector" not in pod["spec"] for pod in pods_of(any_node))
    both = cluster_of(RWX, images=WorkerImages("w", {}, ("amd64", "arm64")))
    for pod in pods_of(both):
        (term,) = pod["spec"]["affinity"]["nodeAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]["nodeSelectorTerms"]
        (expression,) = term["matchExpressions"]
        assert (expression["key"], expression["values"]) == (*arm, ["amd64", "arm64"])


@pytest.mark.parametrize("where", ["affinity", "podTemplate.spec.affinity"])
def test_an_architecture_in_the_users_affinity_wins(where: str) -> None:
    expression = {"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]}
    nodes = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": nodes}}
    by_role = pods_by_role(cluster_of((f"spec.roles.trainer.{where}", affinity)))
    assert "nodeSelector" not in by_role["trainer"]["spec"]
    assert "nodeSelector" not in by_role["driver"]["spec"], "it shares the trainer's node"
    assert by_role["env"]["spec"]["nodeSelector"] == {"kubernetes.io/arch": "amd64"}


def test_autoscalers_leave_pods_that_save_where_they_are_unless_the_user_says_otherwise() -> None:
    evict = "cluster-autoscaler.kubernetes.io/safe-to-evict"
    by_role = pods_by_role(cluster_of(("spec.annotations", {evict: "true"})))
    saving = {
        role
        for role, pod in by_role.items()
        if pod["metadata"]["annotations"].get("karpenter.sh/do-not-disrupt") == "true"
    }
    assert saving == {Role.DRIVER.value, Role.TRAINER.value}
    assert all(pod["metadata"]["annotations"][evict] == "true" for pod in by_role.values())
    head = pods_by_role(cluster_of())["driver"]
    assert head["metadata"]["annotations"][evict] == "false"


QUOTA = ("cpu", "memory", "ephemeral-storage")
"""Kinds of resources that a quota may demand from every container, of requests and of limits."""


@pytest.mark.parametrize("where", ["resources", "podTemplate"])
def test_every_container_has_every_resource_that_a_quota_demands(where: str) -> None:
    given = {"limits": {"cpu": "8", "memory": "8Gi", "ephemeral-storage": "20Gi"}}
    given["requests"] = given["limits"]
    containers = {"spec": {"containers": [{"name": "ray", "resources": given}]}}
    changes: list[Change] = [("spec.code", {"git": {"url": "https://a/b"}, "pip": {
        "requirements": ["x"]}})]  # fmt: skip
    for role in ("driver", "trainer", "inference", "env"):
        changes.append(
            (f"spec.roles.{role}", {"gpus": 1} | (
                {"resources": given} if where == "resources" else {"podTemplate": containers}))
        )  # fmt: skip
    seen = set()
    for pod in pods_of(cluster_of(*changes)):
        for container in [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]:
            seen.add(container["name"])
            for kind in ("requests", "limits"):
                assert set(QUOTA) <= container["resources"][kind].keys(), container["name"]
            assert (GPU in container["resources"]["limits"]) is (container["name"] == "ray")
    assert seen == {"ray", "reporter", "fetch-code", "install-packages"}
