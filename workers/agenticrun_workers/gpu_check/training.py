"""Stages `kernels`, `ranks`, `train` and `checkpoint`: what a trainer pod computes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from threading import Thread

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config

from agenticrun_workers.gpu_check.stages import Bench, relative_error
from agenticrun_workers.models.devices import set_deterministic
from agenticrun_workers.models.shape import read_shape
from agenticrun_workers.sizing.memory import Layout, model_memory, total
from agenticrun_workers.sizing.published import published_config
from agenticrun_workers.trainer import log_probs
from agenticrun_workers.trainer.actor_loss import LossSpec
from agenticrun_workers.trainer.checkpoint import SnapshotWriter
from agenticrun_workers.trainer.fsdp2 import fsdp2_policy
from agenticrun_workers.trainer.micro_batch import MicroBatcher, weighted
from agenticrun_workers.trainer.modules import PolicyModule
from agenticrun_workers.trainer.optimizer import Optimizer, OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.trainer.ranks import Ranks, leave_ranks, local
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.trainer.sharded_module import FsdpOptions, ShardedModule

GIB = 2**30
MOST_GIB = 75
"""GPU memory that a rank may take of an 80 GB card; the rest is CUDA's and NCCL's."""
RATE = 1e-3


def qwen3(
    hidden: int, layers: int, mlp: int, heads: int, kv_heads: int = 8, vocabulary: int = 151_936
) -> Qwen3Config:
    """Return the config of a model with the architecture of Qwen3."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128 if hidden >= 1024 else 32,
        max_position_embeddings=65_536,
        tie_word_embeddings=hidden <= 1024,
        attn_implementation="sdpa",
    )


TINY = partial(qwen3, 64, 2, 128, 2, 1, 512)


def random_model(config: PretrainedConfig, device: torch.device) -> PreTrainedModel:
    """Make a float32 model with random weights, the same on every device."""
    torch.manual_seed(0)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32
        )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))
    return model


def random_samples(vocabulary: int, lengths: list[int]) -> list[Sample]:
    """Return samples whose second half was sampled by a policy, with advantages of both signs."""
    random = np.random.default_rng(0)
    samples = []
    for number, length in enumerate(lengths):
        weight_T = (np.arange(length) >= length // 2).astype(np.float32)
        samples.append(
            Sample(
                random.integers(vocabulary, size=length).astype(np.int32),
                weight_T,
                weight_T * np.float32(1 - 2 * (number % 2)),
                np.where(weight_T > 0, 0, -1).astype(np.int32),
            )
        )
    return samples


def kernels(bench: Bench) -> None:
    """Chunked log-probs against float64, packed rows against padded ones, AdamW, and times."""
    _log_probs(bench)
    _packing(bench)
    _adamw(bench)


def _log_probs(bench: Bench) -> None:
    vocabulary, hidden = bench.size(151_936, 1_000), bench.size(4096, 64)
    tokens = bench.size(2048, 64)
    torch.manual_seed(0)
    hidden_NH = torch.randn(tokens, hidden, device=bench.device)
    weight_VH = torch.randn(vocabulary, hidden, device=bench.device) / hidden**0.5
    targets_N = torch.randint(vocabulary, (tokens,), device=bench.device)
    given = (hidden_NH, weight_VH)
    for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 1e-2)):
        inputs = [each.detach().to(dtype, copy=True).requires_grad_() for each in given]
        wide = [each.detach().double().requires_grad_() for each in inputs]
        found = _score(inputs, targets_N, bench.size(2**27, 2**14))
        expected = _score(wide, targets_N, bench.size(2**26, 2**14))
        for name, one, other in zip(
            ("log-probs", "entropies", "gradient of hidden states", "gradient of weights"),
            (*found, *(each.grad for each in inputs)),
            (*expected, *(each.grad for each in wide)),
            strict=True,
        ):
            assert one is not None
            assert other is not None
            error = relative_error(one.detach(), other.detach())
            bench.exact(f"relative error of {name} in {dtype}", error, at_most=bound)
    tokens = bench.size(16_384, 64)
    inputs = [
        torch.randn(tokens, hidden, device=bench.device, dtype=torch.bfloat16).requires_grad_(),
        weight_VH.bfloat16().requires_grad_(),
    ]
    targets_N = torch.randint(vocabulary, (tokens,), device=bench.device)
    taken = bench.seconds(lambda: _score(inputs, targets_N, bench.size(2**27, 2**14)))
    bench.measure(f"log-probs of {tokens} tokens, forward and backward", taken * 1e3, "ms")
    # Logits, their recomputation, and two products of the backward pass.
    rate = 4 * 2 * tokens * vocabulary * hidden / taken / 1e12
    bench.measure("matrix products of it", rate, "TFLOP/s")


def _score(inputs: list[Tensor], targets_N: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies after a backward pass through both."""
    hidden_NH, weight_VH = inputs
    logprobs_N, entropies_N = log_probs.score(hidden_NH, weight_VH, None, targets_N, 0.8, chunk)
    for each in inputs:
        each.grad = None
    (logprobs_N.mean() + 0.1 * entropies_N.mean()).backward()  # type: ignore[no-untyped-call]
    return logprobs_N, entropies_N


def _packing(bench: Bench) -> None:
    config = qwen3(1024, 4, 3072, 16) if bench.gpu else TINY()
    lengths = [bench.size(each, each // 64) for each in (4096, 2048, 1920, 1024, 512)]
    samples = random_samples(config.vocab_size, lengths)
    found = {}
    for packing in (False, True):
        trainer = small_trainer(config, bench.device, packing=packing)
        found[packing] = np.concatenate(trainer.compute_log_probs(samples))
        taken = bench.seconds(partial(trainer.compute_log_probs, samples))
        kind = "packed" if packing else "padded"
        bench.measure(f"log-probs of {sum(lengths)} tokens, {kind}", taken * 1e3, "ms")
    gap = np.abs(found[True] - found[False]).mean()
    bench.exact("packed against padded, mean |log-prob|", gap, at_most=0.02)
    leave_ranks()


def _adamw(bench: Bench) -> None:
    count = bench.size(2**27, 2**12)
    layer = nn.Linear(count // 64, 64, bias=False, device=bench.device)
    before = layer.weight.detach().double().clone()
    spec = OptimizerSpec(RATE, weight_decay=0.1, max_grad_norm=1e9)
    optimizer = Optimizer(layer, spec, Ranks(bench.device))
    gradient = torch.randn_like(layer.weight)
    layer.weight.grad = gradient.clone()
    optimizer.step(RATE)
    direction = gradient.double() / (gradient.double().abs() + spec.epsilon)
    expected = before * (1 - RATE * spec.weight_decay) - RATE * direction
    bench.exact("AdamW, relative error", relative_error(layer.weight, expected), at_most=1e-6)

    def step() -> None:
        layer.weight.grad = gradient
        optimizer.adamw.step()

    taken = bench.seconds(step)
    # Weight, gradient and two moments are read, and three of them written.
    bench.measure("AdamW", 7 * 4 * count / taken / 1e9, "GB/s")


@dataclass(frozen=True)
class Shape:
    """A model on a number of ranks, of which the stage is the first."""

    name: str
    ranks: int
    config: Callable[[], PretrainedConfig]


def _published(name: str, ranks: int) -> Shape:
    made = partial(
        published_config, name, max_position_embeddings=65_536, attn_implementation="sdpa"
    )
    return Shape(name.rpartition("/")[2], ranks, made)


SHAPES = (
    _published("Qwen/Qwen3-8B", 8),
    _published("Qwen/Qwen3-32B", 16),
    _published("Qwen/Qwen3-30B-A3B", 16),
)


def ranks(bench: Bench) -> None:
    """The first of 8 and 16 ranks, for real: its shards, its steps, its peak of memory.

    The process group is torch's fake one: collectives move nothing, so values mean nothing, but
    every tensor of a rank exists on the GPU. Communication takes no time.
    """
    shapes = SHAPES if bench.gpu else (Shape("a tiny model", 8, TINY),)
    for shape in shapes:
        try:
            _first_rank(bench, shape)
        except torch.OutOfMemoryError:
            bench.measure(f"{shape.name}, first of {shape.ranks}", torch.inf, "GiB", at_most=0)
        finally:
            leave_ranks()
            bench.forget_peak()


class _Unprobed(ShardedModule[PolicyModule]):
    """A policy that is sharded as a run's, but has no weights yet, and is not probed.

    Args:
        model: on the meta device.
        device: of the computation.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.device = device
        self.ranks = Ranks(device)
        self._options = FsdpOptions(gradient_checkpointing=True)
        self._arrange(PolicyModule(model), torch.bfloat16, sharded=True)
        self.module.to_empty(device=device)


def _first_rank(bench: Bench, shape: Shape) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shape.ranks)
    bench.forget_peak()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.float32)
    sharded = _Unprobed(model, bench.device)
    module = sharded.module
    _restore_buffers(module.decoder, shape.config(), bench.device)
    with torch.no_grad():
        for weight in module.parameters():
            local(weight).normal_(std=0.02)
    optimizer = Optimizer(module, OptimizerSpec(1e-6), sharded.ranks)
    tokens = bench.size(16_384, 64)
    batcher = MicroBatcher(sharded.ranks, bench.device, tokens, packed=False)
    batch = batcher.split(random_samples(model.config.vocab_size, [tokens]), weighted)[0]
    times = []
    for _ in range(2):
        # Two micro-batches: the second one's gradients are added to those of the first.
        for _ in range(2):
            begun = time.perf_counter()
            logprobs_N, _ = module(batch, 1.0)
            logprobs_N.sum().backward()
            bench.wait()
            times.append(time.perf_counter() - begun)
        optimizer.adamw.step()
        optimizer.adamw.zero_grad()
    name = f"{shape.name}, first of {shape.ranks}"
    bench.measure(f"{name}, most memory", bench.peak() / GIB, "GiB", at_most=MOST_GIB)
    # `agenticrun plan` also counts what CUDA itself takes, which the peak here does not include.
    layout = Layout("fsdp2", shape.ranks, 2, tokens, recompute=True)
    memory = model_memory(read_shape(shape.config()), layout, "")
    share = bench.peak() / (
        total(memory.device) + max(total(items) for items in memory.phases.values())
    )
    bench.measure(f"{name}, of what agenticrun plan says", share, "", at_least=0.9, at_most=1.1)
    bench.measure(f"{name}, micro-batch of {tokens} tokens without communication", times[-1], "s")


def _restore_buffers(decoder: nn.Module, config: PretrainedConfig, device: torch.device) -> None:
    """Compute buffers, such as the rotary frequencies, that `to_empty` has left without values."""
    for part in decoder.modules():
        if next(part.buffers(recurse=False), None) is not None:
            made = type(part)(config=config).to(device)
            for name, buffer in made.named_buffers(recurse=False):
                part.register_buffer(name, buffer, persistent=False)


def train(bench: Bench) -> None:
    """Three GRPO steps in bfloat16 against float32 on the CPU; equal twice; offload and back."""
    config = qwen3(1024, 28, 3072, 16) if bench.gpu else TINY()
    samples = random_samples(512, [bench.size(1024, 48)] * bench.size(8, 4))
    set_deterministic(True)  # as `pipeline.deterministic` does
    first, second = (_three_steps(bench.device, torch.bfloat16) for _ in range(2))
    set_deterministic(False)
    differ = sum(a != b for a, b in zip(first, second, strict=True))
    bench.exact("steps that differ when repeated", differ, at_most=0)
    expected = _three_steps(torch.device("cpu"), torch.float32)
    for key, bound in (("actor/entropy", 0.01), ("actor/grad_norm", 0.05)):
        gaps = [abs(a[key] / b[key] - 1) for a, b in zip(first, expected, strict=True)]
        bench.exact(f"{key} in bfloat16 against float32 on the CPU", max(gaps), at_most=bound)
    leave_ranks()
    before = bench.allocated()
    trainer = small_trainer(config, bench.device)
    taken = bench.seconds(lambda: _step(trainer, samples), 2)
    tokens = sum(len(sample.tokens_T) for sample in samples)
    bench.measure("training of a model like Qwen3-0.6B", tokens / taken, "tokens per second")
    held = bench.allocated()
    # The first offload of a run also page-locks its host memory.
    (slow, _, _), (away, back, left) = (_there_and_back(bench, trainer) for _ in range(2))
    bench.measure("memory after offload", (left - before) / 2**20, "MiB", at_most=64)
    moved = (held - before) / 1e9
    bench.measure("the first offload, which allocates", moved / slow, "GB/s")
    bench.measure("offload", moved / away, "GB/s", at_least=20)
    bench.measure("onload", moved / back, "GB/s", at_least=20)
    skipped = _step(trainer, samples)["actor/skipped_steps"]
    bench.exact("steps after onload that are not finite", skipped, at_most=0)


def _there_and_back(bench: Bench, trainer: PolicyTrainer) -> tuple[float, float, int]:
    """Offload and onload; return the seconds of each, and the bytes on the GPU between them."""
    begun = time.perf_counter()
    trainer.offload()
    bench.wait()
    away = time.perf_counter() - begun
    left = bench.allocated()
    begun = time.perf_counter()
    trainer.onload()
    bench.wait()
    return away, time.perf_counter() - begun, left


def _three_steps(device: torch.device, dtype: torch.dtype) -> list[dict[str, float]]:
    """Return the metrics of three steps of a model that a CPU trains in a moment."""
    trainer = small_trainer(TINY(), device, dtype)
    return [_step(trainer, random_samples(512, [48] * 4)) for _ in range(3)]


def small_trainer(
    config: PretrainedConfig,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    packing: bool = True,
) -> PolicyTrainer:
    """Return a trainer of one rank, as a run's with `strategy.name: fsdp2`."""
    leave_ranks()
    return fsdp2_policy(
        lambda: random_model(config, device),
        OptimizerSpec(1e-4),
        dtype=dtype,
        packing=packing,
        options=FsdpOptions(gradient_checkpointing=True),
    )


def _step(trainer: PolicyTrainer, samples: list[Sample]) -> dict[str, float]:
    return dict(trainer.train_step(samples, LossSpec(entropy_coef=0.01)))


def checkpoint(bench: Bench) -> None:
    """Two checkpoints of 12 bytes for each parameter: how long training stops, and a resume."""
    config = qwen3(2048, 16, 6144, 16) if bench.gpu else TINY()
    samples = random_samples(512, [bench.size(1024, 48)] * 4)
    # Otherwise equal states take different steps on a GPU.
    set_deterministic(True)
    continued = _save_twice(bench, small_trainer(config, bench.device), samples)
    bench.forget_peak()
    resumed = small_trainer(config, bench.device)
    begun = time.perf_counter()
    resumed.load(str(bench.folder / "second"))
    bench.measure("load of the checkpoint", time.perf_counter() - begun, "s")
    again = [_step(resumed, samples) for _ in range(2)]
    set_deterministic(False)
    differ = sum(a != b for a, b in zip(continued, again, strict=True))
    bench.exact("steps after a resume that differ", differ, at_most=0)


def _save_twice(
    bench: Bench, trainer: PolicyTrainer, samples: list[Sample]
) -> list[dict[str, float]]:
    """Save two checkpoints while the trainer trains; return the metrics of the steps after."""

    def step() -> dict[str, float]:
        metrics = _step(trainer, samples)
        bench.wait()
        return metrics

    bench.measure("a step", bench.seconds(step, 2), "s")
    # As in a run, where it happens during the first rollout.
    begun = time.perf_counter()
    reserving = Thread(target=trainer.reserve_snapshot())
    reserving.start()
    times = _times(step, reserving.is_alive)
    bench.measure("page-locking of the copy's memory", time.perf_counter() - begun, "s")
    bench.measure("a step during the page-locking", fmean(times), "s")
    continued: list[dict[str, float]] = []
    with closing(SnapshotWriter()) as writer:
        for number in ("first", "second"):
            folder = bench.folder / number
            begun = time.perf_counter()
            writer.write("actor_train", trainer, folder)
            stopped = time.perf_counter() - begun
            name = f"training stops for the {number} checkpoint"
            bench.measure(name, stopped, "s", at_most=1.5)
            continued = [step(), step()]
            times = _times(step, lambda: not writer.is_durable("actor_train"))
            durable = time.perf_counter() - begun
            bench.measure(f"until the {number} checkpoint is durable", durable, "s")
            bench.measure(f"a step while the {number} is written", fmean(times), "s")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    bench.measure("a checkpoint", size / 1e9, "GB")
    return continued


def _times(step: Callable[[], object], lasts: Callable[[], bool]) -> list[float]:
    """Return the seconds of each step: one, and more while `lasts` is true."""
    times: list[float] = []
    while not times or lasts():
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return times
