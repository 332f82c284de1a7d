"""Between the first forward pass and the sampled tokens, no engine waits for its GPU.

The plug-ins run with stand-ins for the modules of SGLang and vLLM that they import.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig

from agenticrun_workers import inference
from agenticrun_workers.inference.server_path.agenticrun_sampling import on_device
from agenticrun_workers.inference.transformers import caches
from agenticrun_workers.inference.transformers.caches import (
    Forward,
    RunningRequest,
    Slot,
    SlotCache,
)
from agenticrun_workers.types import GenerationRequest, SamplingParams
from gpu_waits import CUDA, GpuWait, fake_gpu
from sampling_definition import sample as defined_sample
from sampling_definition import uniform

LAUNCHES = 30
"""Most launches of a token: 0.5 ms (gpu-check), at 16.5 us each, as 78 took 1.29 ms on one H200."""
ROWS, VOCABULARY = 4, 5000
FULL = ROWS * VOCABULARY
NOTHING: Any = None
INFERENCE = Path(inference.__file__).parent


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the plug-ins importable, and what they import of their servers."""
    before = set(sys.modules)
    for folder in ("server_path", "sglang/plugin", "vllm/plugin"):
        monkeypatch.syspath_prepend(str(INFERENCE / folder))

    def stand_in(name: str, **members: Any) -> None:
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    for package in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.sampling"):
        stand_in(package)
    for package in ("sglang.srt.utils", "vllm.v1", "vllm.v1.sample"):
        stand_in(package)
    stand_in("sglang.srt.managers.schedule_batch", FINISH_MATCHED_TOKEN=object)
    stand_in("sglang.srt.sampling.sampling_batch_info", SamplingBatchInfo=SglangBatch)
    stand_in("sglang.srt.utils.weight_versions", compute_weight_version_spans=None)
    processors = "vllm.v1.sample.logits_processor"
    stand_in("vllm", SamplingParams=object)
    stand_in("vllm.config", VllmConfig=object)
    stand_in(processors, BatchUpdate=object, LogitsProcessor=object)
    stand_in(f"{processors}.builtin", MinPLogitsProcessor=MinP, process_dict_updates=add_rows)
    stand_in("vllm.v1.sample.metadata", SamplingMetadata=object)
    stand_in("vllm.v1.sample.sampler", Sampler=VllmSampler)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("agenticrun_sglang", "agenticrun_vllm", "agenticrun_sampling")):
            del sys.modules[name]


@dataclasses.dataclass
class SglangBatch:
    """SGLang's `SamplingBatchInfo`, as far as the plug-in uses it."""

    temperatures: Tensor
    top_ps: Tensor
    top_ks: Tensor
    min_ps: Tensor
    device: str
    is_all_greedy: bool = False
    need_top_p_sampling: bool = True
    need_top_k_sampling: bool = True
    need_min_p_sampling: bool = True

    @classmethod
    def from_schedule_batch(cls, batch: Any, vocab_size: int) -> SglangBatch:
        def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return on_device([value] * len(batch.reqs), dtype, torch.device(batch.device))

        ks = column(50, torch.int32)
        return cls(column(0.7)[:, None], column(0.9), ks, column(0.1), batch.device)

    def filter_batch(self, keep_indices: list[int], keep_indices_device: Tensor) -> None:
        for name in ("temperatures", "top_ps", "top_ks", "min_ps"):
            setattr(self, name, getattr(self, name)[keep_indices_device])

    def merge_batch(self, other: SglangBatch) -> None:
        for name in ("temperatures", "top_ps", "top_ks", "min_ps"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))


def sglang_batch(device: str) -> SimpleNamespace:
    own = {"seed": 2**63 - 1, "sampled": 2, "record_temperature": 1.0}
    return SimpleNamespace(
        device=device,
        reqs=[
            SimpleNamespace(
                origin_input_ids=[1] * (5 + row),
                sampling_params=SimpleNamespace(temperature=0.7, custom_params=own),
            )
            for row in range(ROWS)
        ],
    )


@pytest.mark.usefixtures("servers")
@pytest.mark.parametrize("simple", [True, False])
def test_sglangs_plug_in(simple: bool) -> None:
    plugin: Any = importlib.import_module("agenticrun_sglang.sampler")
    with fake_gpu(FULL) as gpu:
        info = plugin.RequestBatch.from_schedule_batch(sglang_batch("cuda:0"), VOCABULARY)
        other = plugin.RequestBatch.from_schedule_batch(sglang_batch("cuda:0"), VOCABULARY)
        info.merge_batch(other)
        rows = list(range(0, 2 * ROWS, 2))
        info.filter_batch(rows, on_device(rows, torch.int64, CUDA))
        logits = SimpleNamespace(next_token_logits=torch.rand(ROWS, VOCABULARY, device=CUDA))

        def sample(_: Any, output: Any, info: Any, *rest: Any, **options: Any) -> Any:
            assert options["logprob_logits"].device == CUDA
            probs = output.next_token_logits.softmax(-1)
            positions = torch.arange(ROWS, device=CUDA)
            before = gpu.launches
            result = plugin.sample_from_probs(None, probs, info, positions, simple)
            assert not simple or gpu.launches - before <= LAUNCHES
            return result

        tokens, _ = plugin.forward(sample, None, logits, info, True)
    assert (tokens.shape, tokens.dtype, tokens.device) == ((ROWS,), torch.int32, CUDA)
    assert not gpu.lists


@pytest.mark.usefixtures("servers")
def test_sglangs_plug_in_counts_positions_from_the_first_token_of_the_response() -> None:
    plugin: Any = importlib.import_module("agenticrun_sglang.sampler")
    info = plugin.RequestBatch.from_schedule_batch(sglang_batch("cpu"), VOCABULARY)
    info.merge_batch(plugin.RequestBatch.from_schedule_batch(sglang_batch("cpu"), VOCABULARY))
    info.filter_batch([5, 2], torch.tensor([5, 2]))
    weights_BV = torch.rand(2, VOCABULARY).softmax(-1)
    # Two tokens of each response were sampled elsewhere; prompts end at positions 5 and 6.
    found, _ = plugin.sample_from_probs(None, weights_BV, info, torch.tensor([5, 9]), simple=True)
    numbers_B = [uniform(2**63 - 1, index) for index in (2, 5)]
    expected = defined_sample(weights_BV, torch.tensor(numbers_B, dtype=torch.float64))
    assert found.tolist() == expected.tolist()


class MinP:
    """vLLM's own min_p, which the plug-in replaces."""


class VllmSampler:
    """vLLM's `Sampler`, as far as the plug-in uses it."""

    def __init__(self, logprobs_mode: str) -> None:
        assert logprobs_mode == "processed_logprobs"

    def greedy_sample(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    def apply_temperature(self, logits: Tensor, temperature: Tensor, all_random: bool) -> Tensor:
        if not all_random:
            temperature = temperature.where(temperature > 0, 1)
        return logits.div_(temperature[:, None])


def add_rows(rows: dict[int, Any], update: Any, new_row: Any) -> None:
    if update is not None:
        rows |= {row: new_row(params, None, outputs) for row, params, outputs in update.added}


@pytest.mark.usefixtures("servers")
@pytest.mark.parametrize("cut", [False, True])
def test_vllms_plug_in(cut: bool) -> None:
    plugin: Any = importlib.import_module("agenticrun_vllm.sampler")
    params = SimpleNamespace(
        temperature=0.7, min_p=0.1 if cut else 0.0, extra_args={"seed": 2**63 - 1, "sampled": 2}
    )
    outputs: list[list[int]] = [[] for _ in range(ROWS)]
    update = SimpleNamespace(
        batch_size=ROWS, added=[(row, params, outputs[row]) for row in range(ROWS)]
    )
    with fake_gpu(FULL) as gpu:
        arguments = plugin.RequestArguments(None, CUDA, True)
        sampler = plugin.RequestSampler()
        metadata = SimpleNamespace(
            logitsprocs=SimpleNamespace(
                all=[MinP(), arguments], argmax_invariant=[MinP(), arguments]
            ),
            all_greedy=False,
            all_random=False,
            temperature=torch.full((ROWS,), 0.7, device=CUDA),
            top_k=torch.full((ROWS,), 50, dtype=torch.int32, device=CUDA) if cut else None,
            top_p=torch.full((ROWS,), 0.9, device=CUDA) if cut else None,
        )
        for change in (update, None):
            arguments.update_state(change)
            logits = torch.rand(ROWS, VOCABULARY, device=CUDA)
            tokens, logprobs = sampler.sample(logits, metadata)
            for row in outputs:
                row.append(1)
        before = gpu.launches
        plugin.sample(logits, arguments.uniforms())
        assert gpu.launches - before <= LAUNCHES
    assert (tokens.shape, logprobs.shape) == ((ROWS,), (ROWS, VOCABULARY))
    assert tokens.device == logprobs.device == CUDA
    assert not gpu.lists


@pytest.mark.usefixtures("servers")
@pytest.mark.parametrize("record", [None, 0.7, 1.0])
@pytest.mark.parametrize("temperatures", [(0.7, 1.3, 1.0), (0.7, 0.0, 1.3), (0.0, 0.0, 0.0)])
def test_vllms_plug_in_returns_tokens_and_log_probs_of_the_definition(
    record: float | None, temperatures: tuple[float, ...]
) -> None:
    """Bit for bit, also where one division by the temperature serves both."""
    plugin: Any = importlib.import_module("agenticrun_vllm.sampler")
    own = {"seed": 9, "sampled": 2} | ({} if record is None else {"record_temperature": record})
    rows = [SimpleNamespace(temperature=t, min_p=0.0, extra_args=own) for t in temperatures]
    arguments = plugin.RequestArguments(None, torch.device("cpu"), False)
    arguments.update_state(
        SimpleNamespace(
            batch_size=3, added=[(row, params, [1] * row) for row, params in enumerate(rows)]
        )
    )
    applied_B = torch.tensor(temperatures)
    metadata = SimpleNamespace(
        logitsprocs=SimpleNamespace(all=[arguments], argmax_invariant=[arguments]),
        all_greedy=not any(temperatures),
        all_random=all(temperatures),
        temperature=applied_B if any(temperatures) else None,
        top_k=None,
        top_p=None,
    )
    logits_BV = 4 * torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0))
    tokens_B, logprobs_BV = plugin.RequestSampler().sample(logits_BV.clone(), metadata)
    scaled_BV = logits_BV / applied_B.where(applied_B > 0, 1)[:, None]
    recorded_BV = scaled_BV if record is None else logits_BV / torch.tensor(record)
    assert torch.equal(logprobs_BV, recorded_BV.log_softmax(-1))
    numbers_B = torch.tensor([uniform(9, 2 + row) for row in range(3)], dtype=torch.float64)
    sampled_B = defined_sample(scaled_BV.softmax(-1), numbers_B)
    assert torch.equal(tokens_B, sampled_B.where(applied_B > 0, logits_BV.argmax(-1)))


def running(row: int, cache: SlotCache, **sampling: Any) -> RunningRequest:
    prompt_T = np.arange(10 + row, dtype=np.int32)
    request = GenerationRequest(f"r{row}", f"s{row}", prompt_T, SamplingParams(8, **sampling), row)
    result = RunningRequest(request, NOTHING, f"s{row}")
    result.slot = Slot(cache, row)
    return result


def test_the_embedded_engine_waits_once_a_step_for_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of one batch start at different positions, and have all kinds of sampling."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation="sdpa",
    )
    monkeypatch.setattr(caches, "split_model", lambda model: (model.model, model.lm_head))
    cache = SlotCache(ROWS, 64)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "record_temperature": 1.0},
        {"temperature": 0.5, "top_p": 0.5},
    ]
    mode = FakeTensorMode()
    with mode, torch.device(CUDA):
        model = AutoModelForCausalLM.from_config(config)
    with fake_gpu(FULL, mode) as gpu:
        forward = Forward(model)
        batch = [running(row, cache, **kind) for row, kind in enumerate(kinds)]
        for step in range(3):
            tokens, logprobs = forward(batch)
            assert len(tokens) == len(logprobs) == ROWS
            assert gpu.lists == [(2, ROWS)] * (step + 1)
            for row in batch:
                row.cached += row.pending
                row.sampled.append(1, 0.0, 0)
        cache.swap(0, 3, 5)
        cache.copy(0, 3, slice(0, 5))


@pytest.mark.parametrize(
    "wait",
    [
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.to("cpu", non_blocking=True),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: bool((tensor > 0).all()),
        lambda tensor: torch.ones(3).to(CUDA),
        lambda tensor: torch.ones(3).to(CUDA, non_blocking=True),
        lambda tensor: tensor.copy_(torch.ones(3)),
        lambda tensor: torch.tensor([1.0], device=CUDA),
    ],
)
def test_waits_are_found(wait: Any) -> None:
    with fake_gpu(FULL), pytest.raises(GpuWait):
        wait(torch.rand(3, device=CUDA))


def test_wide_tensors_are_found() -> None:
    with fake_gpu(FULL), pytest.raises(AssertionError, match="float64"):
        torch.rand(ROWS, VOCABULARY, device=CUDA).double()
