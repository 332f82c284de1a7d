"""What new weights do."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from agenticrun_workers.inference import EngineError, InferenceEngine
from agenticrun_workers.inference.client import joined
from agenticrun_workers.inference.engine import ABORTED_UNSAMPLED
from agenticrun_workers.types import Generation, GenerationRequest
from engine_checks import (
    DELAYS,
    EXACT,
    MEAN,
    Models,
    ObservedEngine,
    ask,
    files,
    half_done,
    observed,
    prompt,
    same_logprobs,
)
from request_conformance import RequestConformance
from tiny_model import plain_logprobs


class UpdateConformance(RequestConformance):
    """Each test ends with the weights A in `engine`."""

    _versions = itertools.count(1)

    async def load(self, engine: InferenceEngine, parts: Sequence[Path]) -> int:
        """Bring weights; returns their version."""
        version = next(self._versions)
        await engine.update_weights(files(parts), version)
        return version

    def sampled_by_a_then_b(
        self, models: Models, request: GenerationRequest, generation: Generation, old: int
    ) -> None:
        """Check that the tokens of version `old` have log-probs of the weights A, others of B."""
        count = int((generation.versions_T == old).sum())
        first_T, second_T = generation.tokens_T[:count], generation.tokens_T[count:]
        context_T = np.concatenate([request.prompt_tokens, first_T])
        np.testing.assert_allclose(
            generation.logprobs_T[:count],
            plain_logprobs(models.plain_a, request.prompt_tokens, first_T),
            atol=EXACT,
        )
        np.testing.assert_allclose(
            generation.logprobs_T[count:],
            plain_logprobs(models.plain_b, context_T, second_T),
            atol=EXACT,
        )

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
            updated, other = await asyncio.gather(
                *(each.generate(ask(base_T, 20, 0.0)) for each in (engine, fresh))
            )
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
            generation = await half_done(
                engine,
                lambda: self.load(engine, models.parts_b),
                request,
                delay,
            )
            if len(set(generation.versions_T.tolist())) == 2:
                break
        new = engine.stats().policy_version
        count = int((generation.versions_T == old).sum())
        assert generation.versions_T.tolist() == [old] * count + [new] * (400 - count)
        assert 0 < count < 400
        self.sampled_by_a_then_b(models, request, generation, old)
        await self.load(engine, models.parts_a)

    @pytest.mark.usefixtures("short_events")
    async def test_tokens_are_shown_with_the_version_that_sampled_them(
        self, engine: ObservedEngine, models: Models
    ) -> None:
        for delay in DELAYS:
            old = await self.load(engine, models.parts_a)
            request = ask(prompt(8), 400)
            response = asyncio.create_task(observed(engine, request))
            await asyncio.sleep(delay)
            await self.load(engine, models.parts_b)
            whole, *parts = await asyncio.wait_for(response, 60)
            shown = reduce(joined, parts, ABORTED_UNSAMPLED)
            if len(set(shown.versions_T.tolist())) == 2:
                break
        assert set(shown.versions_T.tolist()) == {old, engine.stats().policy_version}
        assert shown.tokens_T.tolist() == whole.tokens_T[: len(shown.tokens_T)].tolist()
        self.sampled_by_a_then_b(models, request, shown, old)
        await self.load(engine, models.parts_a)

    @pytest.mark.usefixtures("short_events")
    async def test_nothing_is_shown_where_each_response_has_one_version(
        self, fresh: ObservedEngine
    ) -> None:
        """Another engine may have other weights."""
        whole, *parts = await observed(fresh, ask(prompt(8), 100))
        assert len(whole.tokens_T) == 100
        assert not parts

    async def test_a_response_begins_again_where_each_has_one_version(
        self, fresh: InferenceEngine, models: Models
    ) -> None:
        for delay in DELAYS:
            aborted = fresh.stats().aborted_tokens
            request = ask(prompt(8), 300)
            generation = await half_done(
                fresh,
                lambda: self.load(fresh, models.parts_a),
                request,
                delay,
            )
            if fresh.stats().aborted_tokens > aborted:
                break
        assert fresh.stats().aborted_tokens > aborted
        assert generation.versions_T.tolist() == [fresh.stats().policy_version] * 300
        same_logprobs(models.plain_a, request, generation)

    async def test_a_pause_outlasts_an_update(
        self, engine: InferenceEngine, models: Models
    ) -> None:
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
        "wrong",
        [
            "a parameter is missing",
            "a shape is wrong",
            "a name is unknown",
            "a file is missing",
            "a file is none",
        ],
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

    async def test_an_engine_that_slept_serves_after_the_next_update(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        await engine.sleep()
        with pytest.raises(EngineError):
            await engine.generate(ask(prompt(4), 2))
        await engine.wake()
        with pytest.raises(EngineError):
            await engine.generate(ask(prompt(4), 2))
        await self.load(engine, models.parts_a)
        request = ask(prompt(5), 6, 0.0)
        same_logprobs(models.plain_a, request, await engine.generate(request))
