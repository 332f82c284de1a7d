"""Train adapters for test_lora_ranks.py. As a program (MODEL WORK): one rank of two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agenticrun_workers.models.lora import LoraSpec, adapter_names, add_lora, merge
from agenticrun_workers.models.pretrained import ModelLoader
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.deepspeed.strategy import DeepSpeedStrategy, deepspeed_policy
from agenticrun_workers.trainer.fsdp2 import Fsdp2Strategy, fsdp2_policy
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.trainer.ranks import whole
from agenticrun_workers.trainer.samples import Sample
from ragged_samples import LOSSES, batch
from rank_programs import take_part

SPEC = OptimizerSpec(1e-2, weight_decay=0.01, epsilon=1e-4)
LORA = LoraSpec(rank=3, alpha=6.0)
LOSS = LOSSES["ppo"]
STEPS = 3


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20}}


STRATEGIES: dict[str, Callable[[Callable[[], PreTrainedModel]], PolicyTrainer]] = {
    "fsdp2": lambda load: fsdp2_policy(load, SPEC, max_tokens=30),
    "zero 1": lambda load: deepspeed_policy(load, SPEC, config=zero(1), max_tokens=30),
    "zero 2": lambda load: deepspeed_policy(load, SPEC, config=zero(2), max_tokens=30),
    "zero 3": lambda load: deepspeed_policy(load, SPEC, config=zero(3), max_tokens=30),
}


def adapt(network: PreTrainedModel) -> None:
    """Add nonzero adapters: A has no gradient while B is zero."""
    add_lora(network, LORA)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=generator)


def adapted(model: Path) -> ModelLoader:
    """Return the loader of a model with adapters."""
    return ModelLoader(ModelSource(str(model)), adapt=adapt)


@functools.cache
def batches_of(model: Path) -> list[list[Sample]]:
    """Return the samples of each step; the same for all trainings."""
    plain = adapted(model)()
    return [batch(plain, LOSS, seed) for seed in range(2 * STEPS)]


def part(samples: list[Sample], policy: PolicyTrainer) -> list[Sample]:
    bound = len(samples) * 2 // 3 if policy.data_size > 1 else len(samples)
    return samples[:bound] if policy.data_rank == 0 else samples[bound:]


def weights(policy: PolicyTrainer) -> dict[str, np.ndarray]:
    """Return the current merged weights, on rank 0."""
    return {name: weight.numpy().copy() for name, weight in policy.export_weights()}


def expanded(policy: PolicyTrainer) -> dict[str, np.ndarray]:
    """As `weights`, made of base and adapters outside of the model."""
    assert policy.adapters is not None
    found, rules = (
        {name: weight.clone() for name, weight in policy.adapters.base()},
        policy.adapters.rules(),
    )
    adapters = {name: weight.clone() for name, weight in policy.adapters.weights()}
    for name in found.keys() & rules.keys():
        a, b = (adapters[part] for part in adapter_names(name))
        found[name] = merge(found[name], a, b, rules[name])
    return {name: weight.numpy() for name, weight in found.items()}


def base(policy: PolicyTrainer) -> dict[str, Tensor]:
    """Return the whole frozen parameters under their names without adapters, on all ranks."""
    strategy = policy.strategy
    assert isinstance(strategy, Fsdp2Strategy | DeepSpeedStrategy)
    get = (
        strategy.steps.whole
        if isinstance(strategy, DeepSpeedStrategy)
        else lambda parameter: whole(parameter.detach())
    )
    named = strategy.model.module.model.named_parameters()
    return {
        name.replace(".base_layer", ""): get(parameter).clone()
        for name, parameter in named
        if not parameter.requires_grad
    }


def train(policy: PolicyTrainer, model: Path, work: Path, name: str) -> dict[str, Any]:
    """Gradients, steps with a checkpoint in the middle, and what came of them."""
    batches = batches_of(model)
    found: dict[str, Any] = {"gradients": policy.gradients(part(batches[0], policy), LOSS)}
    for step, samples in enumerate(batches):
        if step == STEPS:
            checkpoint.save(str(work / name), policy.snapshot())
        policy.train_step(part(samples, policy), LOSS)
    policy.export_folder(work / f"exported {name}", {})
    return found | {"weights": weights(policy), "expanded": expanded(policy), "base": base(policy)}


def resume(policy: PolicyTrainer, model: Path, folder: Path) -> dict[str, np.ndarray]:
    """The weights after the second half of `train`."""
    policy.load(str(folder))
    for samples in batches_of(model)[STEPS:]:
        policy.train_step(part(samples, policy), LOSS)
    return weights(policy)


def main(model_folder: str, work_folder: str) -> dict[str, Any]:
    model, work = Path(model_folder), Path(work_folder)
    load = adapted(model)
    results: dict[str, Any] = {
        name: train(make(load), model, work, name) for name, make in STRATEGIES.items()
    }
    results["resumed"] = {
        f"{after} from {before}": resume(STRATEGIES[after](load), model, work / before)
        for after, before in [("fsdp2", "zero 3"), ("zero 3", "fsdp2"), ("zero 1", "one rank")]
    }
    return results


if __name__ == "__main__":
    take_part(main)
