"""Mixtures of experts of all types at tiny size: trained, exported, resumed.

Expected values are transformers' own: the gradient of its forward pass, and the weights that it
writes. With AGENTICRUN_MODEL_TYPES=all, as in `make drills`, all types; otherwise those below.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from agenticrun_workers.models.heads import UnsupportedModel
from agenticrun_workers.models.pretrained import (
    EXPERTS,
    ModelLoader,
    ModelLoadError,
    load_config,
    load_model,
)
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.fsdp2 import Fsdp2Strategy, fsdp2_policy
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from model_comparison import (
    Case,
    all_cases,
    make_without_memory,
    quiet_transformers,
    reference,
    tiny_config,
)
from model_comparison import write_random as write_files
from ragged_samples import LOSSES, batch
from slow_losses import actor_loss

SPEC = OptimizerSpec(1e-2, max_grad_norm=1e9)
LOSS = LOSSES["ppo"]
SERVED = {
    # experts in one module, with one weight for each in the files
    "deepseek_v2", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "hunyuan_v1_moe",
    "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
    "granitemoe",  # as in the files
    "ernie4_5_moe",  # routers in float32
    "gpt_oss",  # with biases, transposed
    "llama4_text",  # each expert computes all tokens
    "qwen3_next", "minimax",  # linear attention
}  # fmt: skip
SCALED = {"beam", "cohere2_moe"}
"""Types that the trainer refuses, as it refuses dense models that scale their logits."""


def accepted(case: Case) -> bool:
    """Return True for a mixture of which a tiny model can be made."""
    try:
        model = make_without_memory(tiny_config(case))
    except Exception:  # no tiny model: the page of types says why
        return False
    return any(EXPERTS.search(name) for name, _ in model.named_modules())


ALL = os.environ.get("AGENTICRUN_MODEL_TYPES") == "all"
CASES = {case.name: case for case in all_cases() if (ALL and accepted(case)) or case.name in SERVED}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with quiet_transformers():
        yield


def test_each_type_exists() -> None:
    assert {case.name for case in all_cases()} >= SERVED


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.filterwarnings("ignore")  # of transformers, about its own types
def test_a_mixture_trains_exports_and_resumes(case: Case, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    config = tiny_config(case)
    config.save_pretrained(folder)
    if case.name not in SERVED and refused(folder):
        return
    load_config(str(folder))
    write_files(folder, config)
    source = ModelSource(str(folder), attn_implementation=attention(folder))
    plain = reference(case, str(folder))
    samples = batch(plain, LOSS)

    if case.name in SCALED:
        with pytest.raises(UnsupportedModel, match="changes its logits after the output layer"):
            policy_of(source)
        return
    policy = policy_of(source)
    assert_same_gradients(policy.gradients(samples, LOSS), plain_gradients(plain, samples))

    metrics = policy.train_step(samples, LOSS)
    assert isinstance(policy.strategy, Fsdp2Strategy)
    if policy.strategy.model.module.router_load.exists:
        assert 1 <= metrics["router/load_max_over_mean"] <= 8

    checkpoint.save(str(tmp_path / "checkpoint"), policy.snapshot())
    policy.export_folder(tmp_path / "exported", {})
    before, after = stored(folder), stored(tmp_path / "exported")
    assert {name: weight.shape for name, weight in after.items()} == {
        name: weight.shape for name, weight in before.items()
    }

    resumed = policy_of(source)
    resumed.load(str(tmp_path / "checkpoint"))
    exported = policy_of(
        ModelSource(str(tmp_path / "exported"), None, "float32", attention(folder))
    )
    expected = policy.compute_log_probs(samples)
    for other in (resumed, exported):
        for found_T, expected_T in zip(other.compute_log_probs(samples), expected, strict=True):
            assert (found_T == expected_T).all()
    for each in (policy, resumed):
        each.train_step(samples, LOSS)
    last, again = (dict(each.export_weights()) for each in (policy, resumed))
    assert all(torch.equal(again[name], weight) for name, weight in last.items())


@pytest.mark.usefixtures("_one_rank")
def test_routers_that_must_compute_in_float32_do_so_and_are_exported_so(tmp_path: Path) -> None:
    case = next(case for case in all_cases() if case.name == "ernie4_5_moe")
    folder = tmp_path / "model"
    write_files(folder, tiny_config(case))
    policy = fsdp2_policy(
        ModelLoader(ModelSource(str(folder))), SPEC, dtype=torch.bfloat16, packing=True
    )
    assert isinstance(policy.strategy, Fsdp2Strategy)
    seen: set[tuple[torch.dtype, torch.dtype]] = set()
    decoder: Any = policy.strategy.model.module.decoder
    for layer in decoder.layers:
        if (router := getattr(layer.mlp, "gate", None)) is not None:
            up = layer.self_attn.q_proj
            router.register_forward_pre_hook(
                lambda part, _, up=up: seen.add((part.weight.dtype, up.weight.dtype))
            )
    samples = batch(reference(case, str(folder)), LOSS)
    policy.train_step(samples, LOSS)
    assert seen == {(torch.float32, torch.bfloat16)}
    policy.export_folder(tmp_path / "exported", {})
    wide = {
        name.rpartition(".mlp.")[2]
        for name, weight in stored(tmp_path / "exported").items()
        if weight.dtype == torch.float32
    }
    assert wide == {"gate.weight", "moe_statics.e_score_correction_bias"}
    assert load_config(str(tmp_path / "exported")).dtype == torch.bfloat16


def refused(folder: Path) -> bool:
    try:
        load_config(str(folder))
    except ModelLoadError:
        return True
    return False


def attention(folder: Path) -> str:
    try:
        load_model(str(folder))
    except ModelLoadError:  # or a load with eager names the cause
        return "eager"
    return "sdpa"


def policy_of(source: ModelSource) -> PolicyTrainer:
    return fsdp2_policy(ModelLoader(source), SPEC, packing=True, temperature=LOSS.temperature)


def plain_gradients(model: PreTrainedModel, samples: list[Any]) -> dict[str, torch.Tensor]:
    actor_loss(model, samples, LOSS).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        allowed = 1e-4 * max(float(gradient.norm()), 1e-3)
        assert float((found[name] - gradient).abs().max()) <= allowed, name


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: weight
        for file in folder.glob("*.safetensors")
        for name, weight in load_file(file).items()
    }
