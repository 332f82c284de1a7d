"""What is said to an SGLang server about all of its requests, and about its weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agenticrun_workers.inference.engine import EngineError, InvalidRequest
from agenticrun_workers.inference.engine_http import EngineHttp

SECONDS = 600.0
"""Longest wait for an answer: the server answers between two steps."""
GROUP = "agenticrun"


class SglangControl:
    """Each method returns when the server has done it, and raises `EngineError` when it could not."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http

    async def hold(self) -> None:
        """Stop sampling; requests keep their keys and values."""
        await self._post("/pause_generation", {"mode": "in_place"})

    async def retract(self) -> None:
        """Stop sampling; requests keep their tokens, and their keys and values will be computed anew."""
        await self._post("/pause_generation", {"mode": "retract"})

    async def go_on(self) -> None:
        await self._post("/continue_generation", {})

    async def abort(self, rid: str) -> None:
        """End every request whose name begins with `rid`. One that the server has not read yet is not touched."""
        await self._post("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"abort_all": True})

    async def load_folder(self, folder: Path, version: int) -> None:
        """Take all weights from safetensors files, and forget what was computed with others."""
        await self._update("/update_weights_from_disk", {"model_path": str(folder)}, version)

    async def join_group(self, host: str, port: int, first_rank: int, world: int) -> None:
        """Meet the sender of weights: see `sglang_plugin`'s broadcast."""
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
        """Take all weights from the group, and forget what was computed with others."""
        async with self._session():
            body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": GROUP}
            await self._update("/update_weights_from_distributed", body, version)

    async def release_memory(self) -> None:
        await self._post("/release_memory_occupation", {})

    async def resume_memory(self) -> None:
        await self._post("/resume_memory_occupation", {})

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[None]:
        await self._post("/begin_weight_update", {})
        try:
            yield
        finally:
            # Also after a failure: a session that is open refuses the next.
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
