"""Memory and shared memory follow from the size of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agenticrun_workers.convert import convert
from agenticrun_workers.convert.converter import Composition
from agenticrun_workers.convert.resources import parameters


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.5e9),
        ("Qwen/Qwen3-30B-A3B", 30e9),
        ("Qwen/Qwen3-1.7B-Base", 1.7e9),
        ("HuggingFaceTB/SmolLM2-135M", 135e6),
        ("/data/models/qwen3-8b/", 8e9),
        ("/data/3B-models/ours", None),
        ("/models/ours", None),
        (None, None),
    ],
)
def test_the_size_is_in_the_name(name: str | None, count: float | None) -> None:
    assert parameters(name) == count


def test_the_size_of_a_folder_is_that_of_its_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 600)
    assert parameters(str(tmp_path)) == 300
    index = {"metadata": {"total_size": 4000}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert parameters(str(tmp_path)) == 2000


def pods(model: str, **changes: Any) -> dict[str, Any]:
    config = {
        "custom_envs": {},
        "pretrain": model,
        "actor_train": {"device_mapping": "list(range(0, 8))"},
        "actor_infer": {"device_mapping": "list(range(8, 16))"},
        **changes,
    }
    roles: dict[str, Any] = convert(Composition(config, frozenset()), "x").document["spec"]["roles"]
    return roles


def gib(pod: dict[str, Any], key: str) -> int:
    return int(pod[key].removesuffix("Gi"))


@pytest.mark.parametrize("billions", [0.5, 7, 32])
def test_shared_memory_holds_twice_the_weights_and_counts_as_memory(billions: float) -> None:
    weights = 2 * billions * 1e9 / 2**30
    for role, pod in pods(f"Qwen/Qwen2.5-{billions}B").items():
        if role in ("trainer", "inference"):
            assert 2 * weights < gib(pod, "shmSize") < 2 * weights + 3
            assert gib(pod, "memory") > gib(pod, "shmSize") + 8  # and a process for each GPU


def test_a_pod_holds_the_copy_for_checkpoints_and_with_deepspeed_loads_whole_models() -> None:
    model, whole = "Qwen/Qwen2.5-7B", 4 * 7e9 / 2**30
    deepspeed = {
        "device_mapping": "list(range(0, 8))",
        "strategy_args": {"strategy_name": "deepspeed_train", "strategy_config": {}},
    }
    trainer, loads_whole = (
        pods(model, **changes)["trainer"] for changes in ({}, {"actor_train": deepspeed})
    )
    copied = gib(trainer, "memory") - gib(trainer, "shmSize") - 8 * 4
    assert 3 * whole <= copied < 3 * whole + 1
    assert gib(loads_whole, "memory") > 8 * whole + gib(loads_whole, "shmSize")


def test_state_in_host_memory_counts() -> None:
    offloaded = {
        "device_mapping": "[0]",
        "strategy_args": {
            "strategy_name": "fsdp2_train",
            "strategy_config": {"offload_policy": True},
        },
    }
    state = 16 * 7e9 / 2**30
    one = {"device_mapping": "[0]"}
    on_gpu = gib(pods("x-7B", actor_train=one)["trainer"], "memory")
    assert gib(pods("x-7B", actor_train=offloaded)["trainer"], "memory") > on_gpu + state - 1
    colocated = pods("x-7B", actor_train=one, actor_infer=one)
    assert gib(colocated["trainer"], "memory") > on_gpu + state - 1


def test_a_claim_holds_the_checkpoints_that_are_kept() -> None:
    kept = {"max_steps": 100, "save_steps": 10, "max_ckpt_to_keep": 2}
    config = {"custom_envs": {}, "pretrain": "x-7B", **kept}
    claim = convert(Composition(config, frozenset()), "x").document["spec"]["checkpoint"]
    assert gib(claim["volumeClaim"], "size") >= 12 * 7e9 * 3 / 2**30
