"""Metrics of routers: of the tokens that were trained on, and of nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from agenticrun_workers.models.lora import LoraSpec, UnknownTarget, add_lora
from agenticrun_workers.models.pretrained import load_model
from agenticrun_workers.models.stored_names import stored_weights
from agenticrun_workers.trainer.fsdp2 import fsdp2_policy
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.trainer.sharded_module import FsdpOptions
from ragged_samples import LOSSES, batch, largest_difference
from slow_losses import actor_loss

SPEC = OptimizerSpec(1e-2, max_grad_norm=1e9)
LOSS = LOSSES["ppo"]
EXPERTS, TOP = 4, 2


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("mixture")
    initialize_model(
        folder,
        InitializeSpec(
            tuple("abcdefghijklmnop"),
            "qwen3_moe",
            hidden_size=16,
            intermediate_size=8,
            experts=EXPERTS,
            experts_per_token=TOP,
            heads=2,
            initializer_range=0.3,
        ),
    )
    return load_model(str(folder))


@pytest.fixture
def samples(mixture: PreTrainedModel) -> list[Sample]:
    return batch(mixture, LOSS)


def expected(model: PreTrainedModel, samples: list[Sample]) -> tuple[float, float]:
    """Return load and entropy, from the router logits of each sequence alone."""
    logits: list[list[torch.Tensor]] = [[] for _ in range(model.config.num_hidden_layers)]
    for sample in samples:
        selected = np.flatnonzero(sample.weight_T[1:])
        if len(selected):
            ids = torch.from_numpy(sample.tokens_T[: selected[-1] + 1]).long()[None]
            with torch.no_grad():
                found = model(ids, output_router_logits=True, use_cache=False).router_logits
            for layer, logits_TE in enumerate(found):
                logits[layer].append(logits_TE)
    loads, entropies = [], []
    for layer_logits in logits:
        all_TE = torch.cat(layer_logits)
        tokens_E = torch.bincount(all_TE.topk(TOP, -1).indices.flatten(), minlength=EXPERTS)
        loads.append(float(tokens_E.max() / tokens_E.double().mean()))
        entropies.append(float(torch.distributions.Categorical(logits=all_TE).entropy().mean()))
    return float(np.mean(loads)), float(np.mean(entropies))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_load_and_entropy_are_those_of_the_tokens_without_padding(
    mixture: PreTrainedModel, samples: list[Sample], packing: bool, recompute: bool
) -> None:
    policy = fsdp2_policy(
        lambda: copy.deepcopy(mixture),
        SPEC,
        max_tokens=30,
        packing=packing,
        options=FsdpOptions(gradient_checkpointing=recompute),
    )
    policy.compute_log_probs(samples)
    policy.gradients(samples[:2], LOSS)
    metrics = policy.train_step(samples, LOSS)
    load, entropy = expected(mixture, samples)
    assert metrics["router/load_max_over_mean"] == pytest.approx(load)
    assert metrics["router/entropy"] == pytest.approx(entropy, rel=1e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_the_gradient_is_that_of_plain_autograd(
    mixture: PreTrainedModel, samples: list[Sample], packing: bool
) -> None:
    plain = copy.deepcopy(mixture)
    actor_loss(plain, samples, LOSS).backward()
    slow = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    policy = fsdp2_policy(lambda: copy.deepcopy(mixture), SPEC, max_tokens=40, packing=packing)
    assert largest_difference(policy.gradients(samples, LOSS), slow) < 1e-4


def test_a_dense_model_has_no_router_metrics(load_float32: Callable[[], PreTrainedModel]) -> None:
    policy = fsdp2_policy(load_float32, SPEC)
    samples = batch(load_float32(), LOSS)
    assert not [name for name in policy.train_step(samples, LOSS) if name.startswith("router/")]


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe", "mixtral"])
def test_adapters_of_a_mixture_go_into_its_linear_layers(kind: str) -> None:
    model = add_lora(small(kind), LoraSpec(rank=2))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    layers = {
        name.partition(".lora_")[0].removeprefix("model.layers.").partition(".")[2]
        for name in trained
    }
    shared = {f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
    expected = {f"self_attn.{name}_proj" for name in "qkvo"}
    if kind == "qwen2_moe":
        expected |= shared | {"mlp.shared_expert_gate"}
    assert layers == expected


def test_adapters_leave_the_experts_as_they_are(
    mixture: PreTrainedModel, samples: list[Sample]
) -> None:
    policy = fsdp2_policy(
        lambda: add_lora(copy.deepcopy(mixture), LoraSpec(rank=2)), SPEC, packing=True
    )
    policy.train_step(samples, LOSS)
    before = dict(stored_weights(mixture, mixture.named_parameters()))
    changed = {
        name
        for name, weight in policy.export_weights()
        if not torch.equal(weight, before.pop(name))
    }
    assert before == {}
    assert {name.rpartition(".self_attn.")[2] for name in changed} == {
        f"{name}_proj.weight" for name in "qkvo"
    }


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("down_proj", "down_proj holds all experts, which adapters leave as they are"),
        ("gate", "gate is a Qwen3MoeTopKRouter, adapters go into linear layers"),
    ],
)
def test_adapters_of_experts_and_routers_are_refused(
    mixture: PreTrainedModel, target: str, message: str
) -> None:
    with pytest.raises(UnknownTarget, match=message):
        add_lora(copy.deepcopy(mixture), LoraSpec(target_modules=("q_proj", target)))


def small(kind: str) -> PreTrainedModel:
    fields = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts" if kind == "mixtral" else "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))
    return model
