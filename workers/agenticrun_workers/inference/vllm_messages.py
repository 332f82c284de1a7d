"""Requests and answers of vLLM's `/inference/v1/generate`: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from agenticrun_workers.types import FinishReason, Generation, GenerationRequest

GENERATE = "/inference/v1/generate"
ID_PREFIX = "generate-tokens-"
"""The server puts it before the ids of requests; `/abort_requests` ignores ids without it."""
SEED_BITS = 2**64 - 1


def to_vllm(request: GenerationRequest, server_id: str) -> dict[str, Any]:
    """The JSON body of a request, under an id of our own."""
    sampling = request.sampling
    return {
        "request_id": server_id,
        "token_ids": request.prompt_tokens.tolist(),
        "sampling_params": {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
            "extra_args": {
                "seed": request.seed & SEED_BITS,
                "record_temperature": sampling.record_temperature or sampling.temperature or 1.0,
            },
        },
    }


def from_vllm(answer: Mapping[str, Any]) -> Generation:
    """What the server sampled. The versions are the labels that `/update_weight_version` set."""
    choice = answer["choices"][0]
    tokens_T = np.asarray(choice["token_ids"], np.int32)
    logprobs_T = np.asarray(
        [token["logprob"] for token in choice["logprobs"]["content"]], np.float32
    )
    versions_T = np.empty(len(tokens_T), np.int32)
    for span in choice["weight_versions"] or []:
        versions_T[span["start"] : span["end"]] = int(span["version"])
    return Generation(tokens_T, logprobs_T, versions_T, FinishReason(choice["finish_reason"]))
