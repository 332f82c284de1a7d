"""Weights, requests and comparisons for the tests of engines."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypedDict, Unpack

import numpy as np
import torch
from transformers import PreTrainedModel

from agenticrun_workers.inference import InferenceEngine
from agenticrun_workers.inference.engine import ReportsProgress
from agenticrun_workers.models.pretrained import load_model
from agenticrun_workers.types import Generation, GenerationRequest, IntArray, SamplingParams
from tiny_model import VOCABULARY, plain_logprobs, tiny_model, weight_parts

EXACT = 1e-4
"""Largest difference of log-probs in float32: a kernel adds in another order."""
MEAN = 1e-5
DELAYS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Seconds after which a response is half done, on fast and slow machines."""
_numbers = itertools.count()


@dataclass
class Models:
    """The weights that the tests use: as folders, as a trainer's files, and as plain models."""

    folder: Path
    a: Path = field(init=False)
    b: Path = field(init=False)
    parts_a: list[Path] = field(init=False)
    parts_b: list[Path] = field(init=False)
    plain_a: PreTrainedModel = field(init=False)
    plain_b: PreTrainedModel = field(init=False)

    def __post_init__(self) -> None:
        self.a, self.b = (
            tiny_model(self.folder / "a", seed=0),
            tiny_model(self.folder / "b", seed=1),
        )
        self.parts_a, self.parts_b = (
            weight_parts(self.a, self.folder / "parts-a"),
            weight_parts(self.b, self.folder / "parts-b"),
        )
        self.plain_a, self.plain_b = (
            load_model(str(folder), device=torch.device("cpu")) for folder in (self.a, self.b)
        )


class SamplingOptions(TypedDict, total=False):
    """Optional fields of `SamplingParams`."""

    top_p: float
    top_k: int
    min_p: float
    stop_token_ids: tuple[int, ...]
    record_temperature: float | None


def prompt(length: int, seed: int = 0) -> IntArray:
    return np.random.default_rng(seed).integers(VOCABULARY, size=length).astype(np.int32)


def ask(
    prompt_T: IntArray,
    new: int = 8,
    temperature: float = 1.0,
    *,
    seed: int = 0,
    session: str = "s",
    **sampling: Unpack[SamplingOptions],
) -> GenerationRequest:
    return GenerationRequest(
        f"r-{next(_numbers)}", session, prompt_T, SamplingParams(new, temperature, **sampling), seed
    )


async def files(paths: Sequence[Path]) -> AsyncIterator[Path]:
    for path in paths:
        yield path


def same_logprobs(
    model: PreTrainedModel,
    request: GenerationRequest,
    generation: Generation,
    temperature: float = 1.0,
) -> None:
    expected_T = plain_logprobs(model, request.prompt_tokens, generation.tokens_T, temperature)
    difference_T = np.abs(generation.logprobs_T - expected_T)
    assert difference_T.max() < EXACT
    assert difference_T.mean() < MEAN


class ObservedEngine(InferenceEngine, ReportsProgress, Protocol):
    """An engine that shows what it has sampled, as all of ours do."""


async def observed(engine: ObservedEngine, request: GenerationRequest) -> tuple[Generation, ...]:
    """A response, and the parts of it that the engine showed before it ended."""
    response = asyncio.create_task(engine.generate(request))
    parts, shown = [], 0
    while not response.done():
        if (part := engine.progress(request.request_id, shown)) is not None:
            parts.append(part)
            shown += len(part.tokens_T)
        await asyncio.sleep(0.001)
    return await response, *parts


async def half_done(
    engine: InferenceEngine,
    act: Callable[[], Awaitable[object]],
    request: GenerationRequest,
    delay: float,
) -> Generation:
    """A response, with something done to the engine `delay` seconds after it was asked for."""
    response = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(delay)
    await act()
    return await asyncio.wait_for(response, 60)
