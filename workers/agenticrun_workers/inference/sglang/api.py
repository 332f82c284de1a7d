"""The HTTP API of an SGLang server: requests, control of all requests, and weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from agenticrun_workers.inference.engine import EngineError, InvalidRequest
from agenticrun_workers.inference.server_process import ServerClient
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest

SECONDS = 600.0
"""Longest wait for an answer: the server answers between two steps."""
GROUP = "agenticrun"
SEED_BITS = 63


def generate_body(request: GenerationRequest, rid: str) -> dict[str, Any]:
    """Return the body of /generate. `rid` is the request's id in the server."""
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
    """Return the generation in an answer of /generate."""
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
        finish = FinishReason.STOP  # SGLang checks the length before the stop tokens
    return Generation(
        np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32), versions_T, finish
    )


def computed_prompt_tokens(answer: dict[str, Any]) -> int:
    """Return the number of prompt tokens that were not in the prefix cache."""
    meta = answer["meta_info"]
    return int(meta.get("prompt_tokens", 0) - meta.get("cached_tokens", 0))


class SglangControl:
    """Control of a server. Methods return when it is done, and raise `EngineError` if it fails."""

    def __init__(self, http: ServerClient) -> None:
        self._http = http

    async def pause(self) -> None:
        """Stop sampling; requests keep their keys and values."""
        await self._post("/pause_generation", {"mode": "in_place"})

    async def retract(self) -> None:
        """Stop sampling; requests keep their tokens, and lose their keys and values."""
        await self._post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def abort(self, rid: str) -> None:
        """End every request with an id that begins with `rid`.

        The server ignores the call if it has not read the request yet.
        """
        await self._post("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"abort_all": True})

    async def load_folder(self, folder: Path, version: int) -> None:
        """Load all weights from safetensors files, and drop the cache."""
        await self._update("/update_weights_from_disk", {"model_path": str(folder)}, version)

    async def join_group(self, host: str, port: int, first_rank: int, world: int) -> None:
        """Join the collective of the trainer: see `plugin`, broadcast."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": first_rank,
            "world_size": world,
            "group_name": GROUP,
        }
        await self._post("/init_weights_update_group", body)

    async def receive(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        version: int,
    ) -> None:
        """Load all weights from the collective, and drop the cache."""
        async with self._update_session():
            body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": GROUP}
            await self._update("/update_weights_from_distributed", body, version)

    async def release_memory(self) -> None:
        await self._post("/release_memory_occupation", {})

    async def resume_memory(self) -> None:
        await self._post("/resume_memory_occupation", {})

    @asynccontextmanager
    async def _update_session(self) -> AsyncIterator[None]:
        await self._post("/begin_weight_update", {})
        try:
            yield
        finally:
            # Also after a failure: the server refuses a second session while one is open.
            await self._post("/end_weight_update", {})

    async def _update(self, path: str, body: Mapping[str, Any], version: int) -> None:
        await self._post(path, {**body, "weight_version": str(version), "flush_cache": True})

    async def _post(self, path: str, body: Mapping[str, Any]) -> None:
        try:
            answer = await self._http.post(path, body, seconds=SECONDS)
        except InvalidRequest as error:
            raise EngineError(str(error)) from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"SGLang refused {path}: {answer.get('message')}")
