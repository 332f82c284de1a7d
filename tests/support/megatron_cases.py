"""Tiny models of three families, their parallel layouts, and the training of every layout."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from agenticrun_workers.models.pretrained import load_model, write_model
from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.trainer.samples import Sample
from ragged_samples import LOSSES, VOCABULARY, batch

SPEC = OptimizerSpec(1e-2, "linear", warmup_steps=2, total_steps=20, weight_decay=0.01)
LOSS = LOSSES["ppo"]
MAX_TOKENS = 30
SAVED = 2
"""Steps before a checkpoint."""
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,  # odd: two tensor-parallel ranks need a row of padding
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
    "qwen2": Qwen2Config(**{**SHAPE, "hidden_size": 32}, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=False, rope_parameters=YARN_ROPE),
}
"""Between them: tied and untied output, biases of queries, keys and values, norms of queries and
keys, scaled rotary embeddings."""


def make_models(folder: Path) -> None:
    """Make a folder for each family.

    No weight is zero or one by default, so that a forgotten one shows.
    """
    for name, config in CONFIGS.items():
        torch.manual_seed(len(name))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        write_model(folder / name, model, dict(model.named_parameters()))


@dataclass(frozen=True)
class Case:
    """One training: on `world` ranks, by this layout."""

    name: str
    world: int
    config: Mapping[str, Any]
    families: tuple[str, ...]
    dtype: str = "float64"
    packing: bool = False


RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
# A layout has the families whose parts it treats differently: tied embeddings are added up over
# stages and tensor ranks, biases are cut, norms of queries and keys are shared by tensor ranks.
CASES = [
    Case("data", 2, {}, ("llama",)),
    Case("tensor", 2, {"tensor_model_parallel_size": 2}, ("llama", "qwen3")),
    Case(
        "sequence",
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        ("qwen2", "qwen3"),
    ),
    Case("pipeline", 2, {"pipeline_model_parallel_size": 2}, ("llama", "qwen2")),
    Case("context", 2, {"context_parallel_size": 2}, ("llama", "qwen3")),
    Case(
        "packed",
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        ("qwen3",),
        packing=True,
    ),
    Case("packed context", 2, {"context_parallel_size": 2}, ("llama",), packing=True),
    Case("recompute", 2, {"tensor_model_parallel_size": 2, **RECOMPUTE}, ("llama",)),
    Case(
        "distributed optimizer",
        2,
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
        ("llama", "qwen3"),
        dtype="float32",
    ),
    Case("bfloat16", 2, {"use_distributed_optimizer": True}, ("qwen3",), dtype="bfloat16"),
    Case(
        "all",
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
        },
        ("llama",),
    ),
    Case(
        "sharded tensor",
        4,
        {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True},
        ("qwen3",),
        dtype="float32",
    ),
]


@dataclass
class Result:
    """What one rank saw."""

    gradient: dict[str, np.ndarray]
    """Of the first step, on rank 0."""
    metrics: list[dict[str, float]]
    """Of each step."""
    logprobs: list[np.ndarray]
    """Of its samples, at the end."""
    weights: dict[str, np.ndarray]
    """At the end, on rank 0."""
    data: tuple[int, int]
    """Its data rank, of how many."""


@functools.cache
def samples_of(folder: Path, family: str) -> list[list[Sample]]:
    """Of three steps; the same for all layouts and types."""
    model = load_model(str(folder / family), torch.float64)
    return [batch(model, LOSS, seed, 11) for seed in range(3)]


def part(samples: list[Sample], policy: PolicyTrainer) -> list[Sample]:
    """A data rank's: uneven on purpose, the second one has fewer samples and micro-batches."""
    bounds = {1: (0, len(samples)), 2: (0, 7, len(samples))}[policy.data_size]
    return samples[bounds[policy.data_rank] : bounds[policy.data_rank + 1]]


def weights_of(policy: PolicyTrainer) -> dict[str, np.ndarray]:
    """On rank 0."""
    return {name: weight.double().numpy().copy() for name, weight in policy.export_weights()}


def train(policy: Any, steps: list[list[Sample]]) -> Result:
    """A gradient, then three steps of which the second is supervised, then log-probs."""
    gradient = {
        name: value.double().numpy().copy()
        for name, value in policy.gradients(part(steps[0], policy), LOSS).items()
    }
    metrics = [dict(run_step(policy, steps, number)) for number in range(len(steps))]
    logprobs = policy.compute_log_probs(part(steps[0], policy))
    return Result(
        gradient, metrics, logprobs, weights_of(policy), (policy.data_rank, policy.data_size)
    )


def run_step(policy: Any, steps: list[list[Sample]], number: int) -> Mapping[str, float]:
    mine = part(steps[number], policy)
    result: Mapping[str, float] = (
        policy.supervised_step(mine) if number == 1 else policy.train_step(mine, LOSS)
    )
    if number == 1:
        policy.end_warm_up()
    return result


def resume(policy: Any, folder: Path, steps: list[list[Sample]]) -> dict[str, np.ndarray]:
    """The weights after a checkpoint's remaining steps, on rank 0."""
    policy.load(str(folder))
    for number in range(policy.policy_version, len(steps)):
        run_step(policy, steps, number)
    return weights_of(policy)


def save_after(policy: Any, count: int, folder: Path, steps: list[list[Sample]]) -> None:
    """Train so many steps, which become the policy's version, and save while training continues."""
    for number in range(count):
        run_step(policy, steps, number)
    policy.policy_version = count
    taken = policy.snapshot()
    run_step(policy, steps, count)
    checkpoint.save(str(folder), taken)
