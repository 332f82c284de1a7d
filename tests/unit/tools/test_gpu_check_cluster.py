"""`make gpu-check-cluster`: which objects it applies, and how it reads their end."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from typing import Any

import pytest
import yaml

import gpu_check_cluster
from agenticrun_api import parse_run
from gpu_check_cluster import ALL_REDUCE, Check, checks, main, run_check

IMAGE = "registry.example.org/agents/worker:1"


def test_each_example_runs_two_steps_with_its_own_model_and_roles() -> None:
    nccl, *runs = checks(IMAGE)
    assert nccl.document["spec"]["containers"][0]["image"] == IMAGE
    gpus = {check.name: check.gpus for check in runs}
    assert gpus == {
        "colocated": 8,
        "deepspeed-zero3": 6,
        "eight-plus-eight": 16,
        "megatron-tp2": 8,
        "one-gpu": 1,
        "two-plus-two": 4,
        "vllm": 2,
    }
    for check in runs:
        run = parse_run(check.document)
        example = yaml.safe_load(
            (gpu_check_cluster.ROOT / f"examples/gpu/{check.name}.yaml").read_text()
        )
        assert run.spec.pipeline.max_steps == gpu_check_cluster.STEPS
        assert check.document["spec"]["model"] == example["spec"]["model"]
        assert check.document["spec"]["roles"] == example["spec"]["roles"]


def test_the_program_of_the_nccl_pod_is_python() -> None:
    ast.parse(ALL_REDUCE)


class Cluster:
    """Answers like kubectl: the object has each status in turn."""

    def __init__(self, *statuses: dict[str, Any]) -> None:
        self.calls: list[str] = []
        self._statuses = list(statuses)

    def __call__(self, arguments: Sequence[str], text: str) -> str:
        self.calls.append(arguments[0])
        if arguments[0] != "get":
            return ""
        return json.dumps({"status": self._statuses.pop(0)})


A_RUN = Check("a", {"kind": "AgenticRun", "metadata": {"name": "gpu-check-a"}}, 1)


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check_cluster, "POLL_SECONDS", 0.0)


def test_a_run_is_deleted_after_it_has_succeeded() -> None:
    cluster = Cluster({}, {"phase": "Running"}, {"phase": "Succeeded"})
    assert run_check(A_RUN, cluster) == "passed"
    assert cluster.calls == ["apply", "get", "get", "get", "delete"]


def test_a_failed_run_is_reported_with_its_conditions() -> None:
    condition = {"type": "Ready", "status": "False", "reason": "EngineFailed", "message": "no nvcc"}
    cluster = Cluster({"phase": "Failed", "conditions": [condition]})
    assert run_check(A_RUN, cluster) == "failed: EngineFailed: no nvcc"


def test_a_run_that_does_not_end_is_deleted() -> None:
    cluster = Cluster()
    assert run_check(A_RUN, cluster, minutes=0) == "failed: it has not ended after 0 minutes"
    assert cluster.calls == ["apply", "delete"]


def test_what_needs_more_gpus_than_there_are_has_not_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check_cluster, "_kubectl", lambda _: None)
    monkeypatch.setattr(gpu_check_cluster, "run_check", lambda *_: "passed")
    assert main(["--image", IMAGE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "passed" not in line] == [
        "eight-plus-eight     needs 16 GPUs"
    ]


def test_a_dry_run_prints_the_manifests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--image", IMAGE, "--dry-run"]) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [each["kind"] for each in documents] == ["Pod", *["AgenticRun"] * 7]
