"""The embedded engine against plain forward passes of the same model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from agenticrun_workers.inference import EngineError, InvalidRequest, UnusableModel
from agenticrun_workers.inference.client import joined
from agenticrun_workers.inference.transformers.caches import SlotCache
from agenticrun_workers.inference.transformers.engine import TransformersEngine
from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from agenticrun_workers.models.pretrained import load_model
from agenticrun_workers.models.stored_names import stored_weights
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, SamplingParams
from loaded_models import loaded
from weight_files import weight_files

WORDS = tuple("abcdefghijklmnop")
VOCABULARY = len(WORDS) + 5


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of sharp distributions with grouped heads."""
    path = tmp_path_factory.mktemp(request.param)
    mixed = request.param == "qwen3_moe"
    spec = InitializeSpec(
        WORDS,
        request.param,
        experts=4 if mixed else 0,
        experts_per_token=2 if mixed else 0,
        hidden_size=32,
        intermediate_size=64,
        heads=4,
        key_value_heads=2,
        initializer_range=0.4,
    )
    initialize_model(path, spec)
    return path


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(lambda: loaded(folder), **{"max_length": 128, **options})
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(VOCABULARY, size=length).astype(np.int32)


def ask(
    name: str,
    tokens: np.ndarray,
    new: int = 6,
    temperature: float = 1.0,
    *,
    session: str | None = None,
    stop_token_ids: tuple[int, ...] = (),
) -> GenerationRequest:
    sampling = SamplingParams(new, temperature, stop_token_ids=stop_token_ids)
    seed = sum(name.encode()) * 7919
    return GenerationRequest(name, session or name, tokens, sampling, seed)


def reference_logprobs(
    model: PreTrainedModel, prompt_T: np.ndarray, response_T: np.ndarray, temperature: float
) -> torch.Tensor:
    ids = torch.from_numpy(np.concatenate([prompt_T, response_T])).long()[None]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].float() / temperature, -1)
    return logprobs[len(prompt_T) - 1 : -1].gather(-1, ids[0, len(prompt_T) :, None])[:, 0]


def check(model: PreTrainedModel, request: GenerationRequest, generation: Generation) -> None:
    expected = reference_logprobs(
        model, request.prompt_tokens, generation.tokens_T, request.sampling.temperature or 1.0
    )
    np.testing.assert_allclose(generation.logprobs_T, expected.numpy(), atol=1e-4, rtol=1e-4)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 120))


def test_greedy_tokens_and_log_probs_equal_a_plain_forward_pass(folder: Path) -> None:
    model = loaded(folder)

    async def work() -> None:
        async with serving(folder) as engine:
            requests = [
                ask(f"r{i}", prompt(3 + 5 * i, i), new=10, temperature=0.0) for i in range(6)
            ]
            for request, generation in zip(
                requests, await asyncio.gather(*map(engine.generate, requests)), strict=True
            ):
                ids = request.prompt_tokens.tolist()
                for token in generation.tokens_T.tolist():
                    with torch.no_grad():
                        assert token == model(torch.tensor([ids])).logits[0, -1].argmax().item()
                    ids.append(token)
                check(model, request, generation)
                assert generation.finish is FinishReason.LENGTH

    run(work)


def test_a_request_samples_the_same_alone_and_among_others_that_come_and_go(folder: Path) -> None:
    model = loaded(folder)

    async def work() -> None:
        requests = [
            ask(f"r{i}", prompt(4 + 3 * i, i), new=3 + 2 * i, temperature=0.7) for i in range(8)
        ]
        async with serving(folder) as engine:
            alone = [await engine.generate(request) for request in requests]

        async def late(engine: TransformersEngine, number: int) -> Generation:
            for _ in range(number * 3):
                await asyncio.sleep(0.001)
            return await engine.generate(requests[number])

        async with serving(folder, max_sessions=5, max_step_tokens=40) as engine:
            together = await asyncio.gather(*(late(engine, i) for i in range(8)))
        for request, a, b in zip(requests, alone, together, strict=True):
            assert a.tokens_T.tolist() == b.tokens_T.tolist()
            check(model, request, b)

    run(work)


def test_a_session_computes_only_the_new_tokens_of_each_turn(folder: Path) -> None:
    model = loaded(folder)

    async def work() -> None:
        async with serving(folder) as engine:
            context, prompted = np.zeros(0, np.int32), 0
            for turn in range(5):
                context = np.concatenate([context, prompt(7, turn)])
                request = ask(f"t{turn}", context, new=3, session="s")
                generation = await engine.generate(request)
                check(model, request, generation)
                new = engine.stats().prompt_tokens - prompted
                prompted += new
                assert new == (7 if turn == 0 else 8)
                context = np.concatenate([context, generation.tokens_T])

    run(work)


def test_a_prompt_that_departs_from_its_session_is_computed_from_there(folder: Path) -> None:
    model = loaded(folder)

    async def work() -> None:
        async with serving(folder) as engine:
            first = prompt(20, 1)
            await engine.generate(ask("a", first, session="s"))
            other = np.concatenate([first[:12], prompt(15, 2)])
            for name, tokens in (("b", other), ("c", other[:9]), ("d", first)):
                request = ask(name, tokens, session="s")
                check(model, request, await engine.generate(request))

    run(work)


def test_sessions_keep_their_tokens_while_others_end_and_take_their_slots(folder: Path) -> None:
    model = loaded(folder)

    async def work() -> None:
        async with serving(folder, max_sessions=9) as engine:
            contexts = [prompt(5 + 4 * number, number) for number in range(9)]
            for turn in range(4):
                requests = [
                    ask(
                        f"{number}-{turn}",
                        contexts[number],
                        1 + 7 * number % 5,
                        session=str(number),
                    )
                    for number in np.random.default_rng(turn).permutation(9)
                ]
                prompted = engine.stats().prompt_tokens
                answers = await asyncio.gather(*map(engine.generate, requests))
                if turn:  # the last token of the answer, and three new ones
                    assert engine.stats().prompt_tokens - prompted == 9 * 4
                for request, answer in zip(requests, answers, strict=True):
                    check(model, request, answer)
                    contexts[int(request.session)] = np.concatenate(
                        [request.prompt_tokens, answer.tokens_T, prompt(3, turn)]
                    )

    run(work)


async def computed_prompts(folder: Path, prompts: list[np.ndarray], **options: Any) -> int:
    """Return the computed tokens of prompts that wait together, and check the answers."""
    async with serving(folder, **options) as engine:
        requests = [ask(f"r{number}", tokens, 5) for number, tokens in enumerate(prompts)]
        answers = await asyncio.gather(*map(engine.generate, requests))
        for request, answer in zip(requests, answers, strict=True):
            check(loaded(folder), request, answer)
        return engine.stats().prompt_tokens


async def test_equal_prompts_are_computed_once(folder: Path) -> None:
    groups = [prompt(40, seed=group) for group in range(3) for _ in range(8)]
    assert await computed_prompts(folder, groups) == 3 * (40 + 7)


async def test_prompts_share_their_beginning_if_that_saves_half_of_a_prompt(folder: Path) -> None:
    head = prompt(40)
    endings = [np.concatenate([head, prompt(3 + number, seed=number)]) for number in range(1, 6)]
    assert await computed_prompts(folder, endings) <= 40 + sum(range(4, 9))
    apart = [np.concatenate([head[:10], prompt(30, seed=number)]) for number in range(1, 6)]
    assert await computed_prompts(folder, apart) == 5 * 40


async def test_a_prompt_is_copied_from_a_request_that_samples_already(folder: Path) -> None:
    async with serving(folder) as engine:
        first = asyncio.create_task(engine.generate(ask("first", prompt(40), new=60)))
        while engine.stats().generated_tokens < 5:
            await asyncio.sleep(0.001)
        request = ask("second", prompt(40))
        check(loaded(folder), request, await engine.generate(request))
        assert not first.done()
        assert engine.stats().prompt_tokens == 40 + 1
        check(loaded(folder), ask("first", prompt(40)), await first)


async def test_a_deterministic_engine_computes_each_prompt(folder: Path) -> None:
    assert await computed_prompts(folder, [prompt(40)] * 8, batch_invariant=True) == 8 * 40


async def test_new_weights_in_the_middle_of_a_group_are_used_by_all_of_it(folder: Path) -> None:
    updated = loaded(folder)
    weights = changed(updated)
    async with serving(folder) as engine:
        requests = [ask(f"r{number}", prompt(40), new=40) for number in range(8)]
        running = [asyncio.create_task(engine.generate(request)) for request in requests]
        while engine.stats().generated_tokens < 50:
            await asyncio.sleep(0.001)
        await engine.update_weights(weight_files(weights), 1)
        for request, answer in zip(requests, await asyncio.gather(*running), strict=True):
            new = int(answer.versions_T.tolist().index(1))
            assert new >= 5
            expected = reference_logprobs(
                updated, request.prompt_tokens, answer.tokens_T, request.sampling.temperature
            )
            np.testing.assert_allclose(
                answer.logprobs_T[new:], expected[new:].numpy(), atol=1e-4, rtol=1e-4
            )


async def test_the_memory_of_keys_and_values_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        async with serving(folder) as engine:
            for _ in range(2):
                requests = [ask(f"r{number}", prompt(100, number)) for number in range(8)]
                await asyncio.gather(*map(engine.generate, requests))
                await engine.check_health()
    lines = [record.message for record in caplog.records if "keys and values" in record.message]
    assert len(lines) == 1
    assert re.fullmatch(r"keys and values of sessions take 0\.[1-9] MiB", lines[0])


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 900)), min_size=1, max_size=30))
def test_keys_and_values_take_no_more_memory_than_if_slots_and_length_doubled(
    needs: list[tuple[int, int]],
) -> None:
    """That was the first storage's rule, from 16 slots of 64 positions on."""
    cache, one = SlotCache(40, 900), torch.ones(1, 1, 1, 1)
    slots, length = 16, 64
    for needed_slots, needed_length in needs:
        cache.select(needed_slots - 1, [needed_length - 1], 1, torch.device("cpu"))
        cache.update(one, one, 0)
        while slots < needed_slots:
            slots *= 2
        while length < needed_length:
            length *= 2
        assert cache.nbytes <= 2 * one.nbytes * slots * length


def test_evicted_sessions_are_computed_again_and_give_the_same(folder: Path) -> None:
    model = loaded(folder)

    async def work() -> None:
        async with serving(folder, max_sessions=3) as engine:
            contexts = {f"s{i}": prompt(6 + i, i) for i in range(7)}
            for turn in range(3):
                requests = [ask(f"{s}-{turn}", c, new=2, session=s) for s, c in contexts.items()]
                for request, generation in zip(
                    requests, await asyncio.gather(*map(engine.generate, requests)), strict=True
                ):
                    check(model, request, generation)
                    contexts[request.session] = np.concatenate(
                        [request.prompt_tokens, generation.tokens_T, prompt(3, turn)]
                    )

    run(work)


def test_two_requests_of_one_session_at_once_do_not_disturb_each_other(folder: Path) -> None:
    model = loaded(folder)

    async def work() -> None:
        async with serving(folder) as engine:
            requests = [ask(f"r{i}", prompt(9, i), session="same") for i in range(3)]
            for request, generation in zip(
                requests, await asyncio.gather(*map(engine.generate, requests)), strict=True
            ):
                check(model, request, generation)

    run(work)


def test_prompts_count_as_computed_batch_by_batch_and_as_prefilling_until_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with serving(folder, max_step_tokens=60) as engine:
            seen, compute = [], engine.loaded.compute

            def noted(batch: Any) -> Any:
                stats = engine.stats()
                seen.append((stats.computed_tokens, stats.prefilling))
                return compute(batch)

            monkeypatch.setattr(engine.loaded, "compute", noted)
            requests = [ask(f"{n}", prompt(30, n), 1) for n in range(6)]
            await asyncio.gather(*map(engine.generate, requests))
            batches = [prefilling for _, prefilling in seen]
            assert sum(batches) == 6 * 30
            assert max(batches) <= 60, "several batches"
            assert [computed for computed, _ in seen] == [
                sum(batches[:number]) for number in range(len(batches))
            ]
            assert engine.stats().prefilling == 0

    run(work)


def test_a_stop_token_ends_the_response_and_belongs_to_it(folder: Path) -> None:
    async def work() -> None:
        async with serving(folder) as engine:
            free = await engine.generate(ask("a", prompt(8), new=20))
            stop = int(free.tokens_T[4])
            first = free.tokens_T.tolist().index(stop)
            stopped = await engine.generate(ask("a", prompt(8), new=20, stop_token_ids=(stop,)))
            assert stopped.tokens_T.tolist() == free.tokens_T[: first + 1].tolist()
            assert stopped.finish is FinishReason.STOP

    run(work)


@torch.no_grad()
def changed(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Change a model, and return its weights as a trainer exports them."""
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    weights = stored_weights(model, model.named_parameters())
    return {name: weight.numpy().copy() for name, weight in weights}


def test_new_weights_take_over_in_the_middle_of_a_response(folder: Path) -> None:
    model, updated = loaded(folder), loaded(folder)
    weights = changed(updated)

    async def work() -> None:
        async with serving(folder) as engine:
            request = ask("long", prompt(10), new=100)
            running = asyncio.create_task(engine.generate(request))
            while engine.stats().generated_tokens < 10:
                await asyncio.sleep(0.001)
            await engine.update_weights(weight_files(weights), 7)
            generation = await running
            versions = generation.versions_T.tolist()
            split = versions.index(7)
            assert split >= 10
            assert versions == [0] * split + [7] * (100 - split)
            before = reference_logprobs(
                model, request.prompt_tokens, generation.tokens_T, 1.0
            ).numpy()
            after = reference_logprobs(
                updated, request.prompt_tokens, generation.tokens_T, 1.0
            ).numpy()
            np.testing.assert_allclose(
                generation.logprobs_T[:split], before[:split], atol=1e-4, rtol=1e-4
            )
            np.testing.assert_allclose(
                generation.logprobs_T[split:], after[split:], atol=1e-4, rtol=1e-4
            )
            assert engine.stats().policy_version == 7

    run(work)


def test_new_weights_drop_the_caches_of_idle_sessions(folder: Path) -> None:
    updated = loaded(folder)
    weights = changed(updated)

    async def work() -> None:
        async with serving(folder) as engine:
            await engine.generate(ask("a", prompt(12), session="s"))
            await engine.update_weights(weight_files(weights), 1)
            request = ask("b", np.concatenate([prompt(12), prompt(4, 1)]), session="s")
            check(updated, request, await engine.generate(request))

    run(work)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"no.such.weight": np.zeros(1, np.float32)}, "no.such.weight"),
        ({"model.embed_tokens.weight": np.zeros((2, 2), np.float32)}, "model.embed_tokens.weight"),
        ({"model.norm.weight": None}, "lack 1 parameters, model.norm.weight"),
    ],
    ids=["name", "shape", "missing"],
)
def test_after_weights_that_do_not_fit_nothing_is_served_until_a_good_update(
    folder: Path, wrong: dict[str, np.ndarray | None], message: str
) -> None:
    updated = loaded(folder)
    weights = changed(updated)
    unfit = {name: value for name, value in {**weights, **wrong}.items() if value is not None}

    async def work() -> None:
        async with serving(folder) as engine:
            in_flight = asyncio.create_task(engine.generate(ask("early", prompt(4), new=100)))
            while engine.stats().generated_tokens < 3:
                await asyncio.sleep(0.001)
            with pytest.raises(EngineError, match=message):
                await engine.update_weights(weight_files(unfit), 1)
            with pytest.raises(EngineError, match="nothing is served until an update succeeds"):
                await engine.generate(ask("a", prompt(5)))
            assert engine.stats().policy_version == 0
            assert not in_flight.done()
            await engine.update_weights(weight_files(weights), 2)
            request = ask("a", prompt(5))
            check(updated, request, await engine.generate(request))
            assert set((await in_flight).versions_T.tolist()) == {0, 2}

    run(work)


def test_a_file_that_is_not_safetensors_is_named(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no weights at all")

    async def parts() -> AsyncIterator[Path]:
        yield broken

    async def work() -> None:
        async with serving(folder) as engine:
            with pytest.raises(EngineError, match=f"{broken} cannot be read"):
                await engine.update_weights(parts(), 1)

    run(work)


def test_requests_that_come_during_an_update_wait_for_it(folder: Path) -> None:
    weights = changed(loaded(folder))

    async def work() -> None:
        async with serving(folder) as engine:
            half, go_on = asyncio.Event(), asyncio.Event()

            async def parts() -> AsyncIterator[Path]:
                async for part in weight_files(weights, files=2):
                    yield part
                    half.set()
                    await go_on.wait()

            update = asyncio.create_task(engine.update_weights(parts(), 5))
            await half.wait()
            asked = asyncio.create_task(engine.generate(ask("a", prompt(5))))
            await asyncio.sleep(0.05)
            assert not asked.done()
            go_on.set()
            await update
            assert set((await asked).versions_T.tolist()) == {5}

    run(work)


def test_an_engine_that_slept_serves_again_after_it_got_weights(folder: Path) -> None:
    updated = loaded(folder)
    weights = changed(updated)

    async def work() -> None:
        async with serving(folder) as engine:
            running = asyncio.create_task(engine.generate(ask("a", prompt(5), session="s")))
            await asyncio.sleep(0)
            with pytest.raises(EngineError, match="cannot sleep"):
                await engine.sleep()
            await running
            await engine.sleep()
            with pytest.raises(EngineError, match="the engine sleeps"):
                await engine.generate(ask("b", prompt(5)))
            await engine.wake()
            with pytest.raises(EngineError, match="no weights since it slept"):
                await engine.generate(ask("b", prompt(5)))
            await engine.update_weights(weight_files(weights), 1)
            request = ask("c", prompt(9), session="s")
            check(updated, request, await engine.generate(request))

    run(work)


def test_pause_stops_sampling_and_resume_goes_on_as_if_nothing_had_been(folder: Path) -> None:
    async def work() -> None:
        async with serving(folder) as engine:
            expected = await engine.generate(ask("a", prompt(10), new=90))
            count = engine.stats().generated_tokens
            running = asyncio.create_task(
                engine.generate(ask("a", prompt(10), new=90, session="other"))
            )
            while engine.stats().generated_tokens < count + 5:
                await asyncio.sleep(0.001)
            await engine.pause()
            paused_at = engine.stats().generated_tokens
            waiting = asyncio.create_task(engine.generate(ask("b", prompt(3), new=2)))
            await asyncio.sleep(0.05)
            assert engine.stats().generated_tokens == paused_at < count + 90
            await engine.resume()
            assert (await running).tokens_T.tolist() == expected.tokens_T.tolist()
            assert len((await waiting).tokens_T) == 2

    run(work)


def test_abort_returns_what_was_sampled_so_far(folder: Path) -> None:
    model = loaded(folder)

    async def work() -> None:
        async with serving(folder) as engine:
            requests = [ask(f"r{i}", prompt(10, i), new=100) for i in range(3)]
            running = [asyncio.create_task(engine.generate(request)) for request in requests]
            while engine.stats().generated_tokens < 12:
                await asyncio.sleep(0.001)
            await engine.abort(["r1"])
            aborted = await running[1]
            assert aborted.finish is FinishReason.ABORT
            assert 1 <= len(aborted.tokens_T) < 100
            check(model, requests[1], aborted)
            assert engine.stats().running == 2
            await engine.abort()
            assert [(await task).finish for task in (running[0], running[2])] == [
                FinishReason.ABORT
            ] * 2

    run(work)


def test_a_cancelled_caller_frees_its_place(folder: Path) -> None:
    async def work() -> None:
        async with serving(folder, max_sessions=1) as engine:
            task = asyncio.create_task(engine.generate(ask("a", prompt(5), new=100)))
            while engine.stats().generated_tokens < 3:
                await asyncio.sleep(0.001)
            task.cancel()
            assert len((await engine.generate(ask("b", prompt(5), new=2))).tokens_T) == 2

    run(work)


@pytest.mark.parametrize(
    ("tokens", "new", "message"),
    [
        ([], 1, "empty"),
        ([0, VOCABULARY], 1, "token ids must be in"),
        ([-1], 1, "token ids must be in"),
        ([1] * 120, 9, "do not fit into the engine's 128 tokens"),
        ([1], 0, "do not fit"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_and_harms_nothing(
    folder: Path, tokens: list[int], new: int, message: str
) -> None:
    async def work() -> None:
        async with serving(folder) as engine:
            with pytest.raises(InvalidRequest, match=message):
                await engine.generate(ask("a", np.array(tokens, np.int32), new=new))
            assert len((await engine.generate(ask("a", prompt(5), new=2))).tokens_T) == 2

    run(work)


def test_a_second_request_of_the_same_name_is_refused(folder: Path) -> None:
    async def work() -> None:
        async with serving(folder) as engine:
            first = asyncio.create_task(engine.generate(ask("a", prompt(5), new=50)))
            await asyncio.sleep(0)
            with pytest.raises(InvalidRequest, match="already in flight"):
                await engine.generate(ask("a", prompt(5)))
            await first

    run(work)


def test_a_model_that_cannot_be_loaded_fails_the_start_with_its_path(tmp_path: Path) -> None:
    async def work() -> None:
        engine = TransformersEngine(lambda: load_model(str(tmp_path)), max_length=16)
        with pytest.raises(UnusableModel, match=str(tmp_path)):
            await engine.start()
        await engine.stop()

    run(work)


def test_stop_ends_what_is_in_flight_and_can_be_called_twice(folder: Path) -> None:
    async def work() -> None:
        engine = TransformersEngine(lambda: loaded(folder), max_length=128)
        await engine.start()
        running = asyncio.create_task(engine.generate(ask("a", prompt(5), new=100)))
        await asyncio.sleep(0.01)
        await engine.stop()
        assert (await running).finish is FinishReason.ABORT
        await engine.stop()
        with pytest.raises(EngineError, match="not running"):
            await engine.generate(ask("b", prompt(5)))

    run(work)


def test_a_failing_step_fails_its_requests_instead_of_hanging_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with serving(folder) as engine:
            monkeypatch.setattr(engine, "_forward", lambda step: 1 / 0)
            with pytest.raises(EngineError, match="division by zero"):
                await engine.generate(ask("a", prompt(5)))
            with pytest.raises(EngineError, match="has failed"):
                await engine.generate(ask("b", prompt(5)))

    run(work)


async def test_another_engine_goes_on_from_the_tokens_of_one_that_is_lost(folder: Path) -> None:
    asked = ask("long", prompt(9), 60)
    async with serving(folder) as lost, serving(folder) as next_one:
        whole = await next_one.generate(replace(asked, request_id="undisturbed"))
        running = asyncio.create_task(lost.generate(asked))
        parts: list[Generation] = []
        while sum(len(part.tokens_T) for part in parts) < 20:
            await asyncio.sleep(0.001)
            if part := lost.progress("long", sum(len(part.tokens_T) for part in parts)):
                parts.append(part)
        await lost.abort()
        await running
        assert lost.progress("long", 0) is None
        begun = reduce(joined, parts)
        sampled = len(begun.tokens_T)
        rest = await next_one.generate(
            replace(
                asked,
                prompt_tokens=np.concatenate([asked.prompt_tokens, begun.tokens_T]),
                sampling=replace(asked.sampling, max_new_tokens=60 - sampled),
                sampled=sampled,
            )
        )
    response = joined(begun, rest)
    np.testing.assert_array_equal(response.tokens_T, whole.tokens_T)
    np.testing.assert_allclose(response.logprobs_T, whole.logprobs_T, atol=1e-4)


@pytest.mark.parametrize("option", ["batch_invariant", "restart_on_update"])
async def test_no_engine_goes_on_where_a_response_must_come_from_one(
    folder: Path, option: str
) -> None:
    async with serving(folder, **{option: True}) as engine:
        running = asyncio.create_task(engine.generate(ask("long", prompt(9), 60)))
        while not engine.stats().generated_tokens:
            await asyncio.sleep(0.001)
        assert engine.progress("long", 0) is None
        await running
