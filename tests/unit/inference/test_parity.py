"""A run whose engines compute another model than its trainer stops before its first step."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from agenticrun_api import Pipeline
from agenticrun_workers.driver.parity import ParityCheck
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.inference.parity import (
    BEYOND,
    LENGTH,
    SAMPLED,
    Parity,
    ParityProbe,
    ProbeSample,
)
from agenticrun_workers.inference.transformers import engine as embedded
from agenticrun_workers.inference.transformers.engine import TransformersEngine
from agenticrun_workers.trainer.fsdp2 import fsdp2_policy
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.parity import compare, make_probe, precision_of, quantizes
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest
from model_comparison import all_cases, random_model, tiny_config

CASES = {case.name: case for case in all_cases()}
CPU = torch.device("cpu")


def test_the_longest_conversation_exceeds_the_window_unless_the_run_has_no_such_sequences() -> None:
    def lengths(window: int, max_length: int) -> list[int]:
        probe = ParityProbe.make(100, window, max_length, 1.0)
        return [sum(map(len, prompts)) + 2 * probe.sampled for prompts in probe.prompts]

    assert lengths(0, 4096) == [LENGTH, 192, 128, 64]
    assert lengths(4096, 8192)[0] == 4096 + BEYOND
    assert lengths(4096, 4000)[0] == LENGTH
    assert lengths(16, 4096)[0] == LENGTH
    assert lengths(0, 8) == [8] * 4
    assert all(length <= 4100 for length in lengths(4096, 4100))


def test_windows_of_all_names_count() -> None:
    for name, option in (
        ("mistral", "sliding_window"),
        ("llama4_text, dense", "attention_chunk_size"),
    ):
        config = tiny_config(CASES[name])
        setattr(config, option, 1000)
        assert len(make_probe(config, 4096, 1.0).prompts[0][0]) == 1000 + BEYOND - 3 * SAMPLED


async def test_the_second_prompt_continues_the_first_response() -> None:
    seen: list[GenerationRequest] = []

    async def answer(requests: list[GenerationRequest]) -> list[Generation]:
        seen.extend(requests)
        count = requests[0].sampling.max_new_tokens
        tokens_T, logprobs_T = np.arange(count, dtype=np.int32), np.full(count, -2, np.float32)
        return [Generation(tokens_T, logprobs_T, tokens_T, FinishReason.LENGTH) for _ in requests]

    probe = ParityProbe.make(100, 0, 64, 0.7)
    played = await probe.play(answer, "engine")
    assert {request.sampling.record_temperature for request in seen} == {0.7}
    first, second = seen[0], seen[len(probe.prompts)]
    assert first.session == second.session
    assert (second.prompt_tokens[: len(first.prompt_tokens)] == first.prompt_tokens).all()
    sample = played[0]
    assert (sample.turns_T == 0).sum() == (sample.turns_T == 1).sum() == probe.sampled
    assert (sample.tokens_T[sample.turns_T == 1] == np.arange(probe.sampled)).all()
    assert set(sample.logprobs_T[sample.turns_T >= 0]) == {-2}
    assert (sample.tokens_T[: len(second.prompt_tokens)] == second.prompt_tokens).all()


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    """A policy that computes in bfloat16 makes the process group of a rank that is alone."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


async def gap_of(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, *, wrong: bool, packing: bool
) -> Parity:
    """Compare the embedded engine with a trainer; a wrong engine has no window."""
    config = tiny_config(CASES[name])
    policy: PolicyTrainer = fsdp2_policy(
        lambda: random_model(config, "sdpa"), OptimizerSpec(1e-3), packing=packing, dtype=dtype
    )
    monkeypatch.setattr(embedded, "check_parity", lambda *_: None)

    def load() -> Any:
        model = random_model(tiny_config(CASES[name]), "sdpa").to(dtype)
        if wrong:
            model.config.sliding_window = 4096
        return model

    engine = TransformersEngine(load, max_length=512)
    await engine.start()

    async def answer(requests: list[GenerationRequest]) -> list[Generation]:
        return [await engine.generate(request) for request in requests]

    played = await make_probe(config, 512, 1.0).play(answer, "engine")
    await engine.stop()
    precision = precision_of(dtype, CPU, quantized=False)
    return compare(policy, {"engine": played}, config.num_hidden_layers, precision)["engine"]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "olmo3", "nemotron"])
async def test_the_right_model_differs_less_than_rounding_explains(
    name: str, dtype: torch.dtype, packing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await gap_of(name, dtype, monkeypatch, wrong=False, packing=packing)
    assert found.gap < found.allowed / 3
    assert found.tokens == 4 * 2 * SAMPLED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "qwen2, sliding window"])
async def test_a_model_without_its_window_differs_more(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await gap_of(name, dtype, monkeypatch, wrong=True, packing=True)
    assert found.gap > 3 * found.allowed


def test_quantized_engines_may_differ_more() -> None:
    assert quantizes({"quantization": "fp8"})
    assert quantizes({"kv_cache_dtype": "fp8_e5m2"})
    assert not quantizes({"kv_cache_dtype": "auto", "tp_size": 2})
    assert precision_of(torch.bfloat16, CPU, quantized=True) == 2**-3


class Engine:
    """A handle of an engine that answers, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def call(self, _method: Any) -> list[Generation]:
        if self.error:
            raise self.error
        ids_T = np.arange(2, dtype=np.int32)
        return [Generation(ids_T, ids_T * 0.1, ids_T, FinishReason.LENGTH)] * 4


class Ranks:
    """Trainer ranks that find these differences."""

    def __init__(self, gaps: Mapping[str, float]) -> None:
        self.gaps = gaps

    async def parity_probe(self) -> ParityProbe:
        return ParityProbe.make(10, 0, 16, 1.0)

    async def parity(self, engines: Mapping[str, Sequence[ProbeSample]]) -> dict[str, Parity]:
        return {name: Parity(self.gaps[name], 0.01, 128) for name in engines}


async def checked(
    gaps: Mapping[str, float], *, failing: Mapping[str, Exception] | None = None, **guards: Any
) -> Any:
    config = {
        "maxSteps": 1,
        "evalSteps": 0,
        "rolloutBatchSize": 4,
        "envs": [{"tag": "A", "type": "frozen_lake"}],
        "trainEnvs": {"groups": 2, "groupSize": 2, "tags": ["A"]},
        "guards": guards,
    }
    engines: Any = type("Pool", (), {"engines": {n: Engine((failing or {}).get(n)) for n in gaps}})
    check = ParityCheck(Ranks(gaps), engines, Pipeline.model_validate(config))
    await check.sample()
    metrics, error = await check.compare()
    assert await check.compare() == ({}, None), "once"
    if error is not None:
        assert metrics
        raise error
    return metrics


async def test_the_largest_difference_is_a_metric() -> None:
    assert await checked({"a": 0.001, "b": 0.009}) == {"engine/parity_gap": 0.009}


async def test_another_model_ends_the_run_with_field_and_remedy() -> None:
    with pytest.raises(
        InvalidConfig,
        match=r"^spec.pipeline.actorInfer.strategy.name: the engine transformers computes another "
        r"model than the trainer: log-probs of 128 tokens that b sampled differ by 0.02 nats, "
        r"rounding explains 0.01. Choose another engine; .* guards.maxLogprobGap above 0.02",
    ):
        await checked({"a": 0.001, "b": 0.02})
    with pytest.raises(InvalidConfig):
        await checked({"a": float("nan")})


async def test_a_raised_guard_accepts_the_difference_and_its_default_does_not() -> None:
    assert await checked({"a": 0.2}, maxLogprobGap=0.3) == {"engine/parity_gap": 0.2}
    with pytest.raises(InvalidConfig):
        await checked({"a": 0.05}, maxLogprobGap=0.1)


async def test_an_engine_that_dies_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    died = {"a": RuntimeError("it died")}
    assert await checked({"a": 1.0, "b": 0.005}, failing=died) == {"engine/parity_gap": 0.005}
    assert "a cannot be compared with the trainer: it died" in caplog.text
    assert await checked({"a": 1.0}, failing=died) == {}


def test_the_driver_reads_results_without_torch() -> None:
    """Its import takes seconds before the first step, and hundreds of megabytes of the head."""
    code = (
        "import pickle, sys; "
        f"pickle.loads({pickle.dumps(Parity(0.1, 0.2, 3))!r}); "
        "import agenticrun_workers.driver.parity; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
