"""What an engine samples, and how likely it says that it was."""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from agenticrun_workers.inference import InferenceEngine
from agenticrun_workers.types import FinishReason
from engine_checks import Models, SamplingOptions, ask, prompt, same_logprobs
from outside_agents import check_log_probs, formats_on
from tiny_model import CONTEXT, VOCABULARY, greedy_tokens


class SamplingConformance:
    """`engine` serves the weights A as version 0."""

    async def test_greedy_tokens_and_log_probs_equal_plain_forward_passes(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        requests = [ask(prompt(length, length), 12, 0.0) for length in (1, 2, 5, 17, 40)]
        for request, generation in zip(
            requests, await asyncio.gather(*map(engine.generate, requests)), strict=True
        ):
            assert generation.tokens_T.tolist() == greedy_tokens(
                models.plain_a, request.prompt_tokens, 12
            )
            same_logprobs(models.plain_a, request, generation)
            assert generation.finish is FinishReason.LENGTH
            assert set(generation.versions_T.tolist()) == {0}

    async def test_log_probs_are_of_the_whole_distribution_at_each_requests_temperature(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        """Also with top_k, top_p and min_p, and with other temperatures in the same batch."""
        cases: list[tuple[float, SamplingOptions, float]] = [
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
        requests = [
            ask(prompt(9, n), 16, temperature, seed=n, **options)
            for n, (temperature, options, _) in enumerate(cases)
        ]
        generations = await asyncio.gather(*map(engine.generate, requests))
        for (_, _, recorded), request, generation in zip(cases, requests, generations, strict=True):
            same_logprobs(models.plain_a, request, generation, recorded)

    async def test_a_greedy_request_alone_is_recorded_at_the_temperature_that_it_asks_for(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        request = ask(prompt(9), 8, 0.0, record_temperature=0.7)
        same_logprobs(models.plain_a, request, await engine.generate(request), 0.7)

    async def test_tokens_are_sampled_from_what_top_k_top_p_and_min_p_leave(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        base_T = prompt(11, 3)
        with torch.no_grad():
            probabilities_V = (
                models.plain_a(torch.from_numpy(base_T).long()[None])
                .logits[0, -1]
                .softmax(-1)
                .numpy()
            )
        order_V = np.argsort(-probabilities_V)
        before_V = np.cumsum(probabilities_V[order_V]) - probabilities_V[order_V]
        allowed: list[tuple[SamplingOptions, set[int]]] = [
            ({"top_k": 4}, set(order_V[:4].tolist())),
            ({"top_p": 0.6}, set(order_V[before_V < 0.6].tolist())),
            (
                {"min_p": 0.3},
                set(np.flatnonzero(probabilities_V >= 0.3 * probabilities_V.max()).tolist()),
            ),
        ]
        for options, tokens in allowed:
            generations = await asyncio.gather(
                *(engine.generate(ask(base_T, 1, seed=n, **options)) for n in range(24))
            )
            assert {int(generation.tokens_T[0]) for generation in generations} <= tokens, options

    async def test_samples_follow_the_models_probabilities(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        base_T = prompt(6, 5)
        with torch.no_grad():
            probabilities_V = (
                models.plain_a(torch.from_numpy(base_T).long()[None])
                .logits[0, -1]
                .softmax(-1)
                .numpy()
            )
        generations = await asyncio.gather(
            *(engine.generate(ask(base_T, 1, seed=n)) for n in range(400))
        )
        counts_V = np.bincount(
            [int(generation.tokens_T[0]) for generation in generations], minlength=VOCABULARY
        )
        likely_V = probabilities_V > 0.02
        deviation_V = np.sqrt(400 * probabilities_V * (1 - probabilities_V))
        assert (
            np.abs(counts_V - 400 * probabilities_V)[likely_V] < 4.5 * deviation_V[likely_V]
        ).all()

    async def test_the_same_seed_samples_the_same_alone_and_among_others(
        self, engine: InferenceEngine
    ) -> None:
        alone = [await engine.generate(ask(prompt(7), 12, seed=seed)) for seed in (1, 2)]
        together = await asyncio.gather(
            *(engine.generate(ask(prompt(7), 12, seed=seed)) for seed in range(8))
        )
        for seed, generation in zip((1, 2), alone, strict=True):
            assert together[seed].tokens_T.tolist() == generation.tokens_T.tolist()
        assert len({tuple(generation.tokens_T.tolist()) for generation in together}) > 4

    async def test_a_stop_token_ends_the_response_and_belongs_to_it(
        self, engine: InferenceEngine
    ) -> None:
        sampled = await engine.generate(ask(prompt(5), 12, seed=1))
        tokens = sampled.tokens_T.tolist()
        stop = max(tokens, key=tokens.index)
        assert tokens.index(stop) >= 2
        for most in (tokens.index(stop) + 1, 40):
            generation = await engine.generate(
                ask(prompt(5), most, seed=1, stop_token_ids=(stop, VOCABULARY - 1))
            )
            assert generation.tokens_T.tolist() == tokens[: tokens.index(stop) + 1]
            assert generation.finish is FinishReason.STOP
            assert (
                len(generation.logprobs_T) == len(generation.versions_T) == len(generation.tokens_T)
            )

    async def test_the_models_own_end_of_sequence_is_a_token_like_any_other(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        generation = await engine.generate(ask(prompt(5), 400, 2.0, seed=1))
        assert models.plain_a.config.eos_token_id in generation.tokens_T[:-1]
        assert generation.finish is FinishReason.LENGTH

    async def test_answers_with_a_format_have_it_and_keep_their_log_probs(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        """The weights know no format, so most draws are drafts."""
        trajectories = await formats_on(engine, 0.8)
        assert any(not turn.valid for trajectory in trajectories for turn in trajectory.turns)
        check_log_probs(models.plain_a, trajectories, 0.8)

    async def test_a_response_may_fill_the_context_to_its_last_token(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        request = ask(prompt(CONTEXT - 6), 6, 0.0)
        generation = await engine.generate(request)
        assert len(generation.tokens_T) == 6
        same_logprobs(models.plain_a, request, generation)

    async def test_turns_of_one_session_extend_each_other(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        context_T = prompt(20)
        for turn in range(4):
            request = ask(context_T, 6, 0.8, seed=turn, session="one")
            generation = await engine.generate(request)
            same_logprobs(models.plain_a, request, generation, 0.8)
            context_T = np.concatenate([context_T, generation.tokens_T, prompt(5, turn)])

    async def test_polls_tell_how_full_the_cache_is_and_what_was_computed_so_far(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        await engine.check_health()
        before, computed = engine.stats(), set()
        requests = [ask(prompt(CONTEXT // 2, n), CONTEXT // 2, seed=n) for n in range(4)]
        responses = [asyncio.create_task(engine.generate(request)) for request in requests]
        while not any(response.done() for response in responses):
            await engine.check_health()
            computed.add(engine.stats().computed_tokens)
            await asyncio.sleep(0.001)
        await asyncio.gather(*responses)
        after = engine.stats()
        assert before.computed_tokens is not None
        assert len({tokens for tokens in computed if tokens}) > 2, "before a response is finished"
        assert 0 < after.kv_used - before.kv_used < after.kv_polls - before.kv_polls

    async def test_many_requests_at_once_each_get_their_own_response(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        requests = [ask(prompt(3 + n % 30, n), 2 + n % 7, seed=n) for n in range(80)]
        before = engine.stats()
        generations = await asyncio.gather(*map(engine.generate, requests))
        for request, generation in zip(requests, generations, strict=True):
            assert len(generation.tokens_T) == request.sampling.max_new_tokens
            same_logprobs(models.plain_a, request, generation)
        after = engine.stats()
        assert after.generated_tokens - before.generated_tokens == sum(
            len(generation.tokens_T) for generation in generations
        )
        assert after.busy_seconds > before.busy_seconds
        busy = after.busy_seconds - before.busy_seconds
        assert busy < after.seat_seconds - before.seat_seconds <= busy * after.seats
        assert after.running == after.waiting == 0
