"""Requests: refused, aborted, paused and waiting."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest

from agenticrun_workers.inference import InferenceEngine, InvalidRequest
from agenticrun_workers.inference.client import joined
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest
from engine_checks import (
    EXACT,
    Models,
    ObservedEngine,
    SamplingOptions,
    ask,
    observed,
    prompt,
    same_logprobs,
)
from sampling_conformance import SamplingConformance
from tiny_model import CONTEXT, VOCABULARY

TRIES = range(5)
"""Number of attempts at what must reach a server while it still samples.

A server continues while this process waits for the processor, and may finish first: then the test
tries again. A server that never aborts, or knows no priorities, fails every time."""


class RequestConformance(SamplingConformance):
    """Requests that are wrong, aborted, or wait."""

    SEATS = 64
    """Number of requests that the engine runs at once."""

    @pytest.mark.parametrize(
        ("ids", "new"),
        [
            ([VOCABULARY], 4),
            ([0, 10**6], 4),
            ([-1], 4),
            ([], 4),
            ([1] * CONTEXT, 1),
            ([1] * 10, CONTEXT),
            ([1], 0),
        ],
    )
    async def test_requests_that_can_never_be_served_are_refused_and_do_no_harm(
        self, engine: InferenceEngine, ids: list[int], new: int
    ) -> None:
        with pytest.raises(InvalidRequest):
            await engine.generate(ask(np.asarray(ids, np.int32), new))
        assert len((await engine.generate(ask(prompt(4), 2))).tokens_T) == 2

    async def test_waiting_requests_with_the_smallest_priority_begin_first(
        self, engine: InferenceEngine
    ) -> None:
        async def sample(priority: int, new: int) -> None:
            await engine.generate(replace(ask(prompt(4), new), priority=priority))
            ended.append(priority)

        crowd = [(0, 200)] * self.SEATS + [(2, 6)] * (2 * self.SEATS) + [(1, 6)] * 4
        for _ in TRIES:
            ended: list[int] = []
            await asyncio.gather(*(sample(priority, new) for priority, new in crowd))
            last = {priority: len(ended) - ended[::-1].index(priority) for priority in (1, 2)}
            if in_time := last[1] < last[2] - self.SEATS // 2:
                break
        assert in_time, "those with 2 arrived first"

    async def test_an_id_in_flight_cannot_be_used_again(self, engine: InferenceEngine) -> None:
        request = ask(prompt(4), 200)
        response = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="already in flight"):
            await engine.generate(request)
        await engine.abort()
        await response

    async def test_an_aborted_request_returns_what_it_has_and_no_other_is_touched(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        short, other = ask(prompt(4), 400), ask(prompt(5), 60)
        short = GenerationRequest("r", short.session, short.prompt_tokens, short.sampling)
        other = GenerationRequest("r1", other.session, other.prompt_tokens, other.sampling)
        for _ in TRIES:
            responses = [
                asyncio.create_task(engine.generate(request)) for request in (short, other)
            ]
            await asyncio.sleep(0.1)
            await engine.abort(["r", "never-heard-of"])
            aborted, whole = await asyncio.wait_for(asyncio.gather(*responses), 60)
            if aborted.finish is FinishReason.ABORT:
                break
        assert aborted.finish is FinishReason.ABORT
        assert 0 < len(aborted.tokens_T) == len(aborted.logprobs_T) < 400
        same_logprobs(models.plain_a, short, aborted)
        same_logprobs(models.plain_a, other, whole)
        assert whole.finish is FinishReason.LENGTH

    async def test_all_requests_can_be_aborted_at_once(self, engine: InferenceEngine) -> None:
        for _ in TRIES:
            aborted_before = engine.stats().aborted_tokens
            responses = [
                asyncio.create_task(engine.generate(ask(prompt(4, n), 450))) for n in range(6)
            ]
            await asyncio.sleep(0.1)
            await engine.abort()
            generations = await asyncio.wait_for(asyncio.gather(*responses), 60)
            finishes = {generation.finish for generation in generations}
            if finishes == {FinishReason.ABORT}:
                break
        assert finishes == {FinishReason.ABORT}
        assert engine.stats().aborted_tokens - aborted_before == sum(
            len(generation.tokens_T) for generation in generations
        )

    async def test_an_abort_reaches_requests_that_are_still_on_their_way(
        self, engine: InferenceEngine
    ) -> None:
        for _ in TRIES:
            responses = [
                asyncio.create_task(engine.generate(ask(prompt(4, n), 450))) for n in range(4)
            ]
            await asyncio.sleep(0)
            await engine.abort()
            finishes = {
                generation.finish
                for generation in await asyncio.wait_for(asyncio.gather(*responses), 60)
            }
            if finishes == {FinishReason.ABORT}:
                break
        assert finishes == {FinishReason.ABORT}

    @pytest.mark.usefixtures("short_events")
    async def test_requests_of_a_paused_engine_can_be_aborted_and_return_what_it_has_shown(
        self, engine: ObservedEngine
    ) -> None:
        for _ in TRIES:
            request = ask(prompt(4), 450)
            early = asyncio.create_task(engine.generate(request))
            while not engine.progress(request.request_id, 0) and not early.done():
                await asyncio.sleep(0.01)
            await engine.pause()
            late = asyncio.create_task(engine.generate(ask(prompt(4), 450)))
            await asyncio.sleep(0.1)
            shown = engine.progress(request.request_id, 0)
            await asyncio.wait_for(engine.abort(), 60)
            generations = await asyncio.wait_for(asyncio.gather(early, late), 60)
            await engine.resume()
            assert generations[1].finish is FinishReason.ABORT
            if generations[0].finish is FinishReason.ABORT:
                break
        for generation in generations:
            assert generation.finish is FinishReason.ABORT
            assert len(generation.tokens_T) < 450
        assert shown is not None
        kept = generations[0].tokens_T[: len(shown.tokens_T)]
        assert kept.tolist() == shown.tokens_T.tolist()
        assert len((await engine.generate(ask(prompt(4), 3))).tokens_T) == 3

    @pytest.mark.usefixtures("short_events")
    async def test_each_token_of_a_request_in_flight_is_shown_once(
        self, engine: ObservedEngine
    ) -> None:
        request = ask(prompt(6), 300, 0.8)
        whole, *parts = await observed(engine, request)
        assert len(parts) > 2
        shown = reduce(joined, parts)
        count = len(shown.tokens_T)
        assert count < 300, "never a whole response"
        assert shown.tokens_T.tolist() == whole.tokens_T[:count].tolist()
        assert shown.logprobs_T.tolist() == whole.logprobs_T[:count].tolist()
        assert shown.versions_T.tolist() == whole.versions_T[:count].tolist()
        assert engine.progress(request.request_id, 0) is None

    async def test_another_request_goes_on_from_tokens_as_the_response_itself_would(
        self, engine: InferenceEngine
    ) -> None:
        cuts: list[SamplingOptions] = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}]
        requests = [ask(prompt(9, n), 60, 0.8, seed=2**61 + n, **cut) for n, cut in enumerate(cuts)]
        wholes = await asyncio.gather(*map(engine.generate, requests))

        async def go_on(request: GenerationRequest, whole: Generation, had: int) -> None:
            rest = await engine.generate(
                replace(
                    request,
                    request_id=f"{request.request_id}-{had}",
                    prompt_tokens=np.concatenate([request.prompt_tokens, whole.tokens_T[:had]]),
                    sampling=replace(request.sampling, max_new_tokens=60 - had),
                    sampled=had,
                )
            )
            assert rest.tokens_T.tolist() == whole.tokens_T[had:].tolist()
            np.testing.assert_allclose(rest.logprobs_T, whole.logprobs_T[had:], atol=EXACT)

        await asyncio.gather(
            *(
                go_on(request, whole, had)
                for request, whole in zip(requests, wholes, strict=True)
                for had in (1, 17, 59)
            )
        )

    async def test_a_request_whose_caller_goes_away_is_aborted(
        self, engine: InferenceEngine
    ) -> None:
        response = asyncio.create_task(engine.generate(ask(prompt(4), 450)))
        await asyncio.sleep(0.2)
        response.cancel()
        await asyncio.gather(response, return_exceptions=True)
        assert len((await engine.generate(ask(prompt(4), 3))).tokens_T) == 3
        assert engine.stats().running == 0

    async def test_a_paused_engine_samples_nothing_until_it_is_resumed(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        requests = [ask(prompt(4, n), 120) for n in range(2)]
        early = asyncio.create_task(engine.generate(requests[0]))
        await asyncio.sleep(0.1)
        await engine.pause()
        late = asyncio.create_task(engine.generate(requests[1]))
        done, _ = await asyncio.wait({early, late}, timeout=1.5)
        assert late not in done
        await engine.resume()
        for request, generation in zip(
            requests, await asyncio.wait_for(asyncio.gather(early, late), 60), strict=True
        ):
            assert len(generation.tokens_T) == 120
            same_logprobs(models.plain_a, request, generation)
