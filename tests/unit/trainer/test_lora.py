"""Adapters in a model, and `PolicyTrainer` on one rank that trains nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from agenticrun_workers.algorithms.losses import Vanilla
from agenticrun_workers.models.lora import LoraSpec, UnknownTarget, add_lora, whole_weights
from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.actor_loss import LossSpec
from agenticrun_workers.trainer.checkpoint import CheckpointMismatch
from agenticrun_workers.trainer.fsdp2 import fsdp2_policy
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.trainer.samples import Sample
from ragged_samples import LOSSES, VOCABULARY, batch, largest_difference, token_log_probs
from slow_losses import actor_loss

SPEC = OptimizerSpec(1e-2, max_grad_norm=1e9)
LORA = LoraSpec(rank=3, alpha=6.0)
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

Load = Callable[[], PreTrainedModel]


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def adapted(load: Load, spec: LoraSpec = LORA) -> PreTrainedModel:
    """With adapters that have learned something."""
    model = add_lora(load(), spec)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3, generator=generator)
    return model


def as_it_is(parameter: torch.nn.Parameter) -> Tensor:
    return parameter.detach()


def test_adapters_change_nothing_at_first(load: Load) -> None:
    tokens_T = np.arange(12) % VOCABULARY
    with torch.no_grad():
        expected, found = (
            token_log_probs(model, tokens_T, 1.0) for model in (load(), add_lora(load(), LORA))
        )
    assert torch.equal(found, expected)


def test_every_rank_starts_with_the_adapters_of_the_seed_and_leaves_the_random_state_alone(
    load: Load,
) -> None:
    torch.manual_seed(1)
    first = dict(add_lora(load(), LORA, seed=5).named_parameters())
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = dict(add_lora(load(), LORA, seed=5).named_parameters())
    other = dict(add_lora(load(), LORA, seed=6).named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_all_linear_layers_but_the_output_layer_get_adapters_and_only_these_train(
    load: Load,
) -> None:
    model = add_lora(load(), LORA)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {
        f"model.layers.{layer}.{part}.{name}.lora_{which}.default.weight"
        for layer in (0, 1)
        for name in LINEAR
        for part in ["self_attn" if name in {"q_proj", "k_proj", "v_proj", "o_proj"} else "mlp"]
        for which in "AB"
    }


def test_chosen_layers_get_adapters(load: Load) -> None:
    model = add_lora(load(), LoraSpec(2, 4.0, ("q_proj", "layers.1.mlp.up_proj")))
    adapted_layers = {
        name.split(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name
    }
    assert adapted_layers == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("query", "the model has no layer query"),
        ("lm_head", "lm_head is the output layer"),
        ("embed_tokens", "model.embed_tokens is a Embedding"),
        ("mlp", r"model.layers.0.mlp is a LlamaMLP"),
    ],
)
def test_a_target_that_is_no_inner_linear_layer_is_refused(
    load: Load, target: str, reason: str
) -> None:
    with pytest.raises(UnknownTarget, match=reason):
        add_lora(load(), LoraSpec(target_modules=("q_proj", target)))


@pytest.mark.parametrize("make", ["llama", "gpt2"])
def test_merged_weights_are_those_of_pefts_own_merge(load_float32: Load, make: str) -> None:
    """Bit for bit, under the names without adapters, and without a change to the model."""
    import peft  # here, because each process of `make test` reads the top of this module

    load = load_float32 if make == "llama" else gpt2
    model = adapted(load)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    merged = dict(whole_weights(model, as_it_is))
    config = peft.LoraConfig(
        r=LORA.rank,
        lora_alpha=int(LORA.alpha),
        target_modules="all-linear",
        fan_in_fan_out=make == "gpt2",
    )
    theirs = peft.get_peft_model(load(), config)
    theirs.load_state_dict(
        {f"base_model.model.{name}": tensor for name, tensor in before.items()}, strict=False
    )
    expected = dict(theirs.merge_and_unload().named_parameters())
    assert merged.keys() == expected.keys() == dict(load().named_parameters()).keys()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    assert any(not torch.equal(merged[name], weight) for name, weight in load().named_parameters())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_the_gradient_of_adapters_is_that_of_the_formulas(load: Load) -> None:
    loss = LOSSES["ppo"]
    model = adapted(load)
    samples = batch(model, loss)
    actor_loss(model, samples, loss).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = fsdp2_policy(lambda: adapted(load), SPEC, max_tokens=40).gradients(samples, loss)
    assert all("lora_" in name for name in found)
    assert largest_difference(found, expected) < 1e-10


def learn(policy: PolicyTrainer, samples: list[Sample], steps: int) -> list[float]:
    """Mean log-prob of the tokens that have an advantage of 1, before each step."""
    found = []
    for _ in range(steps):
        logprobs = policy.compute_log_probs(samples)
        found.append(
            float(
                np.mean(
                    [
                        lp[s.weight_T > 0].mean()
                        for lp, s in zip(logprobs, samples, strict=True)
                        if s.weight_T.any()
                    ]
                )
            )
        )
        policy.train_step(samples, LossSpec(Vanilla()))
    return found


def test_adapters_learn_while_the_base_stays_bit_for_bit(load: Load) -> None:
    samples = [
        replace(sample, advantages_T=np.ones_like(sample.advantages_T))
        for sample in batch(load(), LOSSES["ppo"])
    ]
    model = add_lora(load(), LORA)
    policy = fsdp2_policy(lambda: model, replace(SPEC, weight_decay=0.1), max_tokens=60)
    found = learn(policy, samples, 20)
    assert found[-1] > found[0] + 0.5
    base = dict(load().named_parameters())
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, base[name.replace(".base_layer", "")])


def test_an_exported_folder_is_a_plain_model_that_says_what_the_adapted_one_says(
    load: Load, tmp_path: Path
) -> None:
    policy = fsdp2_policy(lambda: adapted(load), SPEC)
    samples = batch(load(), LOSSES["ppo"])
    policy.export_folder(tmp_path, {})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(model) is type(load())
    assert model.state_dict().keys() == load().state_dict().keys()
    for sample, expected in zip(samples, policy.compute_log_probs(samples), strict=True):
        found = token_log_probs(model, sample.tokens_T, 1.0).detach().numpy() * (
            sample.turns_T >= 0
        )
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_checkpoint_holds_adapters_alone_and_goes_on(load: Load, tmp_path: Path) -> None:
    batches = [batch(load(), LOSSES["ppo"], seed) for seed in range(4)]
    straight = fsdp2_policy(lambda: add_lora(load(), LORA, seed=1), SPEC)
    for samples in batches[:2]:
        straight.train_step(samples, LOSSES["ppo"])
    checkpoint.save(str(tmp_path), straight.snapshot())
    names = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert all("lora_" in name for name in names if name.startswith(("model.", "optimizer.state.")))
    resumed = fsdp2_policy(lambda: add_lora(load(), LORA, seed=2), SPEC)
    resumed.load(str(tmp_path))
    for samples in batches[2:]:
        assert straight.train_step(samples, LOSSES["ppo"]) == resumed.train_step(
            samples, LOSSES["ppo"]
        )
    found = dict(resumed.export_weights())
    assert all(torch.equal(found[name], weight) for name, weight in straight.export_weights())


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (replace(LORA, rank=4), "the model has rank 4, the checkpoint 3"),
        (replace(LORA, alpha=5.0), r"the model has alpha 5\.0, the checkpoint 6\.0"),
        (replace(LORA, target_modules=("q_proj",)), "the model has target_modules"),
        (None, "the model has no adapters, the checkpoint has"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(
    load: Load, tmp_path: Path, other: LoraSpec | None, difference: str
) -> None:
    checkpoint.save(str(tmp_path), fsdp2_policy(lambda: add_lora(load(), LORA), SPEC).snapshot())
    policy = fsdp2_policy(lambda: load() if other is None else add_lora(load(), other), SPEC)
    with pytest.raises(
        CheckpointMismatch,
        match=f"lora: {difference}.*set spec.pipeline.actorTrain.lora to what was trained",
    ):
        policy.load(str(tmp_path))


def test_adapters_refuse_a_checkpoint_of_whole_weights(load: Load, tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path), fsdp2_policy(load, SPEC).snapshot())
    with pytest.raises(
        CheckpointMismatch, match="lora: the model has adapters, the checkpoint has none"
    ):
        fsdp2_policy(lambda: add_lora(load(), LORA), SPEC).load(str(tmp_path))
