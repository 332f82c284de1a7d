"""The training that test_ranks.py compares.

As a program it is one rank of several, with the arguments MODEL WORK.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from agenticrun_workers.models.pretrained import ModelLoader, load_model
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.critic import CriticTrainer
from agenticrun_workers.trainer.fsdp2 import fsdp2_policy
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.trainer.reference import ReferencePolicy
from agenticrun_workers.trainer.samples import Sample
from ragged_samples import LOSSES, VALUE_LOSSES, Cut, batch
from rank_programs import take_part

SPEC = OptimizerSpec(1e-2, "linear", warmup_steps=2, total_steps=20, weight_decay=0.01)
LOSS = LOSSES["ppo"]
STEPS = 3
CUTS: dict[str, Cut] = {"padded": {"max_tokens": 30}, "packed": {"max_tokens": 40, "packing": True}}
DTYPES = {"float64": torch.float64, "float32": torch.float32}
EACH_AGGREGATION = ("ppo dual clip", "ppo", "tis", "cispo sequence", "decoupled")
"""Losses that differ in what ranks agree on, and in the level of ratios; one reads fewer fields."""


def weights(policy: PolicyTrainer) -> dict[str, np.ndarray]:
    """The policy's as they are now, on rank 0."""
    return {name: weight.numpy().copy() for name, weight in policy.export_weights()}


@dataclass
class Result:
    """What one rank saw of a policy and its critic."""

    metrics: list[dict[str, float]]
    """Of each step, the policy's and the critic's together."""
    logprobs: list[np.ndarray]
    """Scores of its samples at the end, by the policy and by the reference copied in the middle."""
    values: list[np.ndarray]
    weights: dict[str, np.ndarray]
    """At the end, on rank 0."""
    policy_version: int


@functools.cache
def batches_of(model: Path) -> list[list[Sample]]:
    """Return the samples of each step; the same for all trainings."""
    plain = load_model(str(model), torch.float64)
    return [batch(plain, LOSS, seed, 11) for seed in range(2 * STEPS)]


def part(samples: list[Sample], rank: int, world: int) -> list[Sample]:
    """Return the samples of this rank, uneven on purpose.

    Rank 0 has most of the samples and more micro-batches; the third rank has none.
    """
    bounds = {1: (0, len(samples)), 2: (0, 6, len(samples)), 3: (0, 6, len(samples), len(samples))}[
        world
    ]
    return samples[bounds[rank] : bounds[rank + 1]]


def train(model: Path, *, save: Path | None = None, resume: Path | None = None) -> Result:
    """Train `2 * STEPS` steps and save in the middle, or resume there and train the rest."""
    load = ModelLoader(ModelSource(str(model)), torch.float64)
    batches = batches_of(model)
    policy, critic, reference = (
        fsdp2_policy(load, SPEC, max_tokens=30),
        CriticTrainer(load, SPEC, max_tokens=30),
        ReferencePolicy(load),
    )
    parts: dict[str, PolicyTrainer | CriticTrainer | ReferencePolicy] = {
        "policy": policy,
        "critic": critic,
        "reference": reference,
    }
    rank, world = policy.rank, policy.world_size
    if resume is not None:
        for name, trained in parts.items():
            trained.load(str(resume / name))
    metrics: list[dict[str, float]] = []
    for step in range(STEPS if resume else 0, 2 * STEPS):
        if step == STEPS and save is not None:
            policy.policy_version = STEPS
            reference.load_weights(
                (name, torch.from_numpy(weight))
                for name, weight in everywhere(weights(policy)).items()
            )
            taken = {name: trained.snapshot() for name, trained in parts.items()}
        mine = part(batches[step], rank, world)
        if step == 2:
            check_nothing_to_learn(policy, critic, mine)
        actor = policy.supervised_step(mine) if step == 1 else policy.train_step(mine, LOSS)
        if step == 1:
            policy.end_warm_up()
        metrics.append({**actor, **critic.train_step(mine, VALUE_LOSSES["clipped"])})
    if save is not None:  # the state of STEPS, though training has continued
        for name, snapshot in taken.items():
            checkpoint.save(str(save / name), snapshot)
    mine = part(batches[0], rank, world)
    logprobs = [*policy.compute_log_probs(mine), *reference.compute_log_probs(mine)]
    return Result(
        metrics, logprobs, critic.compute_values(mine), weights(policy), policy.policy_version
    )


def check_nothing_to_learn(
    policy: PolicyTrainer, critic: CriticTrainer, samples: list[Sample]
) -> None:
    """A batch without a weighted token on any rank is no step, and changes no weight."""
    nothing = [replace(sample, weight_T=np.zeros_like(sample.weight_T)) for sample in samples]
    before = weights(policy)
    assert dict(policy.train_step(nothing, LOSS)) == {"actor/skipped_steps": 0.0}
    assert critic.train_step(nothing, VALUE_LOSSES["clipped"]) == {"critic/skipped_steps": 0.0}
    after = weights(policy)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def everywhere(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rank 0's weights on every rank."""
    box = [weights]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def losses_of(dtype: str, world: int) -> list[str]:
    """Return the losses whose gradients are compared.

    A loss computes a rank's own sequences. Ranks only share the denominators of its aggregation, so
    a third rank and another dtype need no more than one loss of each kind.
    """
    return list(LOSSES if dtype == "float64" and world < 3 else EACH_AGGREGATION)


def gradients(model: Path) -> dict[tuple[str, str, str], dict[str, Tensor]]:
    """Return the gradient of one step, by (loss, dtype, cut).

    Every rank computes it; the whole is the same on all.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    found = {}
    for dtype, torch_dtype in DTYPES.items():
        load = ModelLoader(ModelSource(str(model)), torch_dtype)
        plain = load()
        samples = {name: batch(plain, LOSSES[name]) for name in losses_of(dtype, world)}
        for cut, arguments in CUTS.items():
            policy = fsdp2_policy(load, SPEC, **arguments)
            for name, of_loss in samples.items():
                mine = part(of_loss, policy.rank, world)
                found[name, dtype, cut] = policy.gradients(mine, LOSSES[name])
            critic = CriticTrainer(load, SPEC, **arguments)
            for name, value_loss in VALUE_LOSSES.items():
                mine = part(samples["ppo"], critic.rank, world)
                critic.train_step(mine, value_loss)
                found[f"critic {name}", dtype, cut] = critic.gradients(mine, value_loss)
    return found


def export(model: Path, folder: Path) -> None:
    """Write the untrained policy as a Hugging Face folder."""
    fsdp2_policy(ModelLoader(ModelSource(str(model))), SPEC).export_folder(
        folder, {"note.txt": b"exported"}
    )


def main(model_folder: str, work_folder: str) -> dict[str, Any]:
    """Run the work of several ranks.

    Two ranks also train, and resume from two ranks' checkpoint and from one's.
    """
    model, work = Path(model_folder), Path(work_folder)
    results: dict[str, Any] = {"gradients": gradients(model)}
    if dist.get_world_size() == 2:
        results["fresh"] = vars(train(model, save=work / "saved-by-2"))
        results["resumed from 2"] = vars(train(model, resume=work / "saved-by-2"))
        results["resumed from 1"] = vars(train(model, resume=work / "saved-by-1"))
        export(model, work / "exported")
    return results


if __name__ == "__main__":
    take_part(main)
