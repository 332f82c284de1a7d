"""What every inference engine must do, on the real engine. A test module subclasses `EngineConformance` and offers two engines.

Both serve `tiny_model`s: `engine` the weights of seed 0 (A) and later others, `fresh` those of seed 1 (B), which restarts responses
when new weights come. Each is started once for the whole module.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from agenticrun_workers.inference import EngineError, InferenceEngine, InvalidRequest
from agenticrun_workers.inference.engine_process import EngineProcess
from agenticrun_workers.inference.ports import family, listeners_of
from agenticrun_workers.models import load_model
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, IntArray, SamplingParams
from tiny_model import CONTEXT, VOCABULARY, greedy_tokens, plain_logprobs, tiny_model, weight_parts

EXACT = 1e-4
"""Largest difference of log-probs in float32: a kernel adds in another order."""
MEAN = 1e-5
DELAYS = (0.2, 0.5, 1.0, 2.0, 4.0)
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
        self.a, self.b = tiny_model(self.folder / "a", seed=0), tiny_model(self.folder / "b", seed=1)
        self.parts_a, self.parts_b = weight_parts(self.a, self.folder / "parts-a"), weight_parts(self.b, self.folder / "parts-b")
        self.plain_a, self.plain_b = (load_model(str(folder), device=torch.device("cpu")) for folder in (self.a, self.b))


def prompt(length: int, seed: int = 0) -> IntArray:
    return np.random.default_rng(seed).integers(VOCABULARY, size=length).astype(np.int32)


def ask(
    prompt_T: IntArray, new: int = 8, temperature: float = 1.0, *, seed: int = 0, session: str = "s", **sampling: object
) -> GenerationRequest:
    return GenerationRequest(f"r-{next(_numbers)}", session, prompt_T, SamplingParams(new, temperature, **sampling), seed)  # type: ignore[arg-type]


async def files(paths: Sequence[Path]) -> AsyncIterator[Path]:
    for path in paths:
        yield path


def same_logprobs(model: PreTrainedModel, request: GenerationRequest, generation: Generation, temperature: float = 1.0) -> None:
    expected_T = plain_logprobs(model, request.prompt_tokens, generation.tokens_T, temperature)
    difference_T = np.abs(generation.logprobs_T - expected_T)
    assert difference_T.max() < EXACT
    assert difference_T.mean() < MEAN


async def half_done(
    engine: InferenceEngine, act: Callable[[], object], request: Callable[[], GenerationRequest], delay: float
) -> Generation:
    """A response, with something done to the engine `delay` seconds after it was asked for."""
    response = asyncio.create_task(engine.generate(request()))
    await asyncio.sleep(delay)
    await act()  # type: ignore[misc]
    return await asyncio.wait_for(response, 60)


class EngineConformance:
    """The tests. `engine`, `fresh` and `models` are fixtures of the module; the loop is the module's too."""

    _versions = itertools.count(1)

    async def load(self, engine: InferenceEngine, parts: Sequence[Path]) -> int:
        """Bring weights; returns their version."""
        version = next(self._versions)
        await engine.update_weights(files(parts), version)
        return version

    async def test_greedy_tokens_and_log_probs_equal_plain_forward_passes(self, engine: InferenceEngine, models: Models) -> None:
        requests = [ask(prompt(length, length), 12, 0.0) for length in (1, 2, 5, 17, 40)]
        for request, generation in zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True):
            assert generation.tokens_T.tolist() == greedy_tokens(models.plain_a, request.prompt_tokens, 12)
            same_logprobs(models.plain_a, request, generation)
            assert generation.finish is FinishReason.LENGTH
            assert set(generation.versions_T.tolist()) == {0}

    async def test_log_probs_are_of_the_whole_distribution_at_each_requests_temperature(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        """Whatever is cut off it for sampling, and with requests of other temperatures in the same batch."""
        cases = [
            (1.0, {}, 1.0),
            (0.7, {}, 0.7),
            (1.5, {}, 1.5),
            (0.7, {"top_p": 0.8}, 0.7),
            (0.7, {"top_k": 3}, 0.7),
            (0.7, {"min_p": 0.1}, 0.7),
            (0.7, {"top_p": 0.9, "top_k": 5, "min_p": 0.02, "record_temperature": 1.0}, 1.0),
            (0.5, {"record_temperature": 1.0}, 1.0),
            (0.0, {}, 1.0),
            (0.0, {"record_temperature": 0.7}, 0.7),
        ]
        requests = [ask(prompt(9, n), 16, temperature, seed=n, **options) for n, (temperature, options, _) in enumerate(cases)]
        generations = await asyncio.gather(*map(engine.generate, requests))
        for (_, _, recorded), request, generation in zip(cases, requests, generations, strict=True):
            same_logprobs(models.plain_a, request, generation, recorded)

    async def test_a_greedy_request_alone_is_recorded_at_the_temperature_that_it_asks_for(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        request = ask(prompt(9), 8, 0.0, record_temperature=0.7)
        same_logprobs(models.plain_a, request, await engine.generate(request), 0.7)

    async def test_tokens_are_sampled_from_what_top_k_top_p_and_min_p_leave(self, engine: InferenceEngine, models: Models) -> None:
        base_T = prompt(11, 3)
        with torch.no_grad():
            probabilities_V = models.plain_a(torch.from_numpy(base_T).long()[None]).logits[0, -1].softmax(-1).numpy()
        order_V = np.argsort(-probabilities_V)
        before_V = np.cumsum(probabilities_V[order_V]) - probabilities_V[order_V]
        allowed = {
            "top_k": (4, set(order_V[:4].tolist())),
            "top_p": (0.6, set(order_V[before_V < 0.6].tolist())),
            "min_p": (0.3, set(np.flatnonzero(probabilities_V >= 0.3 * probabilities_V.max()).tolist())),
        }
        for name, (value, tokens) in allowed.items():
            generations = await asyncio.gather(*(engine.generate(ask(base_T, 1, seed=n, **{name: value})) for n in range(24)))
            assert {int(generation.tokens_T[0]) for generation in generations} <= tokens, name

    async def test_samples_follow_the_models_probabilities(self, engine: InferenceEngine, models: Models) -> None:
        base_T = prompt(6, 5)
        with torch.no_grad():
            probabilities_V = models.plain_a(torch.from_numpy(base_T).long()[None]).logits[0, -1].softmax(-1).numpy()
        generations = await asyncio.gather(*(engine.generate(ask(base_T, 1, seed=n)) for n in range(400)))
        counts_V = np.bincount([int(generation.tokens_T[0]) for generation in generations], minlength=VOCABULARY)
        likely_V = probabilities_V > 0.02
        deviation_V = np.sqrt(400 * probabilities_V * (1 - probabilities_V))
        assert (np.abs(counts_V - 400 * probabilities_V)[likely_V] < 4.5 * deviation_V[likely_V]).all()

    async def test_the_same_seed_samples_the_same_alone_and_among_others(self, engine: InferenceEngine) -> None:
        alone = [await engine.generate(ask(prompt(7), 12, seed=seed)) for seed in (1, 2)]
        together = await asyncio.gather(*(engine.generate(ask(prompt(7), 12, seed=seed)) for seed in range(8)))
        for seed, generation in zip((1, 2), alone, strict=True):
            assert together[seed].tokens_T.tolist() == generation.tokens_T.tolist()
        assert len({tuple(generation.tokens_T.tolist()) for generation in together}) > 4

    async def test_a_stop_token_ends_the_response_and_belongs_to_it(self, engine: InferenceEngine) -> None:
        sampled = await engine.generate(ask(prompt(5), 12, seed=1))
        tokens = sampled.tokens_T.tolist()
        stop = max(tokens, key=tokens.index)
        assert tokens.index(stop) >= 2
        for most in (tokens.index(stop) + 1, 40):
            generation = await engine.generate(ask(prompt(5), most, seed=1, stop_token_ids=(stop, VOCABULARY - 1)))
            assert generation.tokens_T.tolist() == tokens[: tokens.index(stop) + 1]
            assert generation.finish is FinishReason.STOP
            assert len(generation.logprobs_T) == len(generation.versions_T) == len(generation.tokens_T)

    async def test_a_response_may_fill_the_context_to_its_last_token(self, engine: InferenceEngine, models: Models) -> None:
        request = ask(prompt(CONTEXT - 6), 6, 0.0)
        generation = await engine.generate(request)
        assert len(generation.tokens_T) == 6
        same_logprobs(models.plain_a, request, generation)

    async def test_turns_of_one_session_extend_each_other(self, engine: InferenceEngine, models: Models) -> None:
        context_T = prompt(20)
        for turn in range(4):
            request = ask(context_T, 6, 0.8, seed=turn, session="one")
            generation = await engine.generate(request)
            same_logprobs(models.plain_a, request, generation, 0.8)
            context_T = np.concatenate([context_T, generation.tokens_T, prompt(5, turn)])

    async def test_many_requests_at_once_each_get_their_own_response(self, engine: InferenceEngine, models: Models) -> None:
        requests = [ask(prompt(3 + n % 30, n), 2 + n % 7, seed=n) for n in range(80)]
        before = engine.stats()
        generations = await asyncio.gather(*map(engine.generate, requests))
        for request, generation in zip(requests, generations, strict=True):
            assert len(generation.tokens_T) == request.sampling.max_new_tokens
            same_logprobs(models.plain_a, request, generation)
        after = engine.stats()
        assert after.generated_tokens - before.generated_tokens == sum(len(generation.tokens_T) for generation in generations)
        assert after.busy_seconds > before.busy_seconds
        assert after.running == after.waiting == 0

    @pytest.mark.parametrize(
        ("ids", "new"),
        [([VOCABULARY], 4), ([0, 10**6], 4), ([-1], 4), ([], 4), ([1] * CONTEXT, 1), ([1] * 10, CONTEXT), ([1], 0)],
    )
    async def test_requests_that_can_never_be_served_are_refused_and_do_no_harm(
        self, engine: InferenceEngine, ids: list[int], new: int
    ) -> None:
        with pytest.raises(InvalidRequest):
            await engine.generate(ask(np.asarray(ids, np.int32), new))
        assert len((await engine.generate(ask(prompt(4), 2))).tokens_T) == 2

    async def test_an_id_in_flight_cannot_be_used_again(self, engine: InferenceEngine) -> None:
        request = ask(prompt(4), 200)
        response = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="already in flight"):
            await engine.generate(request)
        await engine.abort()
        await response

    async def test_an_aborted_request_returns_what_it_has_and_no_other_is_touched(self, engine: InferenceEngine, models: Models) -> None:
        short, other = ask(prompt(4), 400), ask(prompt(5), 60)
        short = GenerationRequest("r", short.session, short.prompt_tokens, short.sampling)
        other = GenerationRequest("r1", other.session, other.prompt_tokens, other.sampling)
        responses = [asyncio.create_task(engine.generate(request)) for request in (short, other)]
        await asyncio.sleep(0.3)
        await engine.abort(["r", "never-heard-of"])
        aborted, whole = await asyncio.wait_for(asyncio.gather(*responses), 60)
        assert aborted.finish is FinishReason.ABORT
        assert len(aborted.tokens_T) == len(aborted.logprobs_T) < 400
        same_logprobs(models.plain_a, other, whole)
        assert whole.finish is FinishReason.LENGTH

    async def test_all_requests_can_be_aborted_at_once(self, engine: InferenceEngine) -> None:
        aborted_before = engine.stats().aborted_tokens
        responses = [asyncio.create_task(engine.generate(ask(prompt(4, n), 450))) for n in range(6)]
        await asyncio.sleep(0.5)
        await engine.abort()
        generations = await asyncio.wait_for(asyncio.gather(*responses), 60)
        assert {generation.finish for generation in generations} == {FinishReason.ABORT}
        assert engine.stats().aborted_tokens - aborted_before == sum(len(generation.tokens_T) for generation in generations)

    async def test_a_request_whose_caller_goes_away_is_aborted(self, engine: InferenceEngine) -> None:
        response = asyncio.create_task(engine.generate(ask(prompt(4), 450)))
        await asyncio.sleep(0.2)
        response.cancel()
        await asyncio.gather(response, return_exceptions=True)
        assert len((await engine.generate(ask(prompt(4), 3))).tokens_T) == 3
        assert engine.stats().running == 0

    async def test_a_paused_engine_samples_nothing_until_it_is_resumed(self, engine: InferenceEngine, models: Models) -> None:
        requests = [ask(prompt(4, n), 120) for n in range(2)]
        early = asyncio.create_task(engine.generate(requests[0]))
        await asyncio.sleep(0.1)
        await engine.pause()
        late = asyncio.create_task(engine.generate(requests[1]))
        done, _ = await asyncio.wait({early, late}, timeout=1.5)
        assert late not in done
        await engine.resume()
        for request, generation in zip(requests, await asyncio.wait_for(asyncio.gather(early, late), 60), strict=True):
            assert len(generation.tokens_T) == 120
            same_logprobs(models.plain_a, request, generation)

    async def test_after_an_update_it_says_what_a_fresh_engine_with_these_weights_says(
        self, engine: InferenceEngine, fresh: InferenceEngine, models: Models
    ) -> None:
        """Also for prompts whose prefix it had cached."""
        prompts = [prompt(length, length) for length in (3, 30, 60)]
        for base_T in prompts:
            await engine.generate(ask(base_T, 4))
        version = await self.load(engine, models.parts_b)
        assert engine.stats().policy_version == version
        for base_T in prompts:
            updated, other = await asyncio.gather(*(each.generate(ask(base_T, 20, 0.0)) for each in (engine, fresh)))
            assert updated.tokens_T.tolist() == other.tokens_T.tolist()
            np.testing.assert_allclose(updated.logprobs_T, other.logprobs_T, atol=MEAN)
            assert set(updated.versions_T.tolist()) == {version}
        await self.load(engine, models.parts_a)

    async def test_a_response_goes_on_under_new_weights_and_says_which_token_had_which(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        for delay in DELAYS:
            old = await self.load(engine, models.parts_a)
            request = ask(prompt(8), 400)
            generation = await half_done(engine, lambda: self.load(engine, models.parts_b), lambda request=request: request, delay)
            if len(set(generation.versions_T.tolist())) == 2:
                break
        new = engine.stats().policy_version
        count = int((generation.versions_T == old).sum())
        assert generation.versions_T.tolist() == [old] * count + [new] * (400 - count)
        assert 0 < count < 400
        first_T, second_T = generation.tokens_T[:count], generation.tokens_T[count:]
        context_T = np.concatenate([request.prompt_tokens, first_T])
        np.testing.assert_allclose(
            generation.logprobs_T[:count], plain_logprobs(models.plain_a, request.prompt_tokens, first_T), atol=EXACT
        )
        np.testing.assert_allclose(generation.logprobs_T[count:], plain_logprobs(models.plain_b, context_T, second_T), atol=EXACT)
        await self.load(engine, models.parts_a)

    async def test_a_response_begins_again_where_each_has_one_version(self, fresh: InferenceEngine, models: Models) -> None:
        for delay in DELAYS[1:]:
            aborted = fresh.stats().aborted_tokens
            request = ask(prompt(8), 300)
            generation = await half_done(fresh, lambda: self.load(fresh, models.parts_a), lambda request=request: request, delay)
            if fresh.stats().aborted_tokens > aborted:
                break
        assert fresh.stats().aborted_tokens > aborted
        assert generation.versions_T.tolist() == [fresh.stats().policy_version] * 300
        same_logprobs(models.plain_a, request, generation)

    async def test_a_pause_outlasts_an_update(self, engine: InferenceEngine, models: Models) -> None:
        await engine.pause()
        version = await self.load(engine, models.parts_b)
        request = ask(prompt(4), 5, 0.0)
        response = asyncio.create_task(engine.generate(request))
        await asyncio.wait({response}, timeout=1.0)
        assert not response.done()
        await engine.resume()
        generation = await asyncio.wait_for(response, 60)
        same_logprobs(models.plain_b, request, generation)
        assert set(generation.versions_T.tolist()) == {version}
        await self.load(engine, models.parts_a)

    @pytest.mark.parametrize(
        "wrong", ["a parameter is missing", "a shape is wrong", "a name is unknown", "a file is missing", "a file is none"]
    )
    async def test_after_a_failed_update_nothing_is_served_until_one_succeeds(
        self, engine: InferenceEngine, models: Models, wrong: str, tmp_path: Path
    ) -> None:
        good = models.parts_b
        bad, weights = tmp_path / "bad.safetensors", load_file(good[1])
        name = max(name for name in weights if "down_proj" in name)
        match wrong:
            case "a parameter is missing":
                del weights[name]
            case "a shape is wrong":
                weights[name] = weights[name][1:].clone()
            case "a name is unknown":
                weights["model.layers.99.mlp.down_proj.weight"] = weights[name].clone()
        save_file(weights, bad)
        if wrong == "a file is missing":
            bad.unlink()
        elif wrong == "a file is none":
            bad.write_bytes(b"\xff" * 100)
        in_flight = ask(prompt(4), 150)
        waiting = asyncio.create_task(engine.generate(in_flight))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineError):
            await engine.update_weights(files([good[0], bad]), 10_000)
        with pytest.raises(EngineError, match="update"):
            await engine.generate(ask(prompt(4), 2))
        assert engine.stats().policy_version < 10_000
        await self.load(engine, models.parts_b)
        request = ask(prompt(5), 6, 0.0)
        same_logprobs(models.plain_b, request, await engine.generate(request))
        assert len((await asyncio.wait_for(waiting, 60)).tokens_T) == 150
        await self.load(engine, models.parts_a)

    async def test_an_engine_that_slept_serves_after_the_next_update(self, engine: InferenceEngine, models: Models) -> None:
        await engine.sleep()
        with pytest.raises(EngineError):
            await engine.generate(ask(prompt(4), 2))
        await engine.wake()
        with pytest.raises(EngineError):
            await engine.generate(ask(prompt(4), 2))
        await self.load(engine, models.parts_a)
        request = ask(prompt(5), 6, 0.0)
        same_logprobs(models.plain_a, request, await engine.generate(request))


class ServerConformance(EngineConformance):
    """Of engines that are servers of their own. The last tests end both engines."""

    async def test_a_server_that_is_killed_fails_the_requests_in_flight_and_those_after(self, engine: ServerEngine) -> None:
        responses = [asyncio.create_task(engine.generate(ask(prompt(4, n), 450))) for n in range(3)]
        await asyncio.sleep(0.3)
        pids = processes(engine)
        os.kill(pids[1], signal.SIGKILL)
        for response in responses:
            with pytest.raises(EngineError, match="was killed"):
                await asyncio.wait_for(response, 20)
        with pytest.raises(EngineError):
            await engine.generate(ask(prompt(4), 2))
        assert not [pid for pid in pids if running(pid)]
        await engine.stop()

    async def test_a_stopped_engine_leaves_no_process_no_port_and_no_file_but_its_log(self, fresh: ServerEngine) -> None:
        pids = processes(fresh)
        port, log = int(fresh._process.url.rpartition(":")[2]), fresh._process.log  # type: ignore[union-attr]
        folders = {entry for entry in Path(tempfile.gettempdir()).iterdir() if entry.name.startswith("agenticrun-engine-")}
        assert len(pids) >= 3
        response = asyncio.create_task(fresh.generate(ask(prompt(4), 450)))
        await asyncio.sleep(0.3)
        await fresh.stop()
        await fresh.stop()
        assert (await response).finish is FinishReason.ABORT
        assert not [pid for pid in pids if running(pid)]
        assert not listeners_of(port)
        assert len({folder for folder in folders if folder.exists()}) < len(folders)
        assert log.exists()


class ServerEngine(InferenceEngine, Protocol):
    _process: EngineProcess | None


def processes(engine: ServerEngine) -> list[int]:
    """Keeper, server, and what the server started."""
    assert engine._process is not None
    assert engine._process._keeper is not None
    return family(engine._process._keeper.pid)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
