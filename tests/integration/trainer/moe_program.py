"""Training of a mixture of experts, for test_moe.py. As a program (MODEL, FOLDER): one rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from agenticrun_workers.models.lora import LoraSpec, add_lora
from agenticrun_workers.models.pretrained import ModelLoader, load_model
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.fsdp2 import fsdp2_policy
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.trainer.reference import ReferencePolicy
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.trainer.sharded_module import FsdpOptions
from ragged_samples import LOSSES, batch
from rank_programs import count_collectives, take_part

SPEC = OptimizerSpec(1e-2, weight_decay=0.01, epsilon=1e-3)
LOSS = LOSSES["ppo sequence"]
EXPERTS = 5
"""An odd number: ranks have different numbers of experts."""
OPTIONS = {
    "packed": (True, FsdpOptions()),
    "padded": (False, FsdpOptions()),
    "recomputing": (True, FsdpOptions(gradient_checkpointing=True)),
    "ulysses": (True, FsdpOptions(ulysses_sequence_parallel_size=2)),
    "two copies": (True, FsdpOptions(fsdp_size=1)),
    "adapters": (True, FsdpOptions()),
}
EVEN = 6
"""Experts that two ranks can divide."""
DIVIDED = {
    "divided": (True, FsdpOptions(expert_parallel_size=2)),
    "divided, padded": (False, FsdpOptions(expert_parallel_size=2)),
    "divided, recomputing": (
        True,
        FsdpOptions(expert_parallel_size=2, gradient_checkpointing=True),
    ),
    "divided, ulysses": (
        True,
        FsdpOptions(expert_parallel_size=2, ulysses_sequence_parallel_size=2),
    ),
    "divided, adapters": (True, FsdpOptions(expert_parallel_size=2)),
}
"""Options of two ranks for `EVEN` experts."""
OF_FOUR = {
    "divided and spread": (True, FsdpOptions(expert_parallel_size=2)),
    "divided, two copies": (True, FsdpOptions(expert_parallel_size=2, fsdp_size=2)),
}
"""Options of four ranks for `EVEN` experts."""


def write_model(folder: Path, *, experts: int = EXPERTS, layers: int = 2, seed: int = 0) -> Path:
    """Write a tiny Qwen3-MoE model whose routers decide clearly."""
    initialize_model(
        folder,
        InitializeSpec(
            tuple("abcdefghijklmnop"),
            "qwen3_moe",
            hidden_size=16,
            intermediate_size=8,
            experts=experts,
            experts_per_token=2,
            layers=layers,
            heads=2,
            initializer_range=0.3,
            seed=seed,
        ),
    )
    return folder


def weights(policy: PolicyTrainer) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in policy.export_weights()}


def policy_of(model: Path, name: str = "packed", max_tokens: int = 60) -> PolicyTrainer:
    packing, options = (OPTIONS | DIVIDED | OF_FOUR)[name]
    adapt = partial(add_lora, spec=LoraSpec(rank=4), seed=3) if "adapters" in name else None
    return fsdp2_policy(
        ModelLoader(ModelSource(str(model)), adapt=adapt),
        SPEC,
        max_tokens=max_tokens,
        temperature=LOSS.temperature,
        packing=packing,
        options=options,
    )


def mine(samples: list[Sample], policy: PolicyTrainer) -> list[Sample]:
    return samples[policy.data_rank :: policy.data_size]


def trained(model: Path, name: str) -> dict[str, Any]:
    """Return what three steps compute under these options."""
    samples = batch(load_model(str(model)), LOSS, count=8)
    policy = policy_of(model, name)
    share = mine(samples, policy)
    return {
        "log_probs": policy.compute_log_probs(share),
        "gradients": policy.gradients(share, LOSS),
        "metrics": [dict(policy.train_step(share, LOSS)) for _ in range(3)],
        "weights": weights(policy),
    }


def resumed(model: Path, folder: Path, name: str = "packed") -> bool:
    """Return True if a run that saves and resumes ends with the bits of one that does not."""
    samples = batch(load_model(str(model)), LOSS, count=8)
    first = policy_of(model, name)
    share = mine(samples, first)
    first.train_step(share, LOSS)
    checkpoint.save(str(folder), first.snapshot())
    first.train_step(share, LOSS)
    second = policy_of(model, name)
    second.load(str(folder))
    second.train_step(share, LOSS)
    one, other = weights(first), weights(second)
    first.export_folder(folder.with_name(f"exported {name}"), {})
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def collectives_per_layer(folder: Path, name: str) -> dict[str, int]:
    """Return the collectives that one more layer adds to a step with one micro-batch."""
    counts = []
    for model in (folder / "even", folder / "three layers"):
        policy = policy_of(model, name, max_tokens=10_000)
        share = mine(batch(load_model(str(model)), LOSS, count=8), policy)
        counts.append(count_collectives(partial(policy.train_step, share, LOSS)))
    return dict(counts[1] - counts[0])


def reference(model: Path, other: Path, name: str = "packed") -> tuple[bool, float]:
    """Compare a reference that takes the weights of another model with that one.

    Returns:
        True if its scores have changed, and their largest difference from those of the other.
    """
    packing, options = (OPTIONS | DIVIDED)[name]
    frozen = ReferencePolicy(ModelLoader(ModelSource(str(model))), packing=packing, options=options)
    source = load_model(str(other))
    stored = load_file(other / "model.safetensors")
    samples = batch(source, LOSS, count=8)[dist.get_rank() :: 2]
    before = frozen.compute_log_probs(samples)
    frozen.load_weights(stored.items())
    expected = ReferencePolicy(ModelLoader(ModelSource(str(other))), packing=True)
    scored, wanted = frozen.compute_log_probs(samples), expected.compute_log_probs(samples)
    changed = any((one != two).any() for one, two in zip(before, scored, strict=True))
    return changed, max(
        float(abs(one - two).max()) for one, two in zip(scored, wanted, strict=True)
    )


def too_few(model: Path) -> str:
    """Return the error of a load of experts of which one rank of four would have none."""
    try:
        policy_of(model)
    except ValueError as error:
        return str(error)
    return ""


def main(model: str, folder: str) -> dict[str, Any]:
    models, scratch = Path(model), Path(folder)
    even = scratch / "even"
    if dist.get_world_size() > 2:
        return {
            "too few": too_few(scratch / "three"),
            "trained": {name: trained(even, name) for name in OF_FOUR},
            "collectives": {name: collectives_per_layer(scratch, name) for name in OF_FOUR},
        }
    return {
        "trained": {name: trained(models, name) for name in OPTIONS}
        | {name: trained(even, name) for name in DIVIDED},
        "collectives": {
            name: collectives_per_layer(scratch, name)
            for name in ("packed", "divided", "divided, recomputing")
        },
        "resumed": [
            resumed(models, scratch / "checkpoint packed"),
            resumed(even, scratch / "checkpoint divided", "divided"),
        ],
        "reference": [
            reference(models, scratch / "other"),
            reference(even, scratch / "other even", "divided"),
        ],
    }


if __name__ == "__main__":
    take_part(main)
