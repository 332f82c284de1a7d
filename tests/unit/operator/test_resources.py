"""What the children of a run look like."""

from __future__ import annotations

import hmac
import json
import subprocess
from base64 import b64decode, urlsafe_b64encode
from hashlib import sha256
from typing import Any

import pytest
import yaml

from agenticrun_api import AgenticRun, Role, parse_run
from agenticrun_api.load import parse_mounted
from agenticrun_api.quantities import whole_number
from agenticrun_api.spec import CodeSpec
from agenticrun_api.version import __version__
from agenticrun_api.yaml_text import read_yaml
from agenticrun_operator.resources import (
    Child,
    Manifest,
    OperatorKey,
    WorkerImages,
    desired_children,
    images_in,
    key_id_of,
    mounted_names,
    ray_cluster,
    tokens_name,
    tokens_secret,
)
from runs import run_with

WORKER = WorkerImages("worker:1", {"sglang": "worker-sglang:1"})
TOKENS = "lake-tokens"
KEY = OperatorKey("k" * 32)
GPU_RUN: tuple[tuple[str, object], ...] = (
    (
        "spec.roles.trainer",
        {"replicas": 2, "gpus": 4, "cpus": "1500m", "memory": "8Gi", "shmSize": "2Gi"},
    ),
    (
        "spec.roles.inference",
        {"gpus": 1, "gpuResourceName": "example.com/gpu", "nodeSelector": {"type": "gpu"}},
    ),
    ("spec.checkpoint", {"volumeClaim": {"size": "1Gi", "accessMode": "ReadWriteMany"}}),
    ("spec.code", {"configMap": "my-envs"}),
    ("spec.roles.reference", {"gpus": 1}),
    ("spec.roles.critic", {"gpus": 1, "replicas": 2}),
    ("spec.pipeline.algorithm", {"name": "gae", "lossKl": {}}),
    ("spec.pipeline.critic", {}),
)


def a_run(*changes: tuple[str, Any]) -> AgenticRun:
    document = run_with(*changes, name="lake")
    document["metadata"] |= {"uid": "1234-uid", "namespace": "team"}
    return parse_run(document)


@pytest.fixture
def cluster() -> Manifest:
    return ray_cluster(a_run(*GPU_RUN), WORKER, TOKENS)


def pod_of(cluster: Manifest, role: Role) -> Manifest:
    spec = cluster["spec"]
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]} | {
        "driver": spec["headGroupSpec"]
    }
    pod: Manifest = groups[role.value]["template"]["spec"]
    return pod


def mounts(container: Manifest) -> dict[str, str]:
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


def test_every_child_carries_the_runs_label_and_all_but_a_retained_claim_are_owned() -> None:
    unowned = []
    for child in desired_children(a_run(*GPU_RUN), WORKER, TOKENS):
        assert child["metadata"]["labels"]["agenticrun.dev/run-uid"] == "1234-uid"
        if "ownerReferences" not in child["metadata"]:
            unowned.append(child["kind"])
            continue
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (
            "1234-uid",
            True,
            True,
        )
        assert child["metadata"]["labels"]["agenticrun.dev/run"] == "lake"
        assert child["metadata"]["namespace"] == "team"
    assert unowned == ["PersistentVolumeClaim"]


def test_the_run_config_is_the_run_without_its_status() -> None:
    (config, *_) = desired_children(a_run(), WORKER, TOKENS)
    document = yaml.safe_load(config["data"]["run.yaml"])
    assert document["metadata"] == {
        "name": "lake",
        "namespace": "team",
        "uid": "1234-uid",
        "generation": 1,
        "annotations": {"agenticrun.dev/version": __version__},
    }
    assert "status" not in document
    mounted = parse_mounted(document).spec
    assert mounted.model_copy(update={"checkpoint": None}) == a_run().spec
    assert mounted.checkpoint is not None, "the driver need not know the default"
    assert mounted.checkpoint.volume_claim is not None


def test_texts_that_look_like_numbers_reach_the_driver_as_texts() -> None:
    variable = {"name": "SIZE", "value": "1e9"}
    run = a_run(("spec.roles.env.env", [variable]))
    (config, *_) = desired_children(run, WORKER, TOKENS)
    document = read_yaml(config["data"]["run.yaml"])
    assert parse_mounted(document).spec.roles.env.env == [variable]


def test_a_claim_is_made_for_a_size_and_not_for_a_claim_of_the_users() -> None:
    kinds = [child["kind"] for child in desired_children(a_run(*GPU_RUN), WORKER, TOKENS)]
    assert kinds == ["ConfigMap", "PersistentVolumeClaim", "RayCluster"]
    theirs = a_run(("spec.checkpoint", {"volumeClaim": {"claimName": "data"}}))
    assert [child["kind"] for child in desired_children(theirs, WORKER, TOKENS)] == [
        "ConfigMap",
        "RayCluster",
    ]
    volumes = {
        item["name"]: item
        for item in pod_of(ray_cluster(theirs, WORKER, TOKENS), Role.TRAINER)["volumes"]
    }
    assert volumes["checkpoints"]["persistentVolumeClaim"] == {"claimName": "data"}


def size_of_claim(*changes: tuple[str, Any]) -> int:
    (claim,) = [
        child
        for child in desired_children(a_run(*changes), WORKER, TOKENS)
        if child["kind"] == "PersistentVolumeClaim"
    ]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert "storageClassName" not in claim["spec"]
    return whole_number(claim["spec"]["resources"]["requests"]["storage"])


def test_a_run_that_says_nothing_about_checkpoints_gets_a_claim_for_its_model() -> None:
    large: dict[str, Any] = {
        "hiddenSize": 2048,
        "layers": 24,
        "intermediateSize": 5632,
        "heads": 16,
    }
    parameters = 24 * (4 * 2048**2 + 3 * 2048 * 5632)
    assert size_of_claim() == 2 * 2**30
    small = size_of_claim(("spec.model.initialize", large))
    assert 3 * 12 * parameters < small < 3 * 12 * parameters * 1.1
    larger: tuple[tuple[str, Any], ...] = (
        ("spec.checkpoint.keep", 5),
        ("spec.pipeline.algorithm.lossKl", {}),
        GPU_RUN[-2],
    )
    for change in larger:
        changes = (("spec.model.initialize", large), change, GPU_RUN[-1])
        assert size_of_claim(*(changes[:2] if change is not GPU_RUN[-2] else changes)) > small


@pytest.mark.parametrize(
    "changes",
    [
        [("spec.checkpoint.none", True)],
        [("spec.checkpoint.uri", "s3://bucket/prefix")],
        [("spec.checkpoint.uri", "/data")],
        [("spec.model", {"path": "org/model"}), ("spec.checkpoint.keep", 3)],
        [
            ("spec.checkpoint.keep", 3),
            ("spec.roles.driver.volumeMounts", [{"name": "nfs", "mountPath": "/checkpoints"}]),
        ],
    ],
)
def test_a_run_that_says_where_its_checkpoints_go_gets_no_claim(
    changes: list[tuple[str, Any]],
) -> None:
    kinds = {child["kind"] for child in desired_children(a_run(*changes), WORKER, TOKENS)}
    assert "PersistentVolumeClaim" not in kinds


def test_a_role_may_have_another_priority_than_the_run() -> None:
    run = a_run(("spec.priorityClassName", "low"), ("spec.roles.trainer.priorityClassName", "high"))
    cluster = ray_cluster(run, WORKER, TOKENS)
    found = {
        role: pod_of(cluster, role)["priorityClassName"]
        for role in Role
        if run.spec.roles.has(role)
    }
    assert found == {role: "high" if role is Role.TRAINER else "low" for role in found}


def test_ray_start_parameters_pin_each_role_to_its_pods(cluster: Manifest) -> None:
    head = cluster["spec"]["headGroupSpec"]["rayStartParams"]
    everyone = [head, *(group["rayStartParams"] for group in cluster["spec"]["workerGroupSpecs"])]
    trainer = everyone[1]
    resources = [json.loads(json.loads(params["resources"])) for params in everyone]
    assert resources == [
        {"driver": 1},
        {"trainer": 4},
        {"reference": 1},
        {"critic": 1},
        {"inference": 1},
        {"env": 1},
    ]
    assert [params["num-cpus"] for params in everyone] == ["0", "2", "1", "1", "1", "1"]
    assert [params["num-gpus"] for params in everyone] == ["0", "4", "1", "1", "1", "0"]
    assert int(trainer["object-store-memory"]) < 2 * 2**30


def test_gpus_are_limits_under_their_resource_name_and_cpus_are_never_limited(
    cluster: Manifest,
) -> None:
    (trainer,) = pod_of(cluster, Role.TRAINER)["containers"]
    assert trainer["resources"] == {
        "requests": {"cpu": "1500m", "memory": "8Gi", "nvidia.com/gpu": 4},
        "limits": {"memory": "8Gi", "nvidia.com/gpu": 4},
    }
    (inference,) = pod_of(cluster, Role.INFERENCE)["containers"]
    assert inference["resources"]["limits"]["example.com/gpu"] == 1
    selector = {"kubernetes.io/arch": "amd64", "type": "gpu"}
    assert pod_of(cluster, Role.INFERENCE)["nodeSelector"] == selector


def test_replicas_cannot_be_scaled_by_anyone_else(cluster: Manifest) -> None:
    (trainer, *_) = cluster["spec"]["workerGroupSpecs"]
    assert (trainer["replicas"], trainer["minReplicas"], trainer["maxReplicas"]) == (2, 2, 2)


def test_reference_and_critic_have_pods_only_where_the_run_gives_them_a_role(
    cluster: Manifest,
) -> None:
    named = [group["groupName"] for group in cluster["spec"]["workerGroupSpecs"]]
    assert named == ["trainer", "reference", "critic", "inference", "env"]
    plain = ray_cluster(a_run(("spec.pipeline.algorithm", {"lossKl": {}})), WORKER, TOKENS)
    assert [group["groupName"] for group in plain["spec"]["workerGroupSpecs"]] == [
        "trainer",
        "inference",
        "env",
    ]


@pytest.mark.parametrize(
    ("ip", "every_address"),
    [("10.1.2.3", "0.0.0.0"), ("fd00:10::7", "::"), ("", "0.0.0.0")],
)
def test_the_head_serves_the_job_api_on_every_address_of_its_family(
    ip: str, every_address: str, cluster: Manifest
) -> None:
    (head,) = pod_of(cluster, Role.DRIVER)["containers"]
    (variable,) = [item for item in head["env"] if item["name"] == "AGENTICRUN_POD_IP"]
    assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    given = cluster["spec"]["headGroupSpec"]["rayStartParams"]["dashboard-host"]
    # KubeRay pastes parameters into a line for bash.
    line = ["bash", "-c", "--", f"echo ray start --head  --dashboard-host={given}  --block"]
    told = subprocess.run(
        line, env={"AGENTICRUN_POD_IP": ip}, capture_output=True, check=True, text=True
    )
    assert told.stdout.split()[3] == f"--dashboard-host={every_address}"


def test_the_head_runs_no_autoscaler(cluster: Manifest) -> None:
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["no-monitor"] == "true"


def test_all_head_ports_are_named(cluster: Manifest) -> None:
    (head,) = pod_of(cluster, Role.DRIVER)["containers"]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert ports == {
        "gcs-server": 6379,
        "dashboard": 8265,
        "client": 10001,
        "metrics": 8080,
        "reporter": 8787,
    }


def test_only_the_head_sees_the_run_and_the_reporters_token(cluster: Manifest) -> None:
    for role in Role:
        names = {volume["name"] for volume in pod_of(cluster, role)["volumes"]}
        assert ({"run", "reporter-token"} <= names) is (role is Role.DRIVER)
        assert ("checkpoints" in names) is (
            role in (Role.DRIVER, Role.TRAINER, Role.REFERENCE, Role.CRITIC)
        )
        assert {"work", "shared-memory", "code"} <= names


def test_the_reporter_is_a_native_sidecar_that_shares_the_drivers_work_folder(
    cluster: Manifest,
) -> None:
    pod = pod_of(cluster, Role.DRIVER)
    (reporter,) = pod["initContainers"]
    assert reporter["restartPolicy"] == "Always"
    assert mounts(reporter) == {
        "work": "/var/lib/agenticrun",
        "run": "/etc/agenticrun/run",
        "reporter-token": "/etc/agenticrun/reporter",
    }
    assert mounts(reporter).items() <= mounts(pod["containers"][0]).items()


def test_head_and_savers_let_the_driver_save_before_they_go_and_others_go_at_once(
    cluster: Manifest,
) -> None:
    for role in Role:
        pod = pod_of(cluster, role)
        saves = role in (Role.DRIVER, Role.TRAINER, Role.REFERENCE, Role.CRITIC)
        assert pod["terminationGracePeriodSeconds"] == (62 if saves else 30)
        hook = pod["containers"][0].get("lifecycle")
        command = ["python", "-m", "agenticrun_workers.reporting.leave", "60"]
        assert hook == ({"preStop": {"exec": {"command": command}}} if saves else None)
    (reporter,) = pod_of(cluster, Role.DRIVER)["initContainers"]
    assert reporter["env"] == [
        {
            "name": "RAY_AUTH_TOKEN",
            "valueFrom": {"secretKeyRef": {"name": TOKENS, "key": "auth_token"}},
        },
        {
            "name": "AGENTICRUN_POD_UID",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}},
        },
        {"name": "AGENTICRUN_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]


@pytest.mark.parametrize(
    ("changes", "grace"),
    [
        ((), 61),
        ((("spec.model", {"initialize": {"hiddenSize": 1024, "layers": 24}}),), 93),
        ((("spec.model", {"initialize": {"hiddenSize": 8192, "layers": 128}}),), 1800),
        ((("spec.checkpoint", {"none": True}),), 30),
        ((("spec.model", {"path": "Qwen/Qwen3-8B"}), ("spec.checkpoint.uri", "s3://b/runs")), 600),
    ],
)
def test_the_grace_period_is_enough_to_save_a_checkpoint(changes: Any, grace: int) -> None:
    cluster = ray_cluster(a_run(*changes), WORKER, TOKENS)
    for role, seconds in ((Role.DRIVER, grace), (Role.TRAINER, grace), (Role.ENV, 30)):
        assert pod_of(cluster, role)["terminationGracePeriodSeconds"] == seconds


@pytest.mark.parametrize(
    ("given", "overlay", "grace", "waits"),
    [(5, {}, 5, "3"), (0, {}, 0, "1"), (5, {"terminationGracePeriodSeconds": 90}, 90, "88")],
)
def test_the_users_grace_period_wins_and_the_hook_ends_within_it(
    given: int, overlay: dict[str, Any], grace: int, waits: str
) -> None:
    driver = {"terminationGracePeriodSeconds": given, "podTemplate": {"spec": overlay}}
    pod = pod_of(ray_cluster(a_run(("spec.roles.driver", driver)), WORKER, TOKENS), Role.DRIVER)
    assert pod["terminationGracePeriodSeconds"] == grace
    assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1] == waits


@pytest.mark.parametrize("handler", [{"exec": {"command": ["my-hook"]}}, {"sleep": {"seconds": 5}}])
def test_the_users_hook_replaces_ours(handler: dict[str, Any]) -> None:
    hook = {"preStop": handler}
    overlay = {"spec": {"containers": [{"name": "ray", "lifecycle": hook}]}}
    run = a_run(("spec.roles.trainer", {"podTemplate": overlay}))
    pod = pod_of(ray_cluster(run, WORKER, TOKENS), Role.TRAINER)
    assert pod["containers"][0]["lifecycle"] == hook


def test_every_pod_meets_the_restricted_standard_and_holds_no_credentials(
    cluster: Manifest,
) -> None:
    for role in Role:
        pod = pod_of(cluster, role)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_the_users_code_is_on_the_path_and_the_users_environment_wins() -> None:
    env = [{"name": "RAY_USAGE_STATS_ENABLED", "value": "1"}, {"name": "MINE", "value": "x"}]
    cluster = ray_cluster(
        a_run(("spec.code", {"configMap": "my-envs"}), ("spec.roles.env", {"env": env})),
        WORKER,
        TOKENS,
    )
    (container,) = pod_of(cluster, Role.ENV)["containers"]
    values = [(item["name"], item.get("value")) for item in container["env"]]
    assert len(dict(values)) == len(values)
    assert dict(values)["PYTHONPATH"] == "/etc/agenticrun/code"
    assert (dict(values)["RAY_USAGE_STATS_ENABLED"], dict(values)["MINE"]) == ("1", "x")
    assert dict(values)["MALLOC_ARENA_MAX"] == "2"


HUB = ("spec.huggingFace", {"secretName": "hf", "cacheClaimName": "models", "offline": True})


def test_every_pod_has_the_token_and_the_cache_of_the_hub(cluster: Manifest) -> None:
    with_hub = ray_cluster(a_run(*GPU_RUN, HUB), WORKER, TOKENS)
    for role in Role:
        pod = pod_of(with_hub, role)
        environment = {item["name"]: item for item in pod["containers"][0]["env"]}
        reference = {"secretKeyRef": {"name": "hf", "key": "HF_TOKEN"}}
        assert environment["HF_TOKEN"] == {"name": "HF_TOKEN", "valueFrom": reference}
        assert environment["HF_HUB_OFFLINE"]["value"] == "1"
        assert mounts(pod["containers"][0])["huggingface"] == environment["HF_HUB_CACHE"]["value"]
        claim = {"persistentVolumeClaim": {"claimName": "models"}}
        assert {"name": "huggingface", **claim} in pod["volumes"]
        assert "HF_" not in str(pod_of(cluster, role))


def test_a_role_may_have_another_token_than_the_run() -> None:
    env = [{"name": "HF_TOKEN", "value": "mine"}]
    cluster = ray_cluster(a_run(HUB, ("spec.roles.env", {"env": env})), WORKER, TOKENS)
    (container,) = pod_of(cluster, Role.ENV)["containers"]
    assert [item for item in container["env"] if item["name"] == "HF_TOKEN"] == env


GIT = {
    "url": "https://host.example/mine",
    "ref": "v1",
    "path": "src/envs",
    "secretName": "token",
}
PIP = {"requirements": ["emoji==2.15.0"], "secretName": "index", "cacheClaimName": "uv"}
CODE_CASES: dict[str, tuple[dict[str, Any], str, dict[str, list[str]]]] = {
    "a ConfigMap": ({"configMap": "mine"}, "/etc/agenticrun/code", {}),
    "Git": (
        {"git": GIT},
        "/etc/agenticrun/code/src/envs",
        {"fetch-code": ["code", "git-secret"]},
    ),
    "an image": (
        {"image": {"reference": "mine:1"}},
        "/etc/agenticrun/code",
        {"fetch-code": ["code"]},
    ),
    "packages alone": (
        {"pip": {"requirements": ["emoji"]}},
        "/etc/agenticrun/packages",
        {"install-packages": ["packages"]},
    ),
    "a ConfigMap and packages": (
        {"configMap": "mine", "pip": {"requirementsFile": "requirements.txt"}},
        "/etc/agenticrun/code:/etc/agenticrun/packages",
        {"install-packages": ["packages", "code"]},
    ),
    "Git and packages from a cache": (
        {"git": {"url": "git@host:mine"}, "pip": PIP},
        "/etc/agenticrun/code:/etc/agenticrun/packages",
        {"fetch-code": ["code"], "install-packages": ["packages", "code", "package-cache"]},
    ),
}
"""spec.code, PYTHONPATH, and the volumes that each init container mounts."""


@pytest.mark.parametrize(("code", "path", "containers"), CODE_CASES.values(), ids=CODE_CASES)
def test_code_is_brought_into_every_pod(
    code: dict[str, Any], path: str, containers: dict[str, list[str]]
) -> None:
    cluster = ray_cluster(a_run(("spec.code", code)), WORKER, TOKENS)
    for role in (Role.DRIVER, Role.TRAINER, Role.INFERENCE, Role.ENV):
        pod = pod_of(cluster, role)
        found = {item["name"]: list(mounts(item)) for item in pod.get("initContainers", [])}
        if role is Role.DRIVER:
            assert list(found)[-1] == "reporter", "it needs no code, and may hold memory"
            del found["reporter"]
        assert found == containers
        (ray,) = pod["containers"]
        environment = {item["name"]: item.get("value") for item in ray["env"]}
        assert environment["PYTHONPATH"] == path
        read_only = {mount["name"] for mount in ray["volumeMounts"] if mount.get("readOnly")}
        brought = {"code": set(code) != {"pip"}, "packages": "pip" in code}
        assert read_only - {"run", "reporter-token"} == {name for name in brought if brought[name]}
        assert not {"git-secret", "package-cache"} & set(mounts(ray))
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {name for names in containers.values() for name in names} <= volumes


def init_containers(code: dict[str, Any], *more: tuple[str, Any]) -> dict[str, Manifest]:
    """Return the init containers of the env pods of a run with this code, by name."""
    pod = pod_of(ray_cluster(a_run(("spec.code", code), *more), WORKER, TOKENS), Role.ENV)
    return {container["name"]: container for container in pod["initContainers"]}


def test_containers_that_bring_code_are_restricted_and_hold_no_gpu() -> None:
    env = {"gpus": 2, "cpus": "3", "memory": "5Gi"}
    for code in ({"git": GIT, "pip": PIP}, {"image": {"reference": "mine:1"}}):
        for container in init_containers(code, ("spec.roles.env", env)).values():
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
                "readOnlyRootFilesystem": True,
            }
            assert container["resources"] == {
                "requests": {"cpu": "3", "memory": "5Gi"},
                "limits": {"memory": "5Gi"},
            }
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_containers_that_bring_code_have_the_image_and_the_environment_of_the_role() -> None:
    env = {
        "image": "mine:2",
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy"}],
        "envFrom": [{"configMapRef": {"name": "site"}}],
        "volumeMounts": [{"name": "certificates", "mountPath": "/certificates"}],
        "volumes": [{"name": "certificates", "configMap": {"name": "certificates"}}],
    }
    found = init_containers({"git": GIT, "pip": PIP}, ("spec.roles.env", env))
    for container in found.values():
        assert container["image"] == "mine:2"
        assert container["env"][0] == env["env"][0]
        assert container["envFrom"][0] == env["envFrom"][0]
        assert container["volumeMounts"][-1] == env["volumeMounts"][0]
        (variable,) = container["env"][1:]
        assert variable["name"] == "AGENTICRUN_CODE"
        assert CodeSpec.model_validate_json(variable["value"]) == CodeSpec(git=GIT, pip=PIP)
    assert found["fetch-code"]["command"] == ["python", "-m", "agenticrun_workers.code.git"]
    install = found["install-packages"]
    assert install["command"] == ["python", "-m", "agenticrun_workers.code.packages"]
    assert install["envFrom"][1:] == [{"secretRef": {"name": "index"}}]
    assert len(found["fetch-code"]["envFrom"]) == 1


def test_a_missing_secret_of_git_does_not_keep_the_pod_from_saying_so() -> None:
    pod = pod_of(ray_cluster(a_run(("spec.code", {"git": GIT})), WORKER, TOKENS), Role.ENV)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["git-secret"]["secret"] == {
        "secretName": "token",
        "defaultMode": 0o440,
        "optional": True,
    }


@pytest.mark.parametrize(
    ("path", "copied"), [("/code", "/code/."), ("/", "/."), ("/a/b/", "/a/b/.")]
)
def test_an_image_is_copied_by_its_own_program(path: str, copied: str) -> None:
    container = init_containers({"image": {"reference": "mine:1", "path": path}})["fetch-code"]
    assert container["image"] == "mine:1"
    assert container["command"] == ["cp", "-R", "-f", copied, "/etc/agenticrun/code"]


def test_an_image_of_the_runs_own_goes_before_the_operators() -> None:
    (container,) = pod_of(ray_cluster(a_run(("spec.image", "mine:2")), WORKER, TOKENS), Role.ENV)[
        "containers"
    ]
    assert container["image"] == "mine:2"


SGLANG = ("spec.pipeline.actorInfer.strategy", {"name": "sglang", "config": {"tp_size": 2}})


def test_only_the_pods_that_carry_engines_get_the_engines_image() -> None:
    assert images_in(ray_cluster(a_run(SGLANG), WORKER, TOKENS)) == {
        "driver": "worker:1",
        "trainer": "worker:1",
        "inference": "worker-sglang:1",
        "env": "worker:1",
    }
    colocated = ray_cluster(a_run(SGLANG, ("spec.placement", "Colocated")), WORKER, TOKENS)
    assert images_in(colocated) == {
        "driver": "worker:1",
        "trainer": "worker-sglang:1",
        "env": "worker:1",
    }
    assert set(
        images_in(ray_cluster(a_run(SGLANG, ("spec.image", "mine:2")), WORKER, TOKENS)).values()
    ) == {"mine:2"}


def test_an_inference_pod_offers_as_many_engines_as_its_gpus_are_enough_for() -> None:
    cluster = ray_cluster(a_run(SGLANG, ("spec.roles.inference", {"gpus": 8})), WORKER, TOKENS)
    (inference,) = [
        group for group in cluster["spec"]["workerGroupSpecs"] if group["groupName"] == "inference"
    ]
    assert json.loads(json.loads(inference["rayStartParams"]["resources"])) == {"inference": 4}
    assert inference["rayStartParams"]["num-gpus"] == "8"


def test_colocated_trainer_pods_offer_both_roles() -> None:
    run = a_run(
        SGLANG,
        ("spec.placement", "Colocated"),
        ("spec.roles.trainer", {"gpus": 8, "replicas": 2}),
        ("spec.checkpoint.none", True),
    )
    groups = {
        group["groupName"]: group
        for group in ray_cluster(run, WORKER, TOKENS)["spec"]["workerGroupSpecs"]
    }
    assert set(groups) == {"trainer", "env"}
    assert json.loads(json.loads(groups["trainer"]["rayStartParams"]["resources"])) == {
        "trainer": 8,
        "inference": 4,
    }


def decoded(secret: Manifest) -> dict[str, str]:
    return {key: b64decode(value).decode() for key, value in secret["data"].items()}


def test_tokens_follow_from_key_purpose_and_run_and_from_nothing_else() -> None:
    secret = tokens_secret(a_run(), KEY)
    expected = {
        key: urlsafe_b64encode(
            hmac.new(b"k" * 32, f"{purpose}/1234-uid".encode(), "sha256").digest()
        )
        .decode()
        .rstrip("=")
        for key, purpose in (("auth_token", "ray"), ("token", "reporter"))
    }
    assert decoded(secret) == expected
    assert tokens_secret(a_run(), OperatorKey("k" * 32)) == secret
    other_run = a_run()
    other_run = other_run.model_copy(
        update={"metadata": other_run.metadata.model_copy(update={"uid": "5678-uid"})}
    )
    others = [tokens_secret(other_run, KEY), tokens_secret(a_run(), OperatorKey("j" * 32))]
    for other in others:
        assert not set(decoded(other).values()) & set(expected.values())
        assert other["metadata"]["name"] != secret["metadata"]["name"]


def test_the_secret_is_immutable_and_named_after_the_run_its_uid_and_the_key() -> None:
    secret = tokens_secret(a_run(), KEY)
    assert (secret["immutable"], secret["type"]) == (True, "Opaque")
    digest = sha256(b"k" * 32).hexdigest()
    assert secret["metadata"]["name"] == f"lake-tokens-1234-uid-{digest[:8]}"


def test_the_raycluster_tells_which_key_its_tokens_are_from() -> None:
    run = a_run()
    assert key_id_of(run, ray_cluster(run, WORKER, tokens_name(run, KEY.id))) == KEY.id
    assert key_id_of(run, ray_cluster(run, WORKER, "lake-ray-token")) is None


def test_the_key_does_not_show_when_it_is_printed() -> None:
    assert "kkk" not in repr(KEY)


def test_only_the_head_mounts_the_reporters_token_and_no_file_holds_rays() -> None:
    cluster = ray_cluster(a_run(*GPU_RUN), WORKER, TOKENS)
    assert cluster["spec"]["authOptions"]["secretName"] == TOKENS
    pods = {role: json.dumps(pod_of(cluster, role)) for role in Role}
    assert {role for role, pod in pods.items() if TOKENS in pod} == {Role.DRIVER}
    (volume,) = [
        item for item in pod_of(cluster, Role.DRIVER)["volumes"] if item["name"] == "reporter-token"
    ]
    assert volume["secret"]["items"] == [{"key": "token", "path": "token"}]


def test_a_disruption_budget_counts_the_pods_that_save_and_is_made_only_if_asked_for() -> None:
    kinds = [child["kind"] for child in desired_children(a_run(*GPU_RUN), WORKER, TOKENS)]
    assert "PodDisruptionBudget" not in kinds
    run = a_run(*GPU_RUN, ("spec.disruptionBudget", "Block"))
    children = desired_children(run, WORKER, TOKENS)
    budget, cluster = children[-2:]
    assert [Child.of(child) for child in children[:-1]] == list(mounted_names(run))
    assert (budget["apiVersion"], budget["kind"]) == ("policy/v1", "PodDisruptionBudget")
    head: Manifest = cluster["spec"]["headGroupSpec"] | {"replicas": 1}
    groups: list[Manifest] = cluster["spec"]["workerGroupSpecs"]
    selected = budget["spec"]["selector"]["matchLabels"].items()
    covered = [
        group
        for group in (head, *groups)
        if selected <= group["template"]["metadata"]["labels"].items()
    ]
    assert [group.get("groupName") for group in covered] == [None, "trainer", "reference", "critic"]
    assert budget["spec"]["minAvailable"] == sum(group["replicas"] for group in covered) == 6
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
