"""IncomingWeights: an engine's update whose buckets arrive one call after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from agenticrun_workers.weights.mapping import Verifier
from agenticrun_workers.weights.written import CorruptBucket

if TYPE_CHECKING:
    from agenticrun_workers.inference import InferenceEngine


class IncomingWeights:
    """Begins the engine's update at once: it stops sampling, and takes each bucket as soon as it is there."""

    def __init__(self, engine: InferenceEngine, version: int, verifier: Verifier) -> None:
        self._verifier = verifier
        self._arrived: asyncio.Queue[Path | CorruptBucket | None] = asyncio.Queue()
        self._update = asyncio.create_task(
            engine.update_weights(self._parts(), version), name=f"update to version {version}"
        )

    async def take(self, path: Path, checksum: int) -> None:
        """Pass a bucket on. Raises `CorruptBucket`, and what the engine's update has raised."""
        if self._update.done():
            await self._update
        try:
            await asyncio.to_thread(self._verifier.check, path, checksum)
        except CorruptBucket as corrupt:
            self._arrived.put_nowait(corrupt)
            raise
        self._arrived.put_nowait(path)

    async def finish(self) -> None:
        """All buckets are there. Raises what the engine's update raises."""
        self._arrived.put_nowait(None)
        await self._update

    async def _parts(self) -> AsyncIterator[Path]:
        while (part := await self._arrived.get()) is not None:
            if isinstance(part, CorruptBucket):
                raise part
            yield part
