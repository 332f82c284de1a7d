"""The training that test_deepspeed.py compares.

As a program it is one rank of several, with the arguments MODEL WORK JOB.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agenticrun_workers.models.pretrained import load_model
from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.actor_loss import LossSpec
from agenticrun_workers.trainer.deepspeed.strategy import deepspeed_policy
from agenticrun_workers.trainer.fsdp2 import fsdp2_policy
from agenticrun_workers.trainer.optimizer import NonFiniteGradient, OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.trainer.samples import Sample
from ragged_samples import LOSSES, batch
from rank_programs import take_part

SPEC = OptimizerSpec(
    1e-2,
    "linear",
    warmup_steps=2,
    total_steps=20,
    weight_decay=0.01,
    epsilon=1e-4,
    max_skipped_steps=1,
)
"""AdamW's epsilon is large: otherwise rounding decides the direction of tiny gradients."""
LOSS = LOSSES["ppo"]
STEPS = 3
COMPARED = ("ppo", "decoupled segment", "cispo sequence")


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """Return options that cut even the tiny model's parameters and use several gradient buckets."""
    cut = {"stage3_param_persistence_threshold": 20} if stage == 3 else {}
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, **cut, **more}}


VARIANTS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "offloaded zero 1": (zero(1, offload_optimizer={"device": "cpu"}), torch.float32),
    "offloaded zero 3": (
        zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
        torch.float32,
    ),
    "checkpointed zero 3": (zero(3) | {"gradient_checkpointing": True}, torch.float32),
    "bfloat16 zero 1": (zero(1), torch.bfloat16),
    "bfloat16 zero 2": (zero(2), torch.bfloat16),
    "bfloat16 zero 3": (zero(3) | {"bf16": {"enabled": True}}, torch.bfloat16),
}


def make_torch(model: Path, dtype: torch.dtype = torch.float32) -> PolicyTrainer:
    return fsdp2_policy(
        partial(load_model, str(model), torch.float32), SPEC, max_tokens=30, dtype=dtype
    )


def make_zero(
    model: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32
) -> PolicyTrainer:
    return deepspeed_policy(
        partial(load_model, str(model), torch.float32),
        SPEC,
        config=config,
        max_tokens=30,
        dtype=dtype,
    )


@functools.cache
def samples_of(model: Path, loss: str, seed: int = 0, count: int = 9) -> list[Sample]:
    """The same for all trainers."""
    return batch(load_model(str(model)), LOSSES[loss], seed, count)


def part(samples: list[Sample], policy: PolicyTrainer, number: int) -> list[Sample]:
    """Return the samples of this rank, uneven on purpose.

    Rank 0 has most of the samples. Every third time it has all, and rank 1 computes nothing itself.
    """
    bound = len(samples) if policy.data_size == 1 or number % 3 == 0 else len(samples) * 2 // 3
    return samples[:bound] if policy.data_rank == 0 else samples[bound:]


def weights(policy: PolicyTrainer) -> dict[str, np.ndarray]:
    """As they are now, on rank 0."""
    return {name: weight.float().numpy().copy() for name, weight in policy.export_weights()}


def train(
    policy: PolicyTrainer,
    model: Path,
    *,
    save: Path | None = None,
    resume: Path | None = None,
    offload: bool = False,
    steps: int = 2 * STEPS,
) -> dict[str, Any]:
    """Train and save in the middle, or resume there and train the rest.

    With `offload`, everything leaves the device between steps.
    """
    batches = [samples_of(model, "ppo", seed, 11) for seed in range(steps)]
    if resume is not None:
        policy.load(str(resume))
    metrics = []
    for step in range(STEPS if resume else 0, steps):
        if step == STEPS and save is not None:
            policy.policy_version = STEPS
            taken = policy.snapshot()
        if offload:
            policy.offload()
            policy.onload()
        mine = part(batches[step], policy, step)
        metrics.append(policy.supervised_step(mine) if step == 1 else policy.train_step(mine, LOSS))
    if save is not None:  # the state of STEPS, though training has continued
        checkpoint.save(str(save), taken)
    mine = part(batches[0], policy, 1)
    logprobs = policy.compute_log_probs(mine)
    return {
        "metrics": metrics,
        "logprobs": logprobs,
        "weights": weights(policy),
        "policy_version": policy.policy_version,
    }


def warmed_up(policy: PolicyTrainer, model: Path) -> dict[str, np.ndarray]:
    """Return the weights after two supervised steps, the end of the warm-up, and an RL step."""
    mine = part(samples_of(model, "ppo"), policy, 1)
    for _ in range(2):
        policy.supervised_step(mine)
    policy.end_warm_up()
    policy.train_step(mine, LOSS)
    return weights(policy)


def gradients(policy: PolicyTrainer, model: Path) -> dict[str, dict[str, Tensor]]:
    """By loss. Every rank computes it; the whole is the same on all."""
    return {
        name: policy.gradients(part(samples_of(model, name), policy, 1), LOSSES[name])
        for name in COMPARED
    }


def broken_steps(policy: PolicyTrainer, model: Path) -> dict[str, Any]:
    """Run one step with a non-finite gradient, one without any weight, and more of the first kind.

    The last ones end the run.
    """
    loss = LossSpec(aggregation="token-mean")
    samples = batch(load_model(str(model)), loss)
    broken = [
        replace(sample, advantages_T=np.full_like(sample.advantages_T, np.nan))
        for sample in samples
    ]
    empty = [replace(sample, weight_T=np.zeros_like(sample.weight_T)) for sample in samples]
    policy.train_step(part(samples, policy, 1), loss)
    before, skipped = weights(policy), []
    for bad in (broken, empty):
        skipped.append(policy.train_step(part(bad, policy, 1), loss)["actor/skipped_steps"])
    after = weights(policy)
    with pytest.raises(NonFiniteGradient) as error:
        policy.train_step(part(broken, policy, 1), loss)
    still = weights(policy)
    policy.train_step(part(samples, policy, 1), loss)
    return {
        "weights": [before, after, still, weights(policy)],
        "skipped": skipped,
        "error": str(error.value),
    }


def two_ranks(model: Path, work: Path) -> dict[str, Any]:
    """What is compared of every stage and variant."""
    results: dict[str, Any] = {}
    for stage in (1, 2, 3):
        policy = make_zero(model, zero(stage))
        results[f"gradients {stage}"] = gradients(policy, model)
        results[f"training {stage}"] = train(
            policy, model, save=work / f"zero{stage}-by-2", offload=True
        )
        results[f"warmed up {stage}"] = warmed_up(make_zero(model, zero(stage)), model)
        results[f"broken {stage}"] = broken_steps(make_zero(model, zero(stage)), model)
    for name, (config, dtype) in VARIANTS.items():
        policy = make_zero(model, config, dtype)
        results[name] = train(policy, model, steps=STEPS, offload=True)
        checkpoint.save(str(work / name), policy.snapshot())
    results["from torch"] = train(make_zero(model, zero(3)), model, resume=work / "torch")
    results["from zero 1 on one rank"] = train(
        make_zero(model, zero(3)), model, resume=work / "zero1-by-1"
    )
    exported = make_zero(model, zero(3))
    exported.export_folder(work / "exported", {"note.txt": b"exported"})
    return results


def one_rank(model: Path, work: Path) -> dict[str, Any]:
    return train(make_zero(model, zero(1)), model, save=work / "zero1-by-1")


def resumed_on_one_rank(model: Path, work: Path) -> dict[str, Any]:
    return train(make_zero(model, zero(1)), model, resume=work / "zero3-by-2")


JOBS = {"two ranks": two_ranks, "one rank": one_rank, "resumed on one rank": resumed_on_one_rank}


def main(model_folder: str, work_folder: str, job: str) -> dict[str, Any]:
    return JOBS[job](Path(model_folder), Path(work_folder))


if __name__ == "__main__":
    take_part(main)
