"""Stages `weights` and `engine`: weights on their way, and the embedded engine beside a trainer."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agenticrun_workers.gpu_check.ipc import between_processes
from agenticrun_workers.gpu_check.machine import SHM
from agenticrun_workers.gpu_check.stages import Bench
from agenticrun_workers.gpu_check.training import (
    TINY,
    qwen3,
    random_model,
    random_samples,
    small_trainer,
)
from agenticrun_workers.inference.transformers.engine import TransformersEngine
from agenticrun_workers.trainer.actor_loss import LossSpec
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.types import Generation, GenerationRequest, SamplingParams
from agenticrun_workers.weights.buckets import MappedBucket, buckets_of
from agenticrun_workers.weights.export import BucketWriter, tensor_specs

BUCKET_BYTES = 2**30
HANDOVERS = 5


def weights(bench: Bench) -> None:
    """An export into shared memory as runs do it, the same into registered memory, and CUDA IPC."""
    between_processes(bench)
    space = os.statvfs(SHM)
    total = min(bench.size(16 * 10**9, 10**6), space.f_frsize * space.f_bavail * 3 // 4)
    parts = 64
    named = [
        (f"layer.{number}", torch.randn(total // parts // 2, device=bench.device).bfloat16())
        for number in range(parts)
    ]
    buckets = buckets_of(tensor_specs(named), BUCKET_BYTES)
    with tempfile.TemporaryDirectory(dir=SHM, prefix="agenticrun-gpu-check-") as name:
        writer = BucketWriter(Path(name), buckets, deltas=False)
        taken = bench.seconds(lambda: list(writer.write(named)), 1)
        bench.measure("weights", total / 1e9, "GB")
        bench.measure("export into shared memory", total / taken / 1e9, "GB/s", at_least=20)
        mapped = [MappedBucket(Path(name), bucket) for bucket in buckets]
        exported, wrong = dict(named), 0
        for held in mapped:
            whole = [exported[each.name].view(torch.uint8).cpu() for each in held.bucket.tensors]
            wrong += not torch.equal(torch.from_numpy(held.data), torch.cat(whole))
        bench.exact("buckets that differ from the weights", wrong, at_most=0)
        # Copies into shared memory that CUDA knows are the ceiling of an export.
        if bench.gpu and not all(bucket.page_lock() for bucket in mapped):
            raise RuntimeError("CUDA does not page-lock the shared memory")
        targets = [torch.from_numpy(bucket.data) for bucket in mapped]
        sources = [torch.zeros_like(target, device=bench.device) for target in targets]

        def copy() -> None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)

        rate = sum(target.numel() for target in targets) / bench.seconds(copy) / 1e9
        bench.measure("copy into registered shared memory", rate, "GB/s", at_least=20)


def engine(bench: Bench) -> None:
    """The embedded engine against plain forward passes, and its turns with a trainer."""
    asyncio.run(_conformance(bench))
    asyncio.run(_handovers(bench))


def _requests(vocabulary: int) -> list[GenerationRequest]:
    """Return requests of all kinds of sampling, with prompts of several lengths."""
    kinds = [
        SamplingParams(24),
        SamplingParams(24, 0.0),
        SamplingParams(24, 0.7, top_p=0.9, top_k=50, min_p=0.01, record_temperature=1.0),
        SamplingParams(24, 1.3),
    ]
    random = np.random.default_rng(0)
    return [
        GenerationRequest(
            f"r{number}",
            f"s{number}",
            random.integers(vocabulary, size=5 + 7 * number % 60).astype(np.int32),
            kinds[number % len(kinds)],
            number,
        )
        for number in range(16)
    ]


async def _conformance(bench: Bench) -> None:
    config = qwen3(1024, 8, 3072, 16) if bench.gpu else TINY()
    model = random_model(config, bench.device).eval()
    served = TransformersEngine(lambda: model, max_length=128)
    await served.start()
    requests = _requests(config.vocab_size)
    together = await asyncio.gather(*map(served.generate, requests))
    alone = [await served.generate(request) for request in requests]
    await served.stop()
    changed = sum(
        one.tokens_T.tolist() != other.tokens_T.tolist()
        for one, other in zip(together, alone, strict=True)
    )
    # In a batch, kernels add in another order, which may flip a choice between two tokens.
    bench.exact("responses that differ alone", changed, at_most=2)
    gaps = [_gap(model, request, one) for request, one in zip(requests, together, strict=True)]
    bench.exact("log-probs against a plain forward pass", max(gaps), at_most=2e-3)


@torch.no_grad()
def _gap(model: Any, request: GenerationRequest, generation: Generation) -> float:
    """Return the largest |difference| of log-probs, in nats."""
    params = request.sampling
    temperature = params.record_temperature or params.temperature or 1.0
    prompt = len(request.prompt_tokens)
    ids = np.concatenate([request.prompt_tokens, generation.tokens_T]).astype(np.int64)
    ids_T = torch.from_numpy(ids).to(model.device)
    logits_TV = model(ids_T[None]).logits[0, prompt - 1 : -1].float() / temperature
    expected_T = logits_TV.log_softmax(-1).gather(-1, ids_T[prompt:, None])[:, 0]
    return float(np.abs(expected_T.cpu().numpy() - generation.logprobs_T).max())


async def _handovers(bench: Bench) -> None:
    """Let trainer and engine take turns on one GPU. Memory that stays grows from turn to turn."""
    config = qwen3(1024, 28, 3072, 16) if bench.gpu else TINY()
    model = random_model(config, bench.device).to(torch.bfloat16).eval()
    served = TransformersEngine(lambda: model, max_length=128)
    await served.start()
    await served.sleep()
    trainer = small_trainer(config, bench.device)
    samples = random_samples(512, [bench.size(1024, 48)] * 4)
    buckets = buckets_of(tensor_specs(trainer.export_weights()), BUCKET_BYTES)
    writer = BucketWriter(bench.folder, buckets, deltas=False)
    held, times = [], []
    for version in range(HANDOVERS):
        trainer.train_step(samples, LossSpec())
        begun = time.perf_counter()
        files = [bench.folder / each.bucket.file for each in _export(writer, trainer)]
        trainer.offload()
        await served.wake()
        await served.update_weights(_each(files), version)
        times.append(time.perf_counter() - begun)
        request = GenerationRequest(
            f"h{version}", "h", np.arange(8, dtype=np.int32), SamplingParams(16), 0
        )
        await served.generate(request)
        held.append(bench.allocated())
        await served.sleep()
        trainer.onload()
    await served.stop()
    growth = (held[-1] - held[1]) / 2**20
    bench.exact("growth over the turns of trainer and engine, MiB", growth, at_most=16)
    bench.measure("from the last gradient to the first request", min(times), "s")


def _export(writer: BucketWriter, trainer: PolicyTrainer) -> list[Any]:
    return list(writer.write(trainer.export_weights()))


async def _each(files: Iterable[Path]) -> AsyncIterator[Path]:
    for file in files:
        yield file
