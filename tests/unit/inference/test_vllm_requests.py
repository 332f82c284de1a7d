"""What goes to vLLM's server and comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agenticrun_workers.inference import EngineError
from agenticrun_workers.inference.server_process import readable_answer
from agenticrun_workers.inference.vllm.engine import from_vllm, to_vllm
from agenticrun_workers.types import FinishReason, GenerationRequest, SamplingParams


def a_request(sampling: SamplingParams) -> GenerationRequest:
    return GenerationRequest("r", "s", np.array([3, 1], np.int32), sampling, seed=7)


def test_a_request_is_asked_for_token_by_token_until_one_of_its_own_stop_tokens() -> None:
    body = to_vllm(
        a_request(SamplingParams(5, 0.5, top_p=0.9, top_k=4, min_p=0.1, stop_token_ids=(2, 9))),
        "17",
    )
    assert body["request_id"] == "17"
    assert body["token_ids"] == [3, 1]
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
    assert sampling["ignore_eos"] is True
    assert "seed" not in sampling, "vLLM's own seeds end the server on CPUs"


@pytest.mark.parametrize(
    ("temperature", "record", "expected"),
    [(0.5, None, 0.5), (0.5, 1.0, 1.0), (0.0, None, 1.0), (0.0, 0.7, 0.7)],
)
def test_log_probs_are_asked_for_at_the_temperature_that_the_types_say(
    temperature: float, record: float | None, expected: float
) -> None:
    body = to_vllm(a_request(SamplingParams(5, temperature, record_temperature=record)), "1")
    assert body["sampling_params"]["extra_args"] == {"seed": 7, "record_temperature": expected}


def test_an_answer_says_which_token_had_which_version() -> None:
    choice = {
        "token_ids": [4, 5, 6],
        "finish_reason": "abort",
        "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}, {"logprob": -0.5}]},
        "weight_versions": [
            {"version": "8", "start": 0, "end": 1},
            {"version": "9", "start": 1, "end": 3},
        ],
    }
    generation = from_vllm({"choices": [choice]})
    assert generation.tokens_T.tolist() == [4, 5, 6]
    assert generation.logprobs_T.tolist() == [-1.0, -2.0, -0.5]
    assert generation.versions_T.tolist() == [8, 9, 9]
    assert generation.finish is FinishReason.ABORT


def test_an_answer_without_tokens_has_empty_arrays() -> None:
    choice = {
        "token_ids": [],
        "finish_reason": "abort",
        "logprobs": {"content": []},
        "weight_versions": [],
    }
    generation = from_vllm({"choices": [choice]})
    assert len(generation.tokens_T) == len(generation.logprobs_T) == len(generation.versions_T) == 0


def test_an_answer_of_another_form_is_an_error_of_the_engine() -> None:
    answers: list[dict[str, Any]] = [
        {},
        {"choices": []},
        {"choices": [{"token_ids": ["a"], "logprobs": None}]},
    ]
    for answer in answers:
        with pytest.raises(EngineError, match="cannot be read"), readable_answer():
            from_vllm(answer)
