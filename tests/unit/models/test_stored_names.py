"""Exports have the names and shapes of the model's files, which transformers' own writer gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from agenticrun_workers.models.pretrained import load_model, make_without_data
from agenticrun_workers.models.stored_names import (
    ParameterAssembly,
    has_stored_names,
    stored_weights,
)
from agenticrun_workers.sizing.published import published_config

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
LAYER = "model.layers.1"
NAMES = {
    "qwen3_moe": ("mlp.gate.weight", "mlp.experts.{}.gate_proj.weight"),
    "qwen2_moe": ("mlp.shared_expert_gate.weight", "mlp.experts.{}.down_proj.weight"),
    "olmoe": ("mlp.gate.weight", "mlp.experts.{}.up_proj.weight"),
    "mixtral": ("block_sparse_moe.gate.weight", "block_sparse_moe.experts.{}.w1.weight"),
}
"""Two weights of a layer in published files. The loaders of SGLang and vLLM read these names:
make_expert_params_mapping of gate_proj, down_proj and up_proj (Mixtral: w1, w2 and w3)."""


def made(kind: str) -> PreTrainedModel:
    fields = dict(SIZES)
    if kind == "mixtral":
        fields["num_local_experts"] = fields.pop("num_experts")
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))
    return model


def parts(model: PreTrainedModel) -> dict[str, Tensor]:
    return dict(stored_weights(model, model.named_parameters()))


@pytest.mark.parametrize("kind", [*NAMES, "qwen3"])
def test_parts_are_the_weights_that_transformers_writes(kind: str, tmp_path: Path) -> None:
    made(kind).save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    for model in (made(kind), load_model(str(tmp_path))):
        found = parts(model)
        assert found.keys() == written.keys()
        assert all(torch.equal(found[name], weight) for name, weight in written.items())
        assert has_stored_names(model)


@pytest.mark.parametrize("kind", NAMES)
def test_each_expert_has_the_names_that_the_loaders_of_sglang_and_vllm_read(kind: str) -> None:
    router, expert = NAMES[kind]
    wanted = {f"{LAYER}.{name}" for name in (router, *(expert.format(i) for i in range(4)))}
    assert wanted <= parts(made(kind)).keys()


def test_the_published_mixture_has_three_weights_for_each_of_its_experts() -> None:
    model = make_without_data(published_config("Qwen/Qwen3-30B-A3B"), trust_remote_code=False)
    found = parts(model)
    experts = {name: tuple(part.shape) for name, part in found.items() if ".experts." in name}
    assert experts == {
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight": (
            (2048, 768) if kind == "down_proj" else (768, 2048)
        )
        for layer in range(48)
        for expert in range(128)
        for kind in ("gate_proj", "up_proj", "down_proj")
    }
    assert sum(part.numel() for part in found.values()) == 30_532_122_624


def test_parts_are_views() -> None:
    model = made("qwen3_moe")
    for weight, part in parts(model).items():
        part.fill_(len(weight))
    for weight, part in parts(model).items():
        assert (part == len(weight)).all(), weight


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_an_assembly_gives_parameters_whose_parts_have_come_in_any_order(kind: str) -> None:
    model = made(kind)
    parameters = dict(model.named_parameters())
    assembly = ParameterAssembly(model, {name: p.shape for name, p in parameters.items()})
    weights = parts(model)
    found: dict[str, Tensor] = {}
    for weight in sorted(weights, reverse=True):
        assert assembly.shape(weight) == weights[weight].shape
        assert weight in set(assembly.missing)
        if (complete := assembly.add(weight, weights[weight])) is not None:
            found[complete[0]] = complete[1]
    assert found.keys() == parameters.keys()
    assert all(torch.equal(found[name], parameter) for name, parameter in parameters.items())
    assert list(assembly.missing) == []
    assert assembly.shape("model.norm.bias") is None


def test_a_model_that_a_run_makes_has_the_names_of_published_ones(tmp_path: Path) -> None:
    spec = InitializeSpec(
        ("a", "b"), "qwen3_moe", hidden_size=16, heads=2, experts=3, experts_per_token=2
    )
    initialize_model(tmp_path, spec)
    stored = load_file(tmp_path / "model.safetensors")
    model = load_model(str(tmp_path))
    assert stored.keys() == parts(model).keys()
    assert stored["model.layers.0.mlp.experts.2.gate_proj.weight"].shape == (256, 16)
    config = model.config.to_dict() | {"num_experts": model.config.num_experts}
    assert (config["num_experts"], config["num_experts_per_tok"]) == (3, 2)
    assert (tmp_path / "config.json").read_text().count('"num_experts"') == 1
