"""Time of a weight sync through shared memory, relative to a plain copy of the same bytes.

    python benchmarks/weight_sync.py [--quick] [--dtypes bfloat16,float32] [--syncs N] [--json FILE]

The product's own `WeightSync` runs on a Ray of its own, between a trainer process with random
parameters of Qwen2.5-0.5B's shape and an embedded engine in another process that serves the model.
`WeightSync.update` is timed from the call until the engine has the new version, with the checksums
of both sides. All times are divided by that of `copy_` between two allocated tensors of the same
size in the trainer's process:

- `sync_over_copy`: the median sync; `first_sync_over_copy`: the first one, which makes the files.
- `gloo_broadcast_over_copy`: a gloo broadcast of the same tensors between the same processes.
- `delta_over_copy`: syncs in which 2 % of the elements, chosen at random, have changed, and
  `delta_bytes_share`: the bytes that they send, of the whole.

After each kind of sync, the engine's parameters are compared with the trainer's by checksum, and it
samples a token. `--quick` takes two layers and a small vocabulary. Memory: four times the
parameters.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
import xxhash
from record import write_record
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from agenticrun_api import Pipeline
from agenticrun_api.overrides import load_run_with
from agenticrun_api.training import WeightSync as Spec
from agenticrun_workers.inference.actor import EngineActor
from agenticrun_workers.inference.transformers.engine import TransformersEngine
from agenticrun_workers.launch import ActorOptions
from agenticrun_workers.launch.ray_launcher import RayLauncher
from agenticrun_workers.trainer.policy_rank import TrainerActor
from agenticrun_workers.types import GenerationRequest, SamplingParams
from agenticrun_workers.weights.buckets import TensorSpec, WrittenBucket
from agenticrun_workers.weights.export import tensor_specs
from agenticrun_workers.weights.node import NodeWeights
from agenticrun_workers.weights.sync import Receiver, WeightSync

EXAMPLE = Path(__file__).parent.parent / "examples" / "frozen-lake.yaml"
"""Any run does: the trainer's class wants one."""
LIMITS = {"sync_over_copy": 3.0, "delta_bytes_share": 0.08}
CHANGED = 0.02


def config(quick: bool) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=8_000 if quick else 151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=2 if quick else 24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


def make(quick: bool, dtype: torch.dtype) -> PreTrainedModel:
    """The model, with weights as of an initialisation, made where they stay."""
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config(quick))
    model = model.to(dtype).to_empty(device="cpu")
    model.tie_weights()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.02)
    model.model.rotary_emb.inv_freq.copy_(1e6 ** -(torch.arange(0, 64, 2) / 64))
    return model.requires_grad_(False)


class Meets:
    """Either side of the gloo broadcast."""

    def parameters(self) -> list[tuple[str, Tensor]]:
        raise NotImplementedError

    def checksum(self) -> int:
        """Return the checksum of all parameters."""
        total = xxhash.xxh3_64()
        for _, value in self.parameters():
            total.update(value.reshape(-1).view(torch.uint8).numpy().data)
        return total.intdigest()

    def meet(self, rank: int, port: int) -> None:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
        )

    def broadcast(self) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _, value in self.parameters():
            dist.broadcast(value, 0)
        dist.barrier()
        return time.perf_counter() - began


class Trainer(Meets, TrainerActor):
    """Rank 0 of one. It exports what it holds, as a strategy would."""

    def __init__(self, quick: bool, dtype: torch.dtype, threads: int, pipeline: Pipeline) -> None:
        super().__init__(0, 1, pipeline)
        torch.set_num_threads(threads)
        self._held = list(make(quick, dtype).named_parameters())

    def parameters(self) -> list[tuple[str, Tensor]]:
        return self._held

    def export_weights(self, adapters: bool = False) -> Iterator[WrittenBucket]:  # noqa: ARG002
        yield from self._writers[False].write(self._held)

    def tensor_specs(self, adapters: bool = False) -> list[TensorSpec]:  # noqa: ARG002
        return tensor_specs(self._held)

    def change(self, share: float, seed: int) -> None:
        """Flip the lowest bit of this share of the elements."""
        random = np.random.default_rng(seed)
        for _, value in self._held:
            bits = (
                value.reshape(-1)
                .view(torch.int16 if value.element_size() == 2 else torch.int32)
                .numpy()
            )
            for start in range(0, len(bits), 1 << 22):
                part = bits[start : start + (1 << 22)]
                part ^= (random.random(len(part), np.float32) < share).astype(bits.dtype)

    def copy_seconds(self, times: int) -> list[float]:
        """Return the seconds of plain copies of the parameters' bytes."""
        source = [value for _, value in self._held]
        target = [torch.zeros_like(value) for value in source]
        found = []
        for _ in range(times):
            began = time.perf_counter()
            for one, other in zip(target, source, strict=True):
                one.copy_(other)
            found.append(time.perf_counter() - began)
        return found


class Engine(Meets, EngineActor):
    """The embedded engine, without a run around it."""

    async def serve(self, quick: bool, dtype: torch.dtype, threads: int) -> None:
        torch.set_num_threads(threads)
        engine = self._engine = TransformersEngine(lambda: make(quick, dtype), max_length=128)
        await engine.start()

    def parameters(self) -> list[tuple[str, Tensor]]:
        model: Any = self._serving._held.model  # type: ignore[attr-defined]
        return list(model.named_parameters())

    async def version_sampled(self) -> int:
        request = GenerationRequest(
            str(time.monotonic_ns()), "s", np.arange(5, dtype=np.int32), SamplingParams(1)
        )
        return int((await self._serving.generate(request)).versions_T[0])


def actor(cls: type, *arguments: Any) -> Any:
    return RayLauncher().start(ActorOptions(), cls, *arguments)


async def measure(dtype: torch.dtype, quick: bool, syncs: int, threads: int) -> dict[str, float]:
    """All figures of one dtype."""
    pipeline = load_run_with(EXAMPLE, []).spec.pipeline
    trainer, engine = actor(Trainer, quick, dtype, threads, pipeline), actor(Engine, "engine-0")
    await engine.call(lambda actor: actor.serve(quick, dtype, threads))
    copies = await trainer.call(lambda actor: actor.copy_seconds(syncs))
    nodes: list[Any] = []

    def spawn(_place: str, *arguments: Any) -> Any:
        nodes.append(actor(NodeWeights, *arguments))
        return nodes[-1]

    async def timed(
        sync: WeightSync, version: int, share: float, pauses: list[float] | None = None
    ) -> tuple[float, int]:
        await trainer.call(lambda actor: actor.change(share, version))
        began = time.perf_counter()
        report = await sync.update({"engine-0": Receiver(engine, "here")}, version)
        seconds = time.perf_counter() - began
        assert not report.failed, report.failed
        if pauses is not None and report.pause_seconds is not None:
            pauses.append(report.pause_seconds)
        return seconds, report.nbytes

    async def agreed(version: int) -> None:
        held = await engine.call(lambda actor: actor.checksum())
        assert await trainer.call(lambda actor: actor.checksum()) == held
        assert await engine.call(lambda actor: actor.version_sampled()) == version

    figures: dict[str, float] = {}
    whole = WeightSync(Spec(), "benchmark", [trainer], "here", spawn)
    pauses_of_whole: list[float] = []
    (first, size), *rest = [
        await timed(whole, version, 1.0, pauses_of_whole) for version in range(1, syncs + 2)
    ]
    await agreed(syncs + 1)
    await whole.stop()
    deltas = WeightSync(Spec(delta=True), "benchmark", [trainer], "here", spawn)
    await timed(deltas, 100, CHANGED)
    changed = [await timed(deltas, 101 + number, CHANGED) for number in range(max(2, syncs // 2))]
    await agreed(100 + len(changed))
    await deltas.stop()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    await asyncio.gather(
        trainer.call(lambda actor: actor.meet(0, port)),
        engine.call(lambda actor: actor.meet(1, port)),
    )
    ends = (trainer, engine)
    broadcasts = [
        (await asyncio.gather(*(end.call(lambda actor: actor.broadcast()) for end in ends)))[0]
        for _ in range(3)
    ]
    copies += await trainer.call(lambda actor: actor.copy_seconds(syncs))
    copy = statistics.median(copies)
    figures["megabytes"] = size / 1e6
    figures["copy_seconds"] = copy
    figures["sync_seconds"] = statistics.median(seconds for seconds, _ in rest)
    figures["sync_over_copy"] = figures["sync_seconds"] / copy
    figures["pause_over_copy"] = statistics.median(pauses_of_whole[1:]) / copy
    figures["first_sync_over_copy"] = first / copy
    figures["gloo_broadcast_over_copy"] = statistics.median(broadcasts) / copy
    figures["delta_over_copy"] = statistics.median(seconds for seconds, _ in changed) / copy
    figures["delta_bytes_share"] = max(nbytes for _, nbytes in changed) / size
    for one in (trainer, engine, *nodes):
        one.kill()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two layers, small vocabulary")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--syncs", type=int, default=7, help="timed syncs of each kind")
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, (os.cpu_count() or 2) // 2),
        help="torch threads of trainer and engine",
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    # Ray's default of 15 would measure the other processes of this machine
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's name
    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
    )
    figures: dict[str, float] = {}
    for name in arguments.dtypes.split(","):
        found = asyncio.run(
            measure(getattr(torch, name), arguments.quick, arguments.syncs, arguments.threads)
        )
        figures |= {f"{figure}_{name}": value for figure, value in found.items()}
        print(name, {figure: round(value, 4) for figure, value in found.items()}, flush=True)
    ray.shutdown()
    for figure, limit in LIMITS.items():
        figures[figure] = max(
            value for name, value in figures.items() if name.startswith(f"{figure}_")
        )
        print(f"{figure} {figures[figure]:.3f} (limit {limit})")
    if arguments.json:
        write_record(
            arguments.json,
            figures,
            f"trainer and engine of {arguments.threads} threads each in processes of their own",
        )


if __name__ == "__main__":
    main()
