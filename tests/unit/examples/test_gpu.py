"""examples/gpu say what they mean, and shrink to what a machine without GPUs can run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agenticrun_api import Role, parse_run
from agenticrun_operator.resources import WorkerImages, ray_cluster
from gpu_examples import FILES, read, without_gpus

IMAGES = WorkerImages("worker:1", {"sglang": "worker-sglang:1", "vllm": "worker-vllm:1"})
GPUS = {  # of trainers, of engines alone, engines
    "colocated": (8, 0, 4),
    "deepspeed-zero3": (4, 2, 2),
    "eight-plus-eight": (8, 8, 8),
    "megatron-tp2": (4, 4, 2),
    "one-gpu": (1, 0, 1),
    "two-plus-two": (2, 2, 2),
    "vllm": (1, 1, 1),
}


def test_there_is_a_row_for_every_example() -> None:
    assert [file.stem for file in FILES] == sorted(GPUS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_example_has_the_gpus_and_engines_that_its_comment_promises(file: Path) -> None:
    spec = parse_run(read(file)).spec
    engines_alone = (
        0
        if spec.colocated
        else spec.roles.of(Role.INFERENCE).gpus * spec.roles.replicas(Role.INFERENCE)
    )
    assert (spec.actors(Role.TRAINER), engines_alone, spec.actors(Role.INFERENCE)) == GPUS[
        file.stem
    ]
    assert f"kubectl apply -f examples/gpu/{file.name}" in file.read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_pods_request_what_the_example_says(file: Path) -> None:
    document = read(file) | {"status": {}}
    document["metadata"]["uid"] = "uid"
    run = parse_run(document)
    groups: list[dict[str, Any]] = ray_cluster(run, IMAGES, "tokens")["spec"]["workerGroupSpecs"]
    requested = {
        group["groupName"]: group["template"]["spec"]["containers"][0]["resources"]["limits"].get(
            "nvidia.com/gpu", 0
        )
        for group in groups
    }
    assert requested == {
        role.value: run.spec.roles.of(role).gpus for role in run.spec.roles.workers
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_without_gpus_it_is_still_the_same_kind_of_run(file: Path) -> None:
    run, small = parse_run(read(file)).spec, without_gpus(read(file)).spec
    assert all(small.roles.of(role).gpus == 0 for role in small.roles.workers)
    assert small.placement == run.placement
    assert small.pipeline.actor_train.strategy.name == run.pipeline.actor_train.strategy.name
    assert small.pipeline.actor_infer.strategy.name == run.pipeline.actor_infer.strategy.name
    assert small.pipeline.algorithm == run.pipeline.algorithm
    assert small.pipeline.actor_train.lora == run.pipeline.actor_train.lora
