"""vLLM's real server keeps what every engine promises, and starts or says why not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from agenticrun_workers.inference import EngineError, EngineStartError, TransformersEngine
from agenticrun_workers.inference.ports import free_port
from agenticrun_workers.inference.vllm_engine import VllmEngine
from agenticrun_workers.models import InitializeSpec, initialize_model, load_model
from agenticrun_workers.weight_sync.broadcast import WeightGroup
from engine_conformance import Models, ServerConformance, ask, files, prompt, same_logprobs
from tiny_model import CONTEXT

pytestmark = pytest.mark.asyncio(loop_scope="module")

SMALL = {"kv_cache_memory_bytes": 64 * 2**20, "max_num_seqs": 64, "max_num_batched_tokens": 64}
"""Prompts above 64 tokens are computed in pieces, as long ones are everywhere."""


def an_engine(
    folder: Path, logs: Path, *, max_length: int = CONTEXT, restart: bool = False, config: Mapping[str, Any] = SMALL
) -> VllmEngine:
    return VllmEngine(folder, dtype="float32", max_length=max_length, restart_on_update=restart, log_folder=logs, config=config)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(models: Models, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[VllmEngine, VllmEngine]]:
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


class TestWhatIsPeculiarToVllm:
    async def test_a_seeded_prompt_that_is_computed_in_pieces_does_no_harm(self, engine: VllmEngine, models: Models) -> None:
        """vLLM's own seeds end the server there."""
        requests = [ask(prompt(150 + n, n), 20, seed=n) for n in range(6)]
        for request, generation in zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True):
            same_logprobs(models.plain_a, request, generation)

    async def test_an_abort_reaches_requests_that_are_still_on_their_way(self, engine: VllmEngine) -> None:
        responses = [asyncio.create_task(engine.generate(ask(prompt(4, n), 450))) for n in range(4)]
        await asyncio.sleep(0)
        await engine.abort()
        assert [len((await asyncio.wait_for(response, 10)).tokens_T) < 450 for response in responses] == [True] * 4

    async def test_requests_of_a_paused_engine_can_be_aborted_and_keep_what_was_sampled(self, engine: VllmEngine) -> None:
        response = asyncio.create_task(engine.generate(ask(prompt(4), 450)))
        await asyncio.sleep(0.3)
        await engine.pause()
        await engine.abort()
        assert 0 < len((await asyncio.wait_for(response, 10)).tokens_T) < 450
        await engine.resume()

    async def test_the_same_seed_samples_the_same_as_in_the_embedded_engine(self, engine: VllmEngine, models: Models) -> None:
        """Also where top_k, top_p or min_p cut the distribution, and after a pause in the middle of the response."""
        embedded = TransformersEngine(partial(load_model, str(models.a)), max_length=CONTEXT)
        await embedded.start()
        cuts: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}]
        requests = [ask(prompt(9 + n, n), 100, 0.8, seed=2**63 + n, **cuts[n % 4]) for n in range(8)]
        responses = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0.05)
        await engine.pause()
        await engine.resume()
        for request, generation in zip(requests, await asyncio.gather(*responses), strict=True):
            assert generation.tokens_T.tolist() == (await embedded.generate(request)).tokens_T.tolist()
        await embedded.stop()

    async def test_weights_come_by_the_trainers_broadcast_too(self, engine: VllmEngine, models: Models) -> None:
        weights = load_file(models.b / "model.safetensors")
        trainer = await self.meet(engine)
        names, shapes = list(weights), [list(weight.shape) for weight in weights.values()]
        sent = asyncio.to_thread(lambda: [trainer.send(weight) for weight in weights.values()])
        await asyncio.gather(engine.update_from_broadcast(names, ["float32"] * len(names), shapes, 3), sent)
        request = ask(prompt(5), 6, 0.0)
        generation = await engine.generate(request)
        same_logprobs(models.plain_b, request, generation)
        assert set(generation.versions_T.tolist()) == {3}

    async def test_a_trainer_that_is_lost_in_its_broadcast_leaves_an_engine_that_takes_the_next_weights(
        self, engine: VllmEngine, models: Models
    ) -> None:
        weights = load_file(models.b / "model.safetensors")
        trainer = await self.meet(engine)
        names, shapes = list(weights), [list(weight.shape) for weight in weights.values()]
        update = asyncio.create_task(engine.update_from_broadcast(names, ["float32"] * len(names), shapes, 4))
        await asyncio.to_thread(trainer.send, next(iter(weights.values())))
        del trainer
        with pytest.raises(EngineError, match="collective_rpc"):
            await asyncio.wait_for(update, 30)
        with pytest.raises(EngineError, match="update"):
            await engine.generate(ask(prompt(4), 2))
        await engine.update_weights(files(models.parts_a), 0)
        request = ask(prompt(5), 6, 0.0)
        same_logprobs(models.plain_a, request, await engine.generate(request))

    async def meet(self, engine: VllmEngine) -> WeightGroup:
        """The trainer's end of a group of two."""
        port, world = free_port("127.0.0.1"), 1 + engine.broadcast_ranks
        joining = asyncio.to_thread(WeightGroup, "127.0.0.1", port, 0, world, torch.device("cpu"))
        trainer, _ = await asyncio.gather(joining, engine.join_broadcast("127.0.0.1", port, 1, world))
        return trainer


class TestVllm(ServerConformance):
    """Ends both engines, so it comes after those that need them."""


async def test_a_model_that_does_not_know_so_long_sequences_is_refused_at_once(models: Models, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=f"sequences of {CONTEXT + 1} tokens do not fit into the model's context of {CONTEXT}"):
        await an_engine(models.a, tmp_path, max_length=CONTEXT + 1).start()


async def test_heads_that_vllm_cannot_compute_on_a_cpu_are_refused_at_once(tmp_path: Path) -> None:
    initialize_model(tmp_path, InitializeSpec(("a", "b"), hidden_size=64, heads=4, max_position_embeddings=CONTEXT))
    with pytest.raises(EngineStartError, match="heads have 16 dimensions; on CPUs vLLM knows 32, 64"):
        await an_engine(tmp_path, tmp_path).start()


async def test_an_option_that_vllm_does_not_know_is_named_by_the_start_error(models: Models, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="unrecognized arguments: --no-such-option=1"):
        await an_engine(models.a, tmp_path, config={"no_such_option": 1}).start()


async def test_a_missing_environment_says_what_to_do(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTICRUN_ENGINES", str(tmp_path))
    with pytest.raises(EngineStartError, match=r"vllm is not installed.*make engines"):
        await an_engine(models.a, tmp_path).start()
