"""The training that test_ranks.py compares; as a program, one rank of two: `rank_program.py RANK PORT MODEL WORK`."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from agenticrun_workers.models import load_model
from agenticrun_workers.training import OptimizerSpec, Sample, TorchPolicy
from ragged_samples import LOSSES, batch

SPEC = OptimizerSpec(1e-2, "linear", warmup_steps=2, total_steps=20, weight_decay=0.01)
LOSS = LOSSES["ppo"]
STEPS = 3


@dataclass
class Result:
    """What one rank saw: metrics of each step, log-probs of its samples, and (rank 0) the weights at the end."""

    metrics: list[dict[str, float]]
    logprobs: list[np.ndarray]
    weights: dict[str, np.ndarray]
    policy_version: int


def part(samples: list[Sample], rank: int, world: int) -> list[Sample]:
    """Uneven on purpose: rank 0 has most of the samples and more micro-batches."""
    return samples if world == 1 else samples[:8] if rank == 0 else samples[8:]


def train(model: Path, *, save: Path | None = None, resume: Path | None = None) -> Result:
    """Train `2 * STEPS` steps and save in the middle, or resume there and train the rest."""
    plain = load_model(str(model), torch.float64)
    batches = [batch(plain, LOSS, seed, 11) for seed in range(2 * STEPS)]
    strategy = TorchPolicy(lambda: load_model(str(model), torch.float64), SPEC, max_tokens=30)
    rank, world = strategy.rank, strategy.world_size
    if resume is not None:
        strategy.load(resume)
    metrics: list[dict[str, float]] = []
    for step in range(STEPS if resume else 0, 2 * STEPS):
        if step == STEPS and save is not None:
            strategy.policy_version = STEPS
            strategy.save(save)
        mine = part(batches[step], rank, world)
        metrics.append(dict(strategy.supervised_step(mine) if step == 1 else strategy.train_step(mine, LOSS)))
    logprobs = strategy.compute_log_probs(part(batches[0], rank, world))
    return Result(metrics, logprobs, dict(strategy.export_weights()), strategy.policy_version)


def main(rank: int, port: int, model: Path, work: Path) -> None:
    """Train with two ranks, then resume from two ranks' checkpoint and from one's; write what this rank saw."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    results: dict[str, Any] = {
        "fresh": train(model, save=work / "saved-by-2"),
        "resumed from 2": train(model, resume=work / "saved-by-2"),
        "resumed from 1": train(model, resume=work / "saved-by-1"),
    }
    plain = {name: vars(result) for name, result in results.items()}
    (work / f"rank-{rank}.pickle").write_bytes(pickle.dumps(plain))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
