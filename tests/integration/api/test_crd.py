"""The CRD on an apiserver that enforces it.

Rules, defaults, immutable fields, columns, kubectl explain.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from agenticrun_api import AgenticRunStatus, InvalidRun, parse_run
from runs import MINIMAL, RULE_CASES, Change, RuleCase, run_with
from testcluster import DETACHED_GROUP, ROOT, Cluster, CommandFailed
from waiting import eventually

P = "spec.pipeline"
DETACHED = f"agenticruns.{DETACHED_GROUP}"


def dry_run(api: Cluster, document: dict[str, Any]) -> dict[str, Any]:
    """Return the object that the apiserver would store. Creates nothing.

    Raises:
        CommandFailed: The apiserver refused it.
    """
    stored: dict[str, Any] = json.loads(
        api.apply(document, options=("--dry-run=server", "-o", "json"))
    )
    return stored


@pytest.mark.parametrize("case", RULE_CASES, ids=lambda case: case.id)
def test_the_rule_in_cel_refuses_what_the_rule_in_python_refuses(
    api: Cluster, case: RuleCase
) -> None:
    with pytest.raises(CommandFailed) as caught:
        dry_run(api, run_with(*case.refused))
    assert f"{case.path}: " in caught.value.stderr
    assert case.message in caught.value.stderr


@pytest.mark.parametrize("case", RULE_CASES, ids=lambda case: case.id)
def test_the_rule_in_cel_accepts_what_the_rule_in_python_accepts(
    api: Cluster, case: RuleCase
) -> None:
    dry_run(api, run_with(*case.accepted))


@pytest.mark.parametrize(
    ("path", "bad", "good"),
    [
        (f"{P}.actorTrain.training.learningRate", 0, 1e-9),
        (f"{P}.actorInfer.generating.temperature", 0, 10),
        (f"{P}.actorInfer.validationGenerating.temperature", -0.1, 0),
        (f"{P}.maxSteps", 0, 10_000_000),
        (f"{P}.seed", 2**31, 2**31 - 1),
        ("spec.roles.env.replicas", 0, 1),
        ("spec.roles.env.cpus", "much", "250m"),
        ("spec.roles.env.memory", "2GB", "1Gi"),
        ("spec.model.initialize.layers", 0, 1),
        ("spec.failurePolicy.maxRestarts", -1, 0),
        ("spec.imagePullPolicy", "Sometimes", "Never"),
        ("spec.failurePolicy.holdSeconds", 9, 10),
        (
            "spec.network",
            {"allowFrom": [{"cidr": "10.0.0.0/33"}]},
            {"allowFrom": [{"cidr": "::/0"}]},
        ),
        (
            "spec.network",
            {"egress": [{"role": "env", "to": [{"namespace": "a", "ports": [0]}]}]},
            {"egress": [{"role": "env", "to": [{"namespace": "a", "ports": [1]}]}]},
        ),
    ],
)
def test_bounds_hold_on_both_sides_and_in_both_places(
    api: Cluster, path: str, bad: Any, good: Any
) -> None:
    with pytest.raises(CommandFailed, match=path.replace(".", r"\.")):
        dry_run(api, run_with((path, bad)))
    with pytest.raises(InvalidRun, match=path.replace(".", r"\.")):
        parse_run(run_with((path, bad)))
    dry_run(api, run_with((path, good)))
    parse_run(run_with((path, good)))


def test_stored_defaults_are_the_models_defaults(api: Cluster) -> None:
    stored = dry_run(api, MINIMAL)
    assert parse_run(stored).spec == parse_run(MINIMAL).spec
    expected = parse_run(MINIMAL).spec.to_dict()
    del expected["roles"][
        "inference"
    ]  # only Disaggregated runs have such pods, which no default of a schema can say
    assert stored["spec"] == expected


EXAMPLES = sorted(
    path
    for pattern in ("*.yaml", "algorithms/*.yaml", "gpu/*.yaml")
    for path in (ROOT / "examples").glob(pattern)
)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_accepted_as_it_is(api: Cluster, example: Path) -> None:
    for document in yaml.safe_load_all(example.read_text()):
        dry_run(api, document)


def test_the_autoscaler_of_the_examples_finds_what_it_scales(api: Cluster) -> None:
    autoscaler = yaml.safe_load((ROOT / "examples/autoscaling/hpa.yaml").read_text())
    spec = dry_run(api, autoscaler)["spec"]
    run = yaml.safe_load((ROOT / "examples/frozen-lake.yaml").read_text())
    names = {"apiVersion": run["apiVersion"], "kind": run["kind"], "name": run["metadata"]["name"]}
    assert spec["scaleTargetRef"] == names
    served = json.loads(api.kubectl("get", "--raw", f"/apis/{run['apiVersion']}"))["resources"]
    kinds = {item["name"]: item["kind"] for item in served}
    assert kinds["agenticruns/scale"] == "Scale"


@pytest.mark.parametrize("example", ["opposites", "own-algorithm"])
def test_an_example_with_code_of_its_own_is_applied_in_one_command(
    api: Cluster, example: str
) -> None:
    out = api.kubectl(
        "apply", "-k", str(ROOT / "examples" / example), "--dry-run=server", "-o", "json"
    )
    code, run = json.loads(out)["items"]
    assert (code["kind"], code["metadata"]["name"], list(code["data"])) == (
        "ConfigMap",
        run["spec"]["code"]["configMap"],
        [f"{example.replace('-', '_')}.py"],
    )


@pytest.fixture
def stored(detached: Cluster) -> Iterator[Cluster]:
    """A run that exists and that no operator acts on. Its name is `minimal`."""
    detached.apply({**MINIMAL, "apiVersion": f"{DETACHED_GROUP}/v1alpha1"})
    yield detached
    detached.kubectl("delete", DETACHED, "minimal")


def _change(stored: Cluster, *changes: Change) -> str:
    return stored.apply({**run_with(*changes), "apiVersion": f"{DETACHED_GROUP}/v1alpha1"})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (("spec.model", {"path": "org/model"}), "spec.model"),
        (("spec.roles.env.cpus", "2"), "spec.roles.env"),
        ((f"{P}.sequenceLength", 512), f"{P}.sequenceLength"),
        ((f"{P}.warmup", {"steps": 5}), f"{P}.warmup"),
        ((f"{P}.guards.maxSkippedSteps", 3), f"{P}.guards.maxSkippedSteps"),
        ((f"{P}.trainEnvs.groups", 1), f"{P}.trainEnvs"),
        (("spec.image", "other:1"), "spec.image"),
        (("spec.labels", {"team": "lake"}), "spec.labels"),
        (("spec.priorityClassName", "low"), "spec.priorityClassName"),
        (("spec.imagePullSecrets", ["mine"]), "spec.imagePullSecrets"),
        (("spec.code", {"configMap": "mine"}), "spec.code"),
        (("spec.huggingFace", {"offline": True}), "spec.huggingFace"),
        (("spec.queue", {"name": "research"}), "spec.queue"),
        (("spec.checkpoint", {"uri": "/data"}), "spec.checkpoint"),
        (("spec.tracking.tensorboard", False), "spec.tracking"),
        (("spec.scheduling", {"gang": True}), "spec.scheduling"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_would_change_the_pods_or_the_training_cannot_change(
    stored: Cluster, change: Change, field: str
) -> None:
    with pytest.raises(CommandFailed) as caught:
        _change(stored, change)
    assert f"{field}: " in caught.value.stderr
    assert "apply it again with checkpoint.resume: FromPreviousRun" in caught.value.stderr


def test_what_the_operator_reads_and_what_a_driver_takes_over_can_change(stored: Cluster) -> None:
    said = _change(
        stored,
        (f"{P}.maxSteps", 300),
        (f"{P}.saveSteps", 0),
        (f"{P}.guards", {"maxLogprobGap": 0.5, "action": "Fail"}),
        ("spec.ttlSecondsAfterFinished", 60),
        ("spec.failurePolicy.maxRestarts", 7),
        ("spec.cleanup.onFailure", "Keep"),
        ("spec.network", {"allowFrom": [{"namespace": "tools"}]}),
        ("metadata.labels", {"team": "lake"}),
    )
    assert "configured" in said


def test_replicas_of_env_and_inference_can_change_and_nothing_else_of_the_roles(
    stored: Cluster,
) -> None:
    for number in (2, 3, 1):
        assert "configured" in _change(stored, ("spec.roles.env.replicas", number))
    for field, value in (
        ("env.cpus", "2"),
        ("env.nodeSelector", {"pool": "cpu"}),
        ("env.podTemplate", {"spec": {"hostNetwork": True}}),
        ("inference", {"replicas": 2}),
        ("trainer.replicas", 2),
        ("driver.memory", "4Gi"),
        ("critic", {}),
    ):
        role = field.split(".")[0]
        with pytest.raises(CommandFailed, match=rf"spec\.roles\.{role}: .*change once"):
            _change(stored, (f"spec.roles.{field}", value))


def test_kubectl_scale_changes_the_number_of_env_pods(stored: Cluster) -> None:
    _patch_status(stored, STATUS | {"envReplicas": 1, "envSelector": "agenticrun.dev/role=env"})
    assert "scaled" in stored.kubectl("scale", DETACHED, "minimal", "--replicas=4")
    plural, group = DETACHED.split(".", 1)
    path = f"/apis/{group}/v1alpha1/namespaces/{stored.namespace}/{plural}/minimal/scale"
    scale = json.loads(stored.kubectl("get", "--raw", path))
    assert scale["spec"] == {"replicas": 4}
    assert scale["status"] == {"replicas": 1, "selector": "agenticrun.dev/role=env"}


def test_a_run_can_be_suspended_and_resumed_again_and_again(stored: Cluster) -> None:
    for suspend in (True, False, True):
        assert "configured" in _change(stored, ("spec.suspend", suspend))
    patched = stored.kubectl(
        "patch", DETACHED, "minimal", "--type=merge", "-p", '{"spec":{"suspend":false}}'
    )
    assert "patched" in patched


STATUS = {
    "phase": "Running",
    "observedGeneration": 1,
    "step": 120,
    "maxSteps": 1000,
    "progress": "120/1000",
    "reward": "0.53",
    "tokensPerSecond": "1.2k",
    "staleness": "0.5",
    "eta": "12m",
    "lastStepTime": "2026-01-01T00:00:00Z",
    "restarts": 2,
    "message": "training",
    "conditions": [
        {
            "type": "Training",
            "status": "True",
            "reason": "DriverRunning",
            "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
            "observedGeneration": 1,
        }
    ],
    "metrics": [{"name": "val/Lake/success", "value": "0.61"}],
    "roles": [{"name": "env", "desired": 1, "ready": 1, "gpus": 0, "message": ""}],
    "rayCluster": {"name": "minimal"},
    "job": {
        "attempt": 3,
        "submissionId": "minimal-1-3",
        "incarnation": "uid/0",
        "status": "RUNNING",
    },
    "checkpoint": {"step": 100, "uri": "/checkpoints/x", "time": "2026-01-01T00:00:00Z"},
}


def _patch_status(stored: Cluster, status: dict[str, Any]) -> None:
    stored.kubectl(
        "patch",
        DETACHED,
        "minimal",
        "--subresource=status",
        "--type=merge",
        "-p",
        json.dumps({"status": status}),
    )


def test_the_columns_show_the_status(stored: Cluster) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=100)
    _patch_status(stored, STATUS | {"lastStepTime": long_ago.strftime("%Y-%m-%dT%H:%M:%SZ")})
    header, row = stored.kubectl("get", DETACHED).splitlines()
    assert header.split() == [
        "NAME",
        "PHASE",
        "STEP",
        "REWARD",
        "TOK/S",
        "STALENESS",
        "LAST-STEP",
        "RESTARTS",
        "AGE",
    ]
    cells = row.split()
    assert cells[:6] == ["minimal", "Running", "120/1000", "0.53", "1.2k", "0.5"]
    assert cells[6] in ("99d", "100d"), "a date is shown as an age"
    assert cells[7] == "2"


def test_wide_columns_add_model_algorithm_eta_and_message(stored: Cluster) -> None:
    _patch_status(stored, STATUS)
    header, row = stored.kubectl("get", DETACHED, "-o", "wide").splitlines()
    assert header.split()[9:] == ["QUEUE", "MODEL", "ALGORITHM", "ETA", "MESSAGE"]
    assert row.split()[-3:] == ["grpo", "12m", "training"]


def test_a_stored_status_is_the_status_that_was_written(stored: Cluster) -> None:
    _patch_status(stored, STATUS)
    found = stored.get(DETACHED, "minimal")
    assert found is not None
    assert (
        AgenticRunStatus.model_validate(found["status"]).to_dict()
        == AgenticRunStatus.model_validate(STATUS).to_dict()
    )


def test_a_write_of_the_spec_does_not_touch_the_status(stored: Cluster) -> None:
    _patch_status(stored, STATUS)
    _change(stored, ("spec.ttlSecondsAfterFinished", 60))
    found = stored.get(DETACHED, "minimal")
    assert found is not None
    assert found["status"]["progress"] == "120/1000"


def _refused(cluster: Cluster, document: dict[str, Any]) -> bool:
    try:
        cluster.apply(document, options=("--dry-run=server",))
    except CommandFailed:
        return True
    return False


def _without_added_rules(node: Any) -> Any:
    """Return the schema as of a version that accepted duplicates."""
    if isinstance(node, list):
        return [_without_added_rules(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: [rule for rule in value if "messageExpression" not in rule]
        if key == "x-kubernetes-validations"
        else _without_added_rules(value)
        for key, value in node.items()
    }


def test_a_run_with_duplicates_of_an_earlier_version_can_still_be_written(
    detached: Cluster, detached_definition: dict[str, Any]
) -> None:
    twice = (
        (f"{P}.envs", [{"tag": "Lake", "type": name} for name in ("frozen_lake", "sokoban")]),
        (f"{P}.trainEnvs.tags", ["Lake", "Lake"]),
        (f"{P}.rewards", [{"name": "judge", "type": "m:f"}, {"name": "judge", "type": "m:g"}]),
    )
    run = {**run_with(*twice, name="twice"), "apiVersion": f"{DETACHED_GROUP}/v1alpha1"}
    options = ("--server-side", "--force-conflicts")

    detached.apply(_without_added_rules(detached_definition), options=options)
    try:
        eventually(lambda: not _refused(detached, run), 60, "duplicates are accepted", interval=0.5)
        detached.apply(run)
    finally:
        detached.apply(detached_definition, options=options)
    other = {**run, "metadata": {"name": "other"}}
    eventually(lambda: _refused(detached, other), 60, "duplicates are refused", interval=0.5)
    for patch in (
        ("--subresource=status", "-p", json.dumps({"status": {"step": 7}})),
        ("-p", json.dumps({"spec": {"ttlSecondsAfterFinished": 60}})),
    ):
        detached.kubectl("patch", DETACHED, "twice", "--type=merge", *patch)
    found = detached.get(DETACHED, "twice")
    assert found is not None
    assert found["status"]["step"] == 7
    detached.kubectl("delete", DETACHED, "twice")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("agenticrun.spec.pipeline.rolloutBatchSize", "Trajectories of one training step"),
        (
            "agenticrun.spec.pipeline.trainEnvs.groupSize",
            "Episodes in a group, all of the same level.",
        ),
        ("agenticrun.spec.roles.trainer.gpus", "one rank per GPU"),
        ("agenticrun.status.reward", "Mean score"),
    ],
)
def test_kubectl_explain_knows_the_fields(api: Cluster, path: str, says: str) -> None:
    assert says in " ".join(api.kubectl("explain", path).split())
