"""What goes to vLLM's server and comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agenticrun_workers.inference import EngineError
from agenticrun_workers.inference.engine import SampledTokens
from agenticrun_workers.inference.server_process import readable_answer
from agenticrun_workers.inference.vllm.engine import read_event, to_vllm
from agenticrun_workers.types import FinishReason, GenerationRequest, SamplingParams


def a_request(sampling: SamplingParams) -> GenerationRequest:
    return GenerationRequest("r", "s", np.array([3, 1], np.int32), sampling, seed=7)


def test_a_request_is_asked_for_token_by_token_until_one_of_its_own_stop_tokens() -> None:
    body = to_vllm(
        a_request(SamplingParams(5, 0.5, top_p=0.9, top_k=4, min_p=0.1, stop_token_ids=(2, 9))),
        "17",
        32,
    )
    assert body["request_id"] == "17"
    assert body["token_ids"] == [3, 1]
    assert body["stream"] is True
    sampling = body["sampling_params"]
    assert (
        sampling["max_tokens"],
        sampling["temperature"],
        sampling["top_p"],
        sampling["top_k"],
        sampling["min_p"],
    ) == (
        5,
        0.5,
        0.9,
        4,
        0.1,
    )
    assert sampling["stop_token_ids"] == [2, 9]
    assert sampling["stream_interval"] == 32
    assert sampling["ignore_eos"] is True
    assert "seed" not in sampling, "vLLM's own seeds end the server on CPUs"


@pytest.mark.parametrize(
    ("temperature", "record", "expected"),
    [(0.5, None, 0.5), (0.5, 1.0, 1.0), (0.0, None, 1.0), (0.0, 0.7, 0.7)],
)
def test_log_probs_are_asked_for_at_the_temperature_that_the_types_say(
    temperature: float, record: float | None, expected: float
) -> None:
    body = to_vllm(a_request(SamplingParams(5, temperature, record_temperature=record)), "1", 8)
    assert body["sampling_params"]["extra_args"]["record_temperature"] == expected


def test_random_numbers_go_on_after_the_tokens_that_another_engine_sampled() -> None:
    body = to_vllm(replace(a_request(SamplingParams(5)), sampled=3), "1", 8)
    assert body["sampling_params"]["extra_args"]["seed"] == 7
    assert body["sampling_params"]["extra_args"]["sampled"] == 3


def test_only_a_request_with_a_format_has_structured_outputs() -> None:
    assert (
        "structured_outputs" not in to_vllm(a_request(SamplingParams(5)), "1", 8)["sampling_params"]
    )
    tagged = to_vllm(a_request(SamplingParams(5, structural_tag='{"type": "x"}')), "1", 8)
    assert tagged["sampling_params"]["structured_outputs"] == {"structural_tag": '{"type": "x"}'}


def an_event(
    tokens: list[int], spans: list[dict[str, Any]], finish: str | None = None
) -> dict[str, Any]:
    content = [{"logprob": -0.5 * token} for token in tokens]
    choice = {
        "token_ids": tokens,
        "finish_reason": finish,
        "logprobs": {"content": content},
        "weight_versions": spans,
    }
    return {"choices": [choice]}


def test_events_add_up_to_tokens_with_the_version_of_each() -> None:
    """The versions in an event are those of all tokens so far."""
    sampled = SampledTokens()
    spans = [{"version": "8", "start": 0, "end": 2}, {"version": "9", "start": 2, "end": 3}]
    assert read_event(an_event([4], [{"version": "8", "start": 0, "end": 1}]), sampled) is None
    assert read_event(an_event([5, 6], spans), sampled) is None
    assert read_event(an_event([], spans, "abort"), sampled) is FinishReason.ABORT
    assert sampled == SampledTokens([4, 5, 6], [-2.0, -2.5, -3.0], [8, 8, 9])


def test_a_request_that_was_aborted_before_its_first_token_has_none() -> None:
    sampled = SampledTokens()
    assert read_event(an_event([], [], "abort"), sampled) is FinishReason.ABORT
    assert len(sampled) == 0


def test_an_event_of_another_form_is_an_error_of_the_engine() -> None:
    events: list[dict[str, Any]] = [
        {},
        {"choices": []},
        {"choices": [{"token_ids": ["a"], "logprobs": None}]},
    ]
    for event in events:
        with pytest.raises(EngineError, match="cannot be read"), readable_answer():
            read_event(event, SampledTokens())


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (an_event([2**40], []), "OverflowError"),
        (an_event([1.5], []), "TypeError"),  # type: ignore[list-item]
        (an_event([5], [{"version": "8", "start": 0, "end": 3}]), "of which 2 have come"),
    ],
    ids=["a huge id", "no id", "a lost event"],
)
def test_what_is_no_token_or_lacks_some_is_noticed_when_it_comes(
    event: dict[str, Any], message: str
) -> None:
    """Later nobody could say what is wrong: the request would fail, and not the engine."""
    sampled = SampledTokens([4], [-2.0], [8])
    with pytest.raises(EngineError, match=message), readable_answer():
        read_event(event, sampled)
    assert sampled == SampledTokens([4], [-2.0], [8])


def test_tokens_without_their_log_probs_are_noticed() -> None:
    event = an_event([5, 6], [])
    del event["choices"][0]["logprobs"]["content"][0]
    with pytest.raises(EngineError, match="2 tokens with 1 log-probs"), readable_answer():
        read_event(event, SampledTokens())
