"""What is said to SGLang about a request, and what its answers mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agenticrun_workers.inference.sglang.server import (
    computed_prompt_tokens,
    generate_body,
    read_generation,
)
from agenticrun_workers.types import FinishReason, GenerationRequest, SamplingParams


def a_request(**sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        "r", "s", np.array([5, 6], np.int32), SamplingParams(4, **sampling), seed=2**70 + 3
    )


def an_answer(tokens: list[int], finish: str = "length", **meta: Any) -> dict[str, Any]:
    entries = [[-0.5 * n, token, None] for n, token in enumerate(tokens)]
    return {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": finish},
            "output_token_logprobs": entries,
            "weight_version": "3",
            **meta,
        },
    }


def test_a_request_says_all_of_its_sampling() -> None:
    body = generate_body(
        a_request(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop_token_ids=(1, 2)), "0001"
    )
    assert body["rid"] == "0001"
    assert body["input_ids"] == [5, 6]
    assert body["return_logprob"] is True
    assert body["sampling_params"] == {
        "max_new_tokens": 4,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "stop_token_ids": [1, 2],
        "custom_params": {"record_temperature": 0.7, "seed": 3},
    }


def test_no_top_k_is_what_sglang_calls_minus_one() -> None:
    assert generate_body(a_request(), "r")["sampling_params"]["top_k"] == -1


@pytest.mark.parametrize(
    ("temperature", "record", "recorded"),
    [(0.7, None, 0.7), (0.7, 1.0, 1.0), (0.0, None, 1.0), (0.0, 0.5, 0.5)],
)
def test_log_probs_are_recorded_at_the_sampling_temperature_or_the_one_asked_for(
    temperature: float, record: float | None, recorded: float
) -> None:
    body = generate_body(a_request(temperature=temperature, record_temperature=record), "r")
    assert body["sampling_params"]["custom_params"]["record_temperature"] == recorded


def test_an_answer_becomes_tokens_log_probs_and_the_version_of_each_token() -> None:
    spans = [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 3}]
    generation = read_generation(a_request(), an_answer([7, 8, 9], weight_versions=spans))
    assert generation.tokens_T.tolist() == [7, 8, 9]
    assert generation.logprobs_T.tolist() == [0.0, -0.5, -1.0]
    assert generation.versions_T.tolist() == [2, 3, 3]
    assert generation.finish is FinishReason.LENGTH


def test_without_spans_all_tokens_have_the_one_version() -> None:
    assert read_generation(a_request(), an_answer([7, 8])).versions_T.tolist() == [3, 3]


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    assert (
        read_generation(a_request(stop_token_ids=(9,)), an_answer([7, 9])).finish
        is FinishReason.STOP
    )


def test_a_request_that_was_aborted_before_its_first_token_has_none() -> None:
    answer = {
        "output_ids": [],
        "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "3"},
    }
    generation = read_generation(a_request(), answer)
    assert (len(generation.tokens_T), len(generation.logprobs_T), generation.finish) == (
        0,
        0,
        FinishReason.ABORT,
    )


def test_prompt_tokens_count_where_they_were_not_cached() -> None:
    assert computed_prompt_tokens(an_answer([1], prompt_tokens=10, cached_tokens=7)) == 3
    assert computed_prompt_tokens(an_answer([])) == 0
