"""What is said to SGLang about a request, and what its answers mean."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agenticrun_workers.inference import EngineError, InvalidRequest
from agenticrun_workers.inference.engine import SampledTokens
from agenticrun_workers.inference.model_files import RequestLimits
from agenticrun_workers.inference.sglang.engine import SglangEngine
from agenticrun_workers.inference.sglang.server import (
    computed_prompt_tokens,
    generate_body,
    read_event,
)
from agenticrun_workers.types import FinishReason, GenerationRequest, SamplingParams
from waiting import eventually_in_loop


def a_request(**sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        "r", "s", np.array([5, 6], np.int32), SamplingParams(4, **sampling), seed=2**70 + 3
    )


def an_event(
    tokens: list[int], so_far: int, finish: dict[str, Any] | None = None, **meta: Any
) -> dict[str, Any]:
    return {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": finish,
            "completion_tokens": so_far,
            "output_token_logprobs": [[-0.5 * token, token, None] for token in tokens],
            "weight_versions": [{"version": "3", "start": 0, "end": so_far}],
            **meta,
        },
    }


def test_a_request_says_all_of_its_sampling() -> None:
    body = generate_body(
        a_request(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop_token_ids=(1, 2)), "0001", 32
    )
    assert body["rid"] == "0001"
    assert body["input_ids"] == [5, 6]
    assert body["return_logprob"] is True
    assert body["stream"] is True
    assert body["sampling_params"] == {
        "max_new_tokens": 4,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "stop_token_ids": [1, 2],
        "stream_interval": 32,
        "custom_params": {"record_temperature": 0.7, "seed": 3, "sampled": 0},
    }


def test_random_numbers_go_on_after_the_tokens_that_another_engine_sampled() -> None:
    body = generate_body(replace(a_request(), sampled=3), "r", 8)
    assert body["sampling_params"]["custom_params"]["sampled"] == 3


def test_a_format_is_passed_under_sglangs_own_name() -> None:
    tagged = generate_body(a_request(structural_tag='{"type": "x"}'), "r", 8)
    assert tagged["sampling_params"]["structural_tag"] == '{"type": "x"}'


def test_no_top_k_is_what_sglang_calls_minus_one() -> None:
    assert generate_body(a_request(), "r", 8)["sampling_params"]["top_k"] == -1


@pytest.mark.parametrize(
    ("temperature", "record", "recorded"),
    [(0.7, None, 0.7), (0.7, 1.0, 1.0), (0.0, None, 1.0), (0.0, 0.5, 0.5)],
)
def test_log_probs_are_recorded_at_the_sampling_temperature_or_the_one_asked_for(
    temperature: float, record: float | None, recorded: float
) -> None:
    body = generate_body(a_request(temperature=temperature, record_temperature=record), "r", 8)
    assert body["sampling_params"]["custom_params"]["record_temperature"] == recorded


def test_events_add_up_to_tokens_with_the_version_of_each() -> None:
    """The versions in an event are those of all tokens so far."""
    sampled = SampledTokens()
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    assert read_event(a_request(), an_event([4], 1), sampled) is None
    last = an_event([5, 6], 3, {"type": "length"}, weight_versions=spans)
    assert read_event(a_request(), last, sampled) is FinishReason.LENGTH
    assert sampled == SampledTokens([4, 5, 6], [-2.0, -2.5, -3.0], [3, 3, 4])


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    event = an_event([7, 9], 2, {"type": "length"})
    stopping = a_request(stop_token_ids=(9,))
    assert read_event(stopping, event, SampledTokens()) is FinishReason.STOP


@pytest.mark.parametrize("new", [[], [5, 6]], ids=["alone", "in one event with new tokens"])
def test_what_sglang_repeats_after_an_abort_is_left_out(new: list[int]) -> None:
    """The last token, and the log-probs of all of them."""
    sampled = SampledTokens([4], [-2.0], [3])
    whole = [4, *new]
    logprobs = [[-0.5 * token, token, None] for token in [*new, *whole]]
    event = an_event(
        [*new, whole[-1]], len(whole), {"type": "abort"}, output_token_logprobs=logprobs
    )
    assert read_event(a_request(), event, sampled) is FinishReason.ABORT
    assert sampled == SampledTokens(whole, [-0.5 * token for token in whole], [3] * len(whole))


def test_a_request_that_was_aborted_before_its_first_token_has_none() -> None:
    event = {
        "output_ids": [],
        "meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": 0},
    }
    sampled = SampledTokens()
    assert read_event(a_request(), event, sampled) is FinishReason.ABORT
    assert len(sampled) == 0


@pytest.mark.parametrize(("status", "kind"), [(400, InvalidRequest), (500, EngineError)])
@pytest.mark.parametrize("tokens", [[], [20]])
def test_a_request_that_the_server_ends_by_itself_is_an_error(
    status: int, kind: type[EngineError], tokens: list[int]
) -> None:
    """A refused format has a token without a log-prob."""
    reason = {"type": "abort", "status_code": status, "message": "too long"}
    event = an_event(tokens, len(tokens), reason, output_token_logprobs=None)
    with pytest.raises(EngineError, match="too long") as caught:
        read_event(a_request(), event, SampledTokens())
    assert type(caught.value) is kind


def test_prompt_tokens_count_where_they_were_not_cached() -> None:
    assert computed_prompt_tokens(an_event([1], 1, prompt_tokens=10, cached_tokens=7)) == 3
    assert computed_prompt_tokens(an_event([], 0)) == 0


async def test_a_response_that_has_ended_is_shown_no_more() -> None:
    """Another engine could not go on from it: it would be asked for no token."""
    ends, closes = asyncio.Event(), asyncio.Event()

    class Server:
        async def events(self, *_: object) -> AsyncGenerator[Any, None]:
            yield an_event([7, 8], 2)
            await ends.wait()
            yield an_event([9, 4], 4, {"type": "length"})
            await closes.wait()

    engine = SglangEngine(Path(), dtype="bfloat16", max_length=64, log_folder=Path())
    model = SimpleNamespace(limits=RequestLimits(100, 64))
    started: Any = SimpleNamespace(http=Server(), model=model)
    engine._started, engine._refusal = started, ""
    response = asyncio.create_task(engine.generate(a_request()))
    await eventually_in_loop(lambda: engine.progress("r", 0) is not None, 20, "two tokens")
    ends.set()
    await eventually_in_loop(lambda: engine.progress("r", 0) is None, 20, "the end")
    assert not response.done()
    closes.set()
    assert (await response).tokens_T.tolist() == [7, 8, 9, 4]
