"""Training of a mixture of experts, for test_moe.py. As a program (MODEL, FOLDER): one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from agenticrun_workers.models.pretrained import ModelLoader, load_model
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.trainer.fsdp2 import FsdpOptions, fsdp2_policy
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.trainer.reference import ReferencePolicy
from agenticrun_workers.trainer.samples import Sample
from ragged_samples import LOSSES, batch
from rank_programs import take_part

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
}


def write_model(folder: Path, *, experts: int = EXPERTS, seed: int = 0) -> Path:
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
            layers=2,
            heads=2,
            initializer_range=0.3,
            seed=seed,
        ),
    )
    return folder


def weights(policy: PolicyTrainer) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in policy.export_weights()}


def policy_of(model: Path, name: str = "packed") -> PolicyTrainer:
    packing, options = OPTIONS[name]
    return fsdp2_policy(
        ModelLoader(ModelSource(str(model))),
        SPEC,
        max_tokens=60,
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


def resumed(model: Path, folder: Path) -> bool:
    """Return True if a run that saves and resumes ends with the bits of one that does not."""
    samples = batch(load_model(str(model)), LOSS, count=8)
    first = policy_of(model)
    share = mine(samples, first)
    first.train_step(share, LOSS)
    first.save(str(folder))
    first.train_step(share, LOSS)
    second = policy_of(model)
    second.load(str(folder))
    second.train_step(share, LOSS)
    one, other = weights(first), weights(second)
    first.export_folder(folder.parent / "exported", {})
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def reference(model: Path, other: Path) -> bool:
    """Return True if a reference that takes the weights of another model scores as that one."""
    frozen = ReferencePolicy(ModelLoader(ModelSource(str(model))), packing=True)
    source = load_model(str(other))
    stored = load_file(other / "model.safetensors")
    samples = batch(source, LOSS, count=8)[dist.get_rank() :: 2]
    before = frozen.compute_log_probs(samples)
    frozen.load_weights(stored.items())
    expected = ReferencePolicy(ModelLoader(ModelSource(str(other))), packing=True)
    scored, wanted = frozen.compute_log_probs(samples), expected.compute_log_probs(samples)
    changed = any((one != two).any() for one, two in zip(before, scored, strict=True))
    return changed and all((one == two).all() for one, two in zip(scored, wanted, strict=True))


def too_few(model: Path) -> str:
    """Return the error of a load of three experts of which one rank of four would have none."""
    try:
        policy_of(model)
    except ValueError as error:
        return str(error)
    return ""


def main(model: str, folder: str) -> dict[str, Any]:
    models, scratch = Path(model), Path(folder)
    if dist.get_world_size() > 2:
        return {"too few": too_few(models)}
    return {
        "trained": {name: trained(models, name) for name in OPTIONS},
        "resumed": resumed(models, scratch / "checkpoint"),
        "reference": reference(models, scratch / "other"),
    }


if __name__ == "__main__":
    take_part(main)
