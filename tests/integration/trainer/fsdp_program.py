"""The same steps under options of fsdp2, for test_fsdp.py to compare.

As a program it is one rank of several, with the argument MODELS.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.actor_loss import LossSpec
from agenticrun_workers.trainer.critic import CriticTrainer
from agenticrun_workers.trainer.fsdp2 import Fsdp2Strategy, fsdp2_policy
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.trainer.sharded_module import FsdpOptions
from ragged_samples import LOSSES, VALUE_LOSSES, VOCABULARY, Cut, batch
from rank_programs import count_collectives, take_part

SPEC = OptimizerSpec(1e-2, weight_decay=0.01)
LOSS = LOSSES["ppo sequence"]
"""Its ratios are of whole sequences: a rank that saw only its piece would not know them."""
CUTS: dict[str, Cut] = {
    "padded": {"max_tokens": 30},
    "packed": {"max_tokens": 40, "packing": True},
}
SHAPES: dict[str, dict[str, Any]] = {
    "as many key-value heads": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "two key-value heads": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "one key-value head": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "sliding window": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 3,
        "max_window_layers": 1,
    },
}
"""Qwen2 models; the last one's second layer sees three tokens."""
OPTIONS = {
    "plain": FsdpOptions(),
    "ulysses": FsdpOptions(ulysses_sequence_parallel_size=2),
    "ulysses, recomputing": FsdpOptions(
        ulysses_sequence_parallel_size=2, gradient_checkpointing=True
    ),
    "recomputing": FsdpOptions(gradient_checkpointing=True),
    "recomputing selectively": FsdpOptions(
        gradient_checkpointing=True, recompute_granularity="selective"
    ),
    "two copies": FsdpOptions(fsdp_size=2),
    "two copies, ulysses": FsdpOptions(fsdp_size=2, ulysses_sequence_parallel_size=2),
    "on the host, gathered once": FsdpOptions(
        offload_policy=True, reshard_after_forward=False, logits_chunk_elements=5 * VOCABULARY
    ),
}

ON_TWO = [option for option in OPTIONS if "copies" not in option]

Load = Callable[[], PreTrainedModel]


def qwen2(shape: str, dtype: torch.dtype, layers: int = 2) -> PreTrainedModel:
    """A tiny model with random weights, the same at each call."""
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        initializer_range=0.3,
        **SHAPES[shape],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for parameter in (
        model.parameters()
    ):  # the rotary embedding's frequencies keep their precision, as in a loaded model
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def part(samples: list[Sample], rank: int, size: int) -> list[Sample]:
    """Uneven on purpose; the third of four ranks has none."""
    bounds = {1: (0, None), 2: (0, 6, None), 4: (0, 3, 6, 6, None)}[size]
    return samples[bounds[rank] : bounds[rank + 1]]


def gradients(load: Load, options: FsdpOptions, cut: str) -> dict[str, dict[str, Tensor]]:
    """The policy's and the critic's. Every rank computes them; the whole is the same on all."""
    policy = fsdp2_policy(load, SPEC, options=options, **CUTS[cut])
    mine = part(batch(load(), LOSS), policy.data_rank, policy.data_size)
    critic = CriticTrainer(load, SPEC, options=options, **CUTS[cut])
    critic.train_step(mine, VALUE_LOSSES["plain"])
    return {
        "policy": policy.gradients(mine, LOSS),
        "critic": critic.gradients(mine, VALUE_LOSSES["clipped"]),
    }


def steps(
    load: Load, loss: LossSpec, folder: Path | None = None, **arguments: Any
) -> dict[str, Any]:
    """Train three steps and move the states to host memory and back between them.

    Returns metrics, weights (on rank 0) and log-probs of all samples.
    """
    policy = fsdp2_policy(load, SPEC, max_tokens=30, **arguments)
    mine = [
        part(batch(load(), loss, seed), policy.data_rank, policy.data_size) for seed in range(3)
    ]
    metrics = []
    for samples in mine:
        metrics.append(dict(policy.train_step(samples, loss)))
        policy.offload()
        policy.onload()
    if folder is not None:
        checkpoint.save(str(folder), policy.snapshot())
    logprobs = policy.compute_log_probs(mine[0])
    assert isinstance(policy.strategy, Fsdp2Strategy)
    return {
        "metrics": metrics,
        "weights": {name: weight.clone() for name, weight in policy.export_weights()},
        "logprobs": logprobs,
        "kept": {p.dtype for p in policy.strategy.model.module.parameters()}
        | {
            value.dtype
            for state in policy.strategy.steps.adamw.state.values()
            for value in state.values()
        },
    }


def collectives_per_layer(options: FsdpOptions) -> dict[str, int]:
    """Return the collectives that one more layer adds to a step with one micro-batch."""
    counts = []
    for layers in (2, 3):
        load = partial(qwen2, "two key-value heads", torch.float64, layers)
        policy = fsdp2_policy(load, SPEC, max_tokens=10_000, options=options)
        mine = part(batch(load(), LOSS), policy.data_rank, policy.data_size)
        counts.append(count_collectives(partial(policy.train_step, mine, LOSS)))
    return dict(counts[1] - counts[0])


def summed_over_data() -> list[float]:
    policy = fsdp2_policy(
        partial(qwen2, "two key-value heads", torch.float64), SPEC, options=OPTIONS["ulysses"]
    )
    return [float(value) for value in policy.sum_over_data(np.array([1.0, policy.data_rank]))]


def main(folder: str) -> dict[str, Any]:
    world = dist.get_world_size()
    small = partial(qwen2, "two key-value heads")
    float64 = partial(small, torch.float64)
    results: dict[str, Any] = {"sums": summed_over_data()}
    if world == 2:
        chosen = [("two key-value heads", option) for option in ON_TWO] + [
            (shape, "ulysses") for shape in SHAPES
        ]
        results["gradients"] = {
            (shape, option, cut): gradients(
                partial(qwen2, shape, torch.float64), OPTIONS[option], cut
            )
            for shape, option in dict.fromkeys(chosen)
            for cut in CUTS
        }
        results["collectives"] = {
            name: collectives_per_layer(options)
            for name, options in {
                "fsdp": FsdpOptions(),
                "fsdp, gathered once": FsdpOptions(reshard_after_forward=False),
                "ulysses": OPTIONS["ulysses"],
            }.items()
        }
        results["steps"] = {
            "ulysses": steps(float64, LOSSES["ppo"], options=OPTIONS["ulysses"]),
            "bfloat16": steps(
                partial(small, torch.float32),
                LOSSES["ppo"],
                Path(folder) / "bfloat16",
                dtype=torch.bfloat16,
            ),
        }
    else:
        on_four = {"ulysses": "ulysses, recomputing"} | {
            option: option for option in OPTIONS if option not in ON_TWO
        }
        results["gradients"] = {
            ("two key-value heads", name, cut): gradients(float64, OPTIONS[option], cut)
            for name, option in on_four.items()
            for cut in CUTS
        }
        results["steps"] = {
            "two copies": steps(
                float64, LOSSES["ppo"], Path(folder) / "copies", options=OPTIONS["two copies"]
            )
        }
    return results


if __name__ == "__main__":
    take_part(main)
