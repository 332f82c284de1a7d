"""vLLM's real server keeps what every engine promises, and starts or says why not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agenticrun_workers.inference import EngineStartError
from agenticrun_workers.inference.vllm.engine import VllmEngine
from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from engine_conformance import (
    Models,
    ServerConformance,
    ask,
    check_mixture,
    prompt,
    same_logprobs,
)
from tiny_model import CONTEXT

pytestmark = pytest.mark.asyncio(loop_scope="module")

SMALL = {"kv_cache_memory_bytes": 64 * 2**20, "max_num_seqs": 64, "max_num_batched_tokens": 64}
"""Prompts above 64 tokens are computed in pieces, as long ones are everywhere."""


def an_engine(
    folder: Path,
    logs: Path,
    *,
    max_length: int = CONTEXT,
    restart: bool = False,
    config: Mapping[str, Any] = SMALL,
) -> VllmEngine:
    return VllmEngine(
        folder,
        dtype="float32",
        max_length=max_length,
        restart_on_update=restart,
        log_folder=logs,
        config=config,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(
    models: Models, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[VllmEngine, VllmEngine]]:
    """Started at the same time: most of a start is imports."""
    logs = tmp_path_factory.mktemp("logs")
    engines = an_engine(models.a, logs), an_engine(models.b, logs, restart=True)
    await asyncio.gather(*(engine.start() for engine in engines))
    yield engines
    await asyncio.gather(*(engine.stop() for engine in engines))


@pytest.fixture(scope="module")
def engine(both: tuple[VllmEngine, VllmEngine]) -> VllmEngine:
    return both[0]


@pytest.fixture(scope="module")
def fresh(both: tuple[VllmEngine, VllmEngine]) -> VllmEngine:
    return both[1]


class TestBeforeTheRest:
    async def test_a_seeded_prompt_that_is_computed_in_pieces_does_no_harm(
        self, engine: VllmEngine, models: Models
    ) -> None:
        """vLLM's own seeds end the server there."""
        requests = [ask(prompt(150 + n, n), 20, seed=n) for n in range(6)]
        for request, generation in zip(
            requests, await asyncio.gather(*map(engine.generate, requests)), strict=True
        ):
            same_logprobs(models.plain_a, request, generation)


class TestVllm(ServerConformance):
    """Its last tests end both engines."""


async def test_a_mixture_of_experts_samples_with_the_weights_of_its_trainer(tmp_path: Path) -> None:
    await check_mixture(lambda folder: an_engine(folder, tmp_path), tmp_path)


async def test_a_model_that_does_not_know_so_long_sequences_is_refused_at_once(
    models: Models, tmp_path: Path
) -> None:
    with pytest.raises(
        EngineStartError,
        match=f"sequences of {CONTEXT + 1} tokens do not fit into the model's context of {CONTEXT}",
    ):
        await an_engine(models.a, tmp_path, max_length=CONTEXT + 1).start()


async def test_heads_that_vllm_cannot_compute_on_a_cpu_are_refused_at_once(tmp_path: Path) -> None:
    initialize_model(
        tmp_path,
        InitializeSpec(("a", "b"), hidden_size=64, heads=4, max_position_embeddings=CONTEXT),
    )
    with pytest.raises(
        EngineStartError, match="heads have 16 dimensions; on CPUs vLLM supports 32, 64"
    ):
        await an_engine(tmp_path, tmp_path).start()


async def test_an_option_that_vllm_does_not_know_is_named_by_the_start_error(
    models: Models, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match="unrecognized arguments: --no-such-option=1"):
        await an_engine(models.a, tmp_path, config={"no_such_option": 1}).start()


async def test_a_missing_environment_says_what_to_do(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTICRUN_ENGINES", str(tmp_path))
    with pytest.raises(EngineStartError, match=r"vllm is not installed.*make engines"):
        await an_engine(models.a, tmp_path).start()
