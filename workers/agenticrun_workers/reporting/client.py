"""Progress snapshots on their way out of the driver: the sink's protocol, and the reporter's client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

import aiohttp
from pydantic import ValidationError

from agenticrun_api import Commands, Progress
from agenticrun_api.names import TOKEN_HEADER

log = logging.getLogger(__name__)


class ProgressSink(Protocol):
    """Takes snapshots. Training never waits for it and never fails because of it."""

    def update(self, progress: Progress) -> None:
        """The newest snapshot. Returns at once; older snapshots that were not delivered are dropped."""
        ...

    def sample(self, transcript: str) -> None:
        """The text of an episode of the newest step, for people."""
        ...

    async def finish(self, progress: Progress) -> None:
        """Deliver the last snapshot, whose `final` is set, and stop. Tries for a while, then gives up silently."""
        ...


INTERVAL_SECONDS = 1.0
"""Between posts when nothing changes; a change is posted at once."""
FINAL_TRIES = 30


class ReporterClient:
    """A `ProgressSink`. `start` it on a running loop; `on_commands` is called with every answer."""

    def __init__(self, url: str, token: str, on_commands: Callable[[Commands], None]) -> None:
        self._url = url
        self._token = token
        self._on_commands = on_commands
        self._newest: Progress | None = None
        self._changed = asyncio.Event()
        self._poster: asyncio.Task[None] | None = None
        self._reachable = True

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            self._url,
            headers={TOKEN_HEADER: f"Bearer {self._token}"},
            timeout=aiohttp.ClientTimeout(total=5),
        )
        self._poster = asyncio.create_task(self._post_forever(), name="reporter")

    def update(self, progress: Progress) -> None:
        """See `ProgressSink`."""
        self._newest = progress
        self._changed.set()

    def sample(self, transcript: str) -> None:
        """See `ProgressSink`: samples are in the log only."""
        log.info("sample:\n%s", transcript)

    async def finish(self, progress: Progress) -> None:
        """See `ProgressSink`."""
        if self._poster is not None:
            self._poster.cancel()
            await asyncio.wait([self._poster])
        for _ in range(FINAL_TRIES):
            if await self._post(progress):
                break
            await asyncio.sleep(INTERVAL_SECONDS)
        await self._session.close()

    async def _post_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    INTERVAL_SECONDS
                ):  # not wait_for: it swallows a cancellation that meets a change
                    await self._changed.wait()
            self._changed.clear()
            if self._newest is not None:
                await self._post(self._newest)

    async def _post(self, progress: Progress) -> bool:
        try:
            body = progress.model_dump_json(by_alias=True, exclude_none=True)
            async with self._session.post("/progress", data=body) as response:
                text = await response.text()
                response.raise_for_status()
            self._on_commands(Commands.model_validate_json(text))
        except (aiohttp.ClientError, TimeoutError, ValidationError) as error:
            if self._reachable:
                log.warning(
                    "the reporter does not take progress: %s: %s", type(error).__name__, error
                )
            self._reachable = False
            return False
        self._reachable = True
        return True
