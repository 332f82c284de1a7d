"""Deterministic mode: no bit of a response depends on other requests; responses of one version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agenticrun_workers.inference.transformers.engine import TransformersEngine
from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, SamplingParams
from loaded_models import loaded
from weight_files import weight_files

WORDS = tuple("abcdefghijklmnop")
VOCABULARY = len(WORDS) + 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    initialize_model(
        path,
        InitializeSpec(
            WORDS, "llama", hidden_size=64, intermediate_size=96, heads=4, initializer_range=0.3
        ),
    )
    return path


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(
        lambda: loaded(folder), **{"max_length": 400, "batch_invariant": True, **options}
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


class Episodes:
    """Conversations of three turns whose next message depends on the last answer."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.bits: dict[tuple[int, int], bytes] = {}

    async def play(
        self,
        engines: list[TransformersEngine],
        order: np.random.Generator,
        weights: dict[str, Any] | None = None,
    ) -> None:
        async def episode(number: int) -> None:
            context = (
                np.random.default_rng(number)
                .integers(VOCABULARY, size=5 + 17 * number)
                .astype(np.int32)
            )
            for turn in range(3):
                for _ in range(int(order.integers(4))):
                    await asyncio.sleep(0)
                engine = engines[int(order.integers(len(engines)))]
                request = GenerationRequest(
                    f"{number}-{turn}",
                    str(number),
                    context,
                    SamplingParams(6, 0.8),
                    seed=number * 31 + turn,
                )
                answer = await engine.generate(request)
                self.bits[number, turn] = answer.tokens_T.tobytes() + answer.logprobs_T.tobytes()
                more = (
                    np.random.default_rng(int(answer.tokens_T.sum()))
                    .integers(VOCABULARY, size=4)
                    .astype(np.int32)
                )
                context = np.concatenate([context, answer.tokens_T, more])

        if weights is not None:
            for engine in engines:
                await engine.update_weights(weight_files(weights), 1)
        await asyncio.gather(*(episode(int(number)) for number in order.permutation(self.count)))


def bits(
    folder: Path, seed: int, engines: int, weights: dict[str, Any] | None = None, **options: Any
) -> dict[tuple[int, int], bytes]:
    async def work() -> dict[tuple[int, int], bytes]:
        episodes = Episodes(12)
        async with serving(folder, **options) as first, serving(folder, **options) as second:
            await episodes.play([first, second][:engines], np.random.default_rng(seed), weights)
        return episodes.bits

    return asyncio.run(asyncio.wait_for(work(), 120))


def test_evictions_several_engines_and_the_order_of_arrival_change_no_bit(folder: Path) -> None:
    expected = bits(folder, seed=0, engines=1)
    assert bits(folder, seed=1, engines=2) == expected
    assert bits(folder, seed=2, engines=2, max_sessions=3) == expected
    assert bits(folder, seed=3, engines=1, max_sessions=1) == expected


def test_updated_weights_give_the_bits_of_a_model_loaded_with_them(
    folder: Path, tmp_path: Path
) -> None:
    changed = loaded(folder)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(
                0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    changed.save_pretrained(tmp_path)
    weights = {name: parameter.detach().numpy() for name, parameter in changed.named_parameters()}
    assert bits(folder, 0, 1, weights) == bits(tmp_path, 1, 2)


def test_one_request_among_others_is_computed_without_them(folder: Path) -> None:
    """Not even a long neighbour that joins in the middle changes a bit."""

    async def work() -> list[bytes]:
        found = []
        for neighbours in (0, 5):
            async with serving(folder) as engine:
                request = GenerationRequest(
                    "r", "s", np.arange(9, dtype=np.int32), SamplingParams(30), seed=4
                )
                running = asyncio.create_task(engine.generate(request))
                for number in range(neighbours):
                    prompt = np.full(3 + 40 * number, 2, np.int32)
                    neighbour = GenerationRequest(
                        f"n{number}", "s", prompt, SamplingParams(20), seed=number
                    )
                    asyncio.create_task(engine.generate(neighbour))  # noqa: RUF006
                answer = await running
                found.append(answer.tokens_T.tobytes() + answer.logprobs_T.tobytes())
        return found

    alone, among = asyncio.run(work())
    assert alone == among


async def interrupted(folder: Path, **options: Any) -> tuple[Generation, int]:
    """A response during which the weights change, and the tokens that the engine threw away."""
    weights = {
        name: parameter.detach().numpy() * 1.1
        for name, parameter in loaded(folder).named_parameters()
    }
    async with serving(folder, batch_invariant=False, **options) as engine:
        running = asyncio.create_task(
            engine.generate(
                GenerationRequest("r", "s", np.arange(9, dtype=np.int32), SamplingParams(60), 4)
            )
        )
        while engine.stats().generated_tokens < 10:
            await asyncio.sleep(0.001)
        await engine.update_weights(weight_files(weights), 3)
        answer = await running
        again = await engine.generate(
            GenerationRequest("again", "t", np.arange(9, dtype=np.int32), SamplingParams(60), 4)
        )
        if options:
            np.testing.assert_array_equal(answer.tokens_T, again.tokens_T)
        return answer, engine.stats().aborted_tokens


async def test_without_partial_rollout_a_response_has_one_version_and_dropped_tokens_are_counted(
    folder: Path,
) -> None:
    answer, thrown_away = await interrupted(folder, restart_on_update=True)
    assert answer.versions_T.tolist() == [3] * 60
    assert (answer.finish, thrown_away >= 10) == (FinishReason.LENGTH, True)


async def test_with_partial_rollout_a_response_goes_on_and_nothing_is_thrown_away(
    folder: Path,
) -> None:
    answer, thrown_away = await interrupted(folder)
    assert sorted(set(answer.versions_T.tolist())) == [0, 3]
    assert thrown_away == 0


async def test_the_tokens_of_an_aborted_request_are_counted(folder: Path) -> None:
    async with serving(folder) as engine:
        running = asyncio.create_task(
            engine.generate(
                GenerationRequest("r", "s", np.arange(9, dtype=np.int32), SamplingParams(300))
            )
        )
        while engine.stats().generated_tokens < 5:
            await asyncio.sleep(0.001)
        await engine.abort(["r"])
        assert engine.stats().aborted_tokens == len((await running).tokens_T) >= 5
