"""One rank of several that train with Megatron in one layout after the other.

The arguments are the folders MODELS WORK.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from agenticrun_workers.trainer.checkpoint import CheckpointMismatch
from agenticrun_workers.trainer.megatron.strategy import megatron_policy
from agenticrun_workers.trainer.optimizer import NonFiniteGradient, OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.trainer.samples import Sample
from megatron_cases import (
    CASES,
    DTYPES,
    LOSS,
    MAX_TOKENS,
    SAVED,
    SPEC,
    Case,
    resume,
    run_step,
    samples_of,
    save_after,
    train,
    weights_of,
)
from rank_programs import take_part

BY_NAME = {case.name: case for case in CASES}


def make(models: Path, case: Case, family: str, optimizer: OptimizerSpec = SPEC) -> PolicyTrainer:
    """A policy of this layout; the process leaves its last one."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    return megatron_policy(
        str(models / family),
        DTYPES[case.dtype],
        optimizer,
        config=case.config,
        max_tokens=MAX_TOKENS,
        temperature=LOSS.temperature,
        packing=case.packing,
    )


def check_checkpoints(models: Path, work: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return final weights by layout, resumed from another layout's checkpoint.

    The checkpoint of a plain torch policy is in `work` already.
    """
    steps = samples_of(models, "llama")
    chain = ["torch", "tensor", "data", "pipeline", "context"]
    found = {}
    for before, name in itertools.pairwise(chain):
        save_after(make(models, BY_NAME[name], "llama"), SAVED, work / name, steps)
        found[name] = resume(make(models, BY_NAME[name], "llama"), work / before, steps)
    steps = samples_of(models, "qwen3")
    sharded = replace(BY_NAME["distributed optimizer"])
    save_after(make(models, sharded, "qwen3"), SAVED, work / sharded.name, steps)
    single = replace(BY_NAME["sequence"], dtype="float32")
    save_after(make(models, single, "qwen3"), SAVED, work / "single", steps)
    found["whole from sharded"] = resume(make(models, single, "qwen3"), work / sharded.name, steps)
    found["sharded from whole"] = resume(make(models, sharded, "qwen3"), work / "single", steps)
    return found


def check_mismatch(models: Path, work: Path) -> str:
    """What a checkpoint of another model is refused with."""
    policy = make(models, BY_NAME["pipeline"], "qwen3")
    try:
        policy.load(str(work / "tensor"))
    except CheckpointMismatch as error:
        return str(error)
    return ""


def check_broken_gradients(models: Path) -> dict[str, Any]:
    """Two gradients that are not finite, of which one may be skipped."""
    policy = make(models, BY_NAME["pipeline"], "qwen2", replace(SPEC, max_skipped_steps=1))
    before = weights_of(policy)
    samples = samples_of(models, "qwen2")[0]
    broken = [
        replace(sample, advantages_T=np.full_like(sample.advantages_T, np.nan))
        for sample in samples
    ]
    skipped = policy.train_step(broken, LOSS)["actor/skipped_steps"]
    try:
        policy.train_step(broken, LOSS)
    except NonFiniteGradient as error:
        return {
            "skipped": skipped,
            "error": str(error),
            "before": before,
            "after": weights_of(policy),
        }
    return {}


def check_nothing_to_learn(models: Path) -> list[dict[str, float]]:
    """Metrics of a batch without a weighted token, and of one without samples.

    Neither changes a weight.
    """
    policy = make(models, BY_NAME["tensor"], "llama")
    nothing: list[Sample] = [
        replace(sample, weight_T=np.zeros_like(sample.weight_T))
        for sample in samples_of(models, "llama")[0]
    ]
    before = weights_of(policy)
    metrics = [dict(policy.train_step(samples, LOSS)) for samples in (nothing, [])]
    assert policy.compute_log_probs([]) == []
    after = weights_of(policy)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    return metrics


def check_offload(models: Path) -> dict[str, np.ndarray]:
    """The final weights of a training that left its memory between any two steps."""
    policy = make(models, BY_NAME["distributed optimizer"], "llama")
    steps = samples_of(models, "llama")
    for number in range(len(steps)):
        policy.offload()
        policy.onload()
        run_step(policy, steps, number)
    return weights_of(policy)


def check_refusals(models: Path) -> dict[str, str]:
    """What layouts that do not fit are refused with."""
    wrong: dict[str, tuple[str, dict[str, Any]]] = {
        "ranks": ("llama", {"tensor_model_parallel_size": 3}),
        "heads": ("llama", {"tensor_model_parallel_size": 4}),
        "double": ("llama", {"use_distributed_optimizer": True}),
    }
    found = {}
    for name, (family, config) in wrong.items():
        try:
            make(models, replace(BY_NAME["data"], config=config), family)
        except ValueError as error:
            found[name] = str(error)
    policy = make(models, BY_NAME["tensor"], "llama")
    try:
        megatron_policy(str(models / "llama"), DTYPES["float64"], SPEC)
    except ValueError as error:
        found["second layout"] = str(error)
    assert policy.data_size == 1
    return found


def main(models_folder: str, work_folder: str) -> dict[Any, Any]:
    models, work = Path(models_folder), Path(work_folder)
    found: dict[Any, Any] = {}
    for case in (case for case in CASES if case.world == dist.get_world_size()):
        for family in case.families:
            found[case.name, family] = vars(
                train(make(models, case, family), samples_of(models, family))
            )
    if dist.get_world_size() == 2:
        found["resumed"] = check_checkpoints(models, work)
        found["mismatch"] = check_mismatch(models, work)
        found["broken"] = check_broken_gradients(models)
        found["nothing"] = check_nothing_to_learn(models)
        found["offloaded"] = check_offload(models)
        found["refused"] = check_refusals(models)
        make(models, BY_NAME["pipeline"], "llama").export_folder(
            work / "exported", {"note.txt": b"exported"}
        )
    return found


if __name__ == "__main__":
    take_part(main)
