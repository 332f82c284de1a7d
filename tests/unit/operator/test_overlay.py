"""podTemplate: what it changes in the pods, and what it cannot change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_api import AgenticRun, Role, parse_run
from agenticrun_api.pods import MERGE_KEYS, merged
from agenticrun_operator.resources import Manifest, WorkerImages, images_in, ray_cluster
from runs import run_with

WORKER = WorkerImages("worker:1")

scalars = st.integers(0, 3) | st.sampled_from(["a", "b"]) | st.booleans()
names = st.sampled_from(["x", "y", "containers", "volumes", "tolerations", "env"])


def lists(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists as pods have them: items of one list have different merge keys."""
    items = st.dictionaries(st.sampled_from(["image", "value"]), values, max_size=2)
    keys = st.lists(st.sampled_from(["ray", "side", "other"]), unique=True, max_size=3)
    return keys.flatmap(
        lambda found: st.tuples(*(items for _ in found)).map(
            lambda rest: [{**item, "name": key} for key, item in zip(found, rest, strict=True)]
        )
    )


pods = st.recursive(
    st.dictionaries(names.filter(lambda name: name in ("x", "y")), scalars, max_size=2),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "x": inner,
            "y": scalars,
            "containers": lists(inner),
            "volumes": lists(inner),
            "tolerations": st.lists(inner, max_size=2),
        },
    ),
    max_leaves=8,
)


@given(pods)
def test_an_empty_overlay_changes_nothing_and_any_overlay_fills_an_empty_pod(pod: Manifest) -> None:
    assert merged(pod, {}) == pod
    assert merged({}, pod) == pod


@given(pods, pods)
def test_merging_again_changes_nothing_more(pod: Manifest, overlay: Manifest) -> None:
    once = merged(pod, overlay)
    assert merged(once, overlay) == once


@given(pods, pods)
def test_the_merge_leaves_its_inputs_alone(pod: Manifest, overlay: Manifest) -> None:
    before = copy.deepcopy((pod, overlay))
    merged(pod, overlay)
    assert (pod, overlay) == before


@given(pods, pods)
def test_what_the_overlay_does_not_name_stays_in_its_place(
    pod: Manifest, overlay: Manifest
) -> None:
    after = merged(pod, overlay)
    for field, value in pod.items():
        if field not in overlay:
            assert after[field] == value
        elif field in MERGE_KEYS:
            ours = [item["name"] for item in value]
            assert [item["name"] for item in after[field]][: len(ours)] == ours


@pytest.mark.parametrize(
    ("base", "overlay", "expected"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}, {"a": {"b": 3, "c": 2}}),
        (
            {"volumes": [{"name": "work", "emptyDir": {}}]},
            {"volumes": [{"name": "work", "hostPath": {"path": "/nvme"}}]},
            {"volumes": [{"name": "work", "hostPath": {"path": "/nvme"}}]},
        ),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": []}, {"tolerations": []}),
        (
            {"containers": [{"name": "ray", "volumeMounts": [{"mountPath": "/a", "name": "a"}]}]},
            {"containers": [{"name": "ray", "volumeMounts": [{"mountPath": "/b", "name": "b"}]}]},
            {
                "containers": [
                    {
                        "name": "ray",
                        "volumeMounts": [
                            {"mountPath": "/a", "name": "a"},
                            {"mountPath": "/b", "name": "b"},
                        ],
                    }
                ]
            },
        ),
    ],
)
def test_lists_with_a_merge_key_are_merged_and_others_replaced(
    base: Manifest, overlay: Manifest, expected: Manifest
) -> None:
    assert merged(base, overlay) == expected


@pytest.mark.parametrize("name", [{"x": None}, ["x"]])
def test_items_whose_names_are_no_text_are_left_to_the_apiserver(name: Any) -> None:
    odd = {"name": name, "value": "b"}
    assert merged({"env": [{"name": "A"}]}, {"env": [odd]}) == {"env": [{"name": "A"}, odd]}
    env = template(Role.TRAINER, ("spec.roles.trainer.env", [odd]))["spec"]["containers"][0]["env"]
    assert odd in env


def a_run(*changes: tuple[str, Any]) -> AgenticRun:
    document = run_with(*changes, name="lake")
    document["metadata"] |= {"uid": "1234-uid", "namespace": "team"}
    return parse_run(document)


def template(role: Role, *changes: tuple[str, Any]) -> Manifest:
    """The pod template of a role."""
    spec = ray_cluster(a_run(*changes), WORKER, "tokens")["spec"]
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    found: Manifest = (groups | {"driver": spec["headGroupSpec"]})[role.value]["template"]
    return found


TRAINER = "spec.roles.trainer"


def test_a_role_has_its_own_fields_of_a_pod() -> None:
    spec = {
        "serviceAccountName": "training",
        "schedulerName": "volcano",
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "securityContext": {"supplementalGroups": [44]},
        "topologySpreadConstraints": [{"topologyKey": "rack", "maxSkew": 1}],
        "initContainers": [{"name": "warm", "image": "busybox"}],
        "containers": [
            {"name": "ray", "resources": {"limits": {"rdma/hca": 1}}},
            {"name": "side", "image": "busybox"},
        ],
    }
    pod = template(Role.TRAINER, (f"{TRAINER}.podTemplate.spec", spec))["spec"]
    plain = template(Role.TRAINER)["spec"]
    for field in ("serviceAccountName", "schedulerName", "hostNetwork", "initContainers"):
        assert pod[field] == spec[field]
    assert pod["securityContext"] == plain["securityContext"] | {"supplementalGroups": [44]}
    ray, side = pod["containers"]
    assert ray["resources"]["limits"] == {"memory": "2Gi", "rdma/hca": 1}
    assert ray["readinessProbe"] == plain["containers"][0]["readinessProbe"]
    assert side["name"] == "side"
    assert pod["automountServiceAccountToken"] is False, "cloud identities need no such token"
    assert template(Role.ENV, (f"{TRAINER}.podTemplate.spec", spec)) == template(Role.ENV)


def test_a_token_is_mounted_only_for_a_service_account_that_the_user_names() -> None:
    spec = {"serviceAccountName": "training", "automountServiceAccountToken": True}
    pod = template(Role.TRAINER, (f"{TRAINER}.podTemplate.spec", spec))["spec"]
    assert pod["automountServiceAccountToken"] is True


def test_the_reporter_keeps_its_place_beside_other_init_containers() -> None:
    spec = {"initContainers": [{"name": "warm", "image": "busybox"}]}
    pod = template(Role.DRIVER, ("spec.roles.driver.podTemplate.spec", spec))["spec"]
    assert [container["name"] for container in pod["initContainers"]] == ["reporter", "warm"]


def test_labels_and_annotations_are_added_and_ours_win() -> None:
    changes = (
        ("spec.labels", {"team": "lake", "cost": "1"}),
        ("spec.annotations", {"note": "all"}),
        (f"{TRAINER}.podTemplate.metadata", {"labels": {"cost": "2"}, "annotations": {"a": "b"}}),
    )
    metadata = template(Role.TRAINER, *changes)["metadata"]
    ours = template(Role.TRAINER)["metadata"]["labels"]
    assert metadata["labels"] == ours | {"team": "lake", "cost": "2"}
    theirs = {"note": "all", "a": "b"}
    assert metadata["annotations"] == template(Role.TRAINER)["metadata"]["annotations"] | theirs
    cluster = ray_cluster(a_run(*changes), WORKER, "tokens")["metadata"]
    assert cluster["labels"].items() >= {"team": "lake", "agenticrun.dev/run": "lake"}.items()
    assert cluster["annotations"] == {"note": "all"}


def test_a_role_can_have_an_image_of_its_own() -> None:
    run = a_run(("spec.image", "mine:1"), (f"{TRAINER}.image", "trainer:1"))
    assert images_in(ray_cluster(run, WORKER, "tokens")) == {
        "driver": "mine:1",
        "trainer": "trainer:1",
        "inference": "mine:1",
        "env": "mine:1",
    }
    engine = ("spec.pipeline.actorInfer.strategy", {"name": "sglang"})
    assert WORKER.missing_engine(a_run(engine)) == "sglang"
    assert WORKER.missing_engine(a_run(engine, ("spec.roles.inference.image", "sglang:1"))) is None


@pytest.mark.parametrize(
    ("trainer", "requests", "limits", "ray_cpus"),
    [
        (
            {"resources": {"requests": {"cpu": "2500m"}, "limits": {"rdma/hca": "1"}}},
            {"cpu": "2500m", "memory": "2Gi"},
            {"memory": "2Gi", "rdma/hca": "1"},
            "3",
        ),
        (
            {"cpus": 4, "gpus": 1, "resources": {"limits": {"memory": "9Gi"}}},
            {"cpu": "4", "nvidia.com/gpu": 1},
            {"nvidia.com/gpu": 1, "memory": "9Gi"},
            "4",
        ),
        (
            {"resources": {"requests": {"ephemeral-storage": "10Gi", "memory": "1Gi"}}},
            {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "10Gi"},
            {},
            "1",
        ),
    ],
)
def test_resources_in_the_long_form_stand_beside_the_short_fields(
    trainer: dict[str, Any], requests: Manifest, limits: Manifest, ray_cpus: str
) -> None:
    (container,) = template(Role.TRAINER, (TRAINER, trainer))["spec"]["containers"]
    assert container["resources"] == {"requests": requests, "limits": limits}
    cluster = ray_cluster(a_run((TRAINER, trainer)), WORKER, "tokens")
    params = cluster["spec"]["workerGroupSpecs"][0]["rayStartParams"]
    assert params["num-cpus"] == ray_cpus


@pytest.mark.parametrize(
    "items",
    [[{"value": "x"}], ["A=b"], [{"name": None}], [None]],
    ids=["no key", "text", "null key", "null"],
)
def test_an_item_without_its_key_is_left_for_the_apiserver_to_refuse(items: list[Any]) -> None:
    ours = [{"name": "A", "value": "a"}]
    assert merged({"env": ours}, {"env": items}) == {"env": [*ours, *items]}
    assert merged({"env": items}, {"env": ours}) == {"env": [*items, *ours]}
