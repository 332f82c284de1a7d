"""What is said to an SGLang server about one request, and what it answers."""

from __future__ import annotations

from typing import Any

import numpy as np

from agenticrun_workers.types import FinishReason, Generation, GenerationRequest

SEED_BITS = 63
NOTHING = Generation(
    np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), FinishReason.ABORT
)
"""Of a request that was aborted before anything came back."""


def generate_body(request: GenerationRequest, rid: str) -> dict[str, Any]:
    """The body of /generate. `rid` is the server's name of the request."""
    sampling = request.sampling
    record = (
        sampling.record_temperature
        if sampling.record_temperature is not None
        else sampling.temperature or 1.0
    )
    return {
        "rid": rid,
        "input_ids": request.prompt_tokens.tolist(),
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "custom_params": {"record_temperature": record, "seed": request.seed % 2**SEED_BITS},
        },
    }


def read_generation(request: GenerationRequest, answer: dict[str, Any]) -> Generation:
    """What /generate answered."""
    meta = answer["meta_info"]
    tokens = answer["output_ids"]
    logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
    versions_T = np.zeros(len(tokens), np.int32)
    for span in meta.get("weight_versions") or [
        {"version": meta["weight_version"], "start": 0, "end": len(tokens)}
    ]:
        versions_T[span["start"] : span["end"]] = int(span["version"])
    finish = FinishReason(meta["finish_reason"]["type"])
    if finish is FinishReason.LENGTH and tokens[-1] in request.sampling.stop_token_ids:
        finish = FinishReason.STOP  # SGLang counts before it looks
    return Generation(
        np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32), versions_T, finish
    )


def computed_prompt_tokens(answer: dict[str, Any]) -> int:
    """Those that were not in the prefix cache."""
    meta = answer["meta_info"]
    return int(meta.get("prompt_tokens", 0) - meta.get("cached_tokens", 0))
