"""Loads of shards, for test_shards.py. As a program (MODELS): one rank of several."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agenticrun_workers.models.lora import LoraSpec, add_lora
from agenticrun_workers.models.pretrained import ModelLoader, load_model
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.trainer.critic import CriticTrainer
from agenticrun_workers.trainer.fsdp2 import Fsdp2Strategy, fsdp2_policy
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.trainer.ranks import local
from agenticrun_workers.trainer.sharded_module import Load
from ragged_samples import LOSSES, batch
from rank_programs import take_part

SPEC = OptimizerSpec(1e-2)
LOSS = LOSSES["ppo"]
M_MMAP_THRESHOLD = -3
FAULTS = ("nan", "shape", "missing", "untied", "target")


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Qwen3 model whose layers hold nearly all parameters."""

    layers: int
    hidden: int
    vocabulary: int = 1024


SMALL = Shape(24, 448)
"""63 million parameters. A layer is small against half of them, as in a large model."""


def write(folder: Path, shape: Shape, *, tied: bool = True, name: str = "qwen3") -> Path:
    """Write a model with random weights in bfloat16, as the hub has them."""
    config = AutoConfig.for_model(
        name,
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=shape.hidden // 4,
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


class PeakMemory:
    """Largest private memory of this process in a `with` block, less what it has at the start."""

    def __enter__(self) -> PeakMemory:
        # Stays open, and is a line of numbers: a thousand looks a second take little of a core.
        self._sizes = Path("/proc/self/statm").open("rb")
        self._stop = threading.Event()
        self._start = self._largest = self._private_bytes()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sizes.close()

    @property
    def bytes(self) -> int:
        return self._largest - self._start

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self._largest = max(self._largest, self._private_bytes())

    def _private_bytes(self) -> int:
        _, resident, shared, *_ = os.pread(self._sizes.fileno(), 100, 0).split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def memory(folder: Path) -> dict[str, int]:
    """Return the peak of load and probes of a policy, and the bytes of this rank's parameters."""
    with PeakMemory() as peak:
        policy = fsdp2_policy(ModelLoader(ModelSource(str(folder))), SPEC, dtype=torch.bfloat16)
    return {"peak": peak.bytes, "shard": held(policy)}


def held(policy: PolicyTrainer) -> int:
    assert isinstance(policy.strategy, Fsdp2Strategy)
    return sum(local(p).nbytes for p in policy.strategy.model.module.parameters())


def unused_head(folder: Path) -> tuple[int, int]:
    """Return rows of the output layer on this rank, which a critic does not use; and of all."""
    loaded: list[PreTrainedModel] = []

    class Loader(ModelLoader):
        def load_shards(self, distribute: Callable[[PreTrainedModel], None]) -> PreTrainedModel:
            loaded.append(super().load_shards(distribute))
            return loaded[0]

    CriticTrainer(Loader(ModelSource(str(folder)), output_layer=False), SPEC)
    weight = loaded[0].get_output_embeddings().weight
    assert isinstance(weight, DTensor)
    return len(weight.to_local()), len(weight)


def adapters(folder: Path) -> dict[str, Any]:
    """Train adapters on a base in bfloat16 that is loaded in shards, and on a whole one in float32.

    Returns for each: metrics of two steps, the merged weights (on rank 0), and the bytes held.
    """
    adapt = partial(add_lora, spec=LoraSpec(rank=3, alpha=6.0), seed=3)
    source = ModelSource(str(folder), dtype="bfloat16")

    def whole() -> PreTrainedModel:
        return add_lora(load_model(str(folder)), LoraSpec(rank=3, alpha=6.0), 3)

    samples = batch(load_model(str(folder)), LOSS, count=8)[dist.get_rank() :: 2]
    found: dict[str, Any] = {}
    loads: dict[str, Load] = {"shards": ModelLoader(source, adapt=adapt), "whole": whole}
    for name, load in loads.items():
        policy = fsdp2_policy(load, SPEC, dtype=torch.bfloat16)
        found[name] = {
            "metrics": [dict(policy.train_step(samples, LOSS)) for _ in range(2)],
            "weights": {name: weight.clone() for name, weight in policy.export_weights()},
            "held": held(policy),
        }
    return found


def error(folder: Path) -> str:
    """Return type and message of the error of a load."""
    adapt = (
        partial(add_lora, spec=LoraSpec(target_modules=("x",))) if folder.name == "target" else None
    )
    try:
        fsdp2_policy(ModelLoader(ModelSource(str(folder)), adapt=adapt), SPEC)
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return ""


def main(models: str, measured: str = "") -> dict[str, Any]:
    folder = Path(models)
    if measured:
        # glibc would keep what the probes free for later: tests of memory would measure its caches.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)
        memory(folder / "tiny")  # imports and buffers that every process has
        return memory(folder / measured)
    return {
        "head": unused_head(folder / "untied"),
        "adapters": adapters(folder / "adapted"),
        "errors": {name: error(folder / "faulty" / name) for name in FAULTS},
    }


if __name__ == "__main__":
    take_part(main)
