"""Sinks for progress snapshots: the protocol, and the client of the reporter."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from typing_extensions import override

from agenticrun_api import Commands, Progress
from agenticrun_api.names import DRIVER_HEADER, TOKEN_HEADER

log = logging.getLogger(__name__)


class ProgressSink(Protocol):
    """A receiver of snapshots. Training never waits for it, and never fails because of it."""

    def update(self, progress: Progress) -> None:
        """Take the newest snapshot and return at once; undelivered older snapshots are dropped."""
        ...

    def sample(self, transcript: str) -> None:
        """Take the text of an episode of the newest step, for users to read."""
        ...

    async def finish(self, progress: Progress) -> None:
        """Deliver the last snapshot, which has `final`, and stop.

        Tries for a while, then gives up silently.
        """
        ...


INTERVAL_SECONDS = 1.0
"""Time between posts without a change; a change is posted at once."""
FINAL_TRIES = 30


class ReporterClient(ProgressSink):
    """Posts the newest snapshot to the reporter in the background; a `ProgressSink`.

    Needs a running event loop.

    Args:
        url: of the reporter.
        token: of the reporter.
        on_commands: called with the commands in every answer.
    """

    def __init__(self, url: str, token: str, on_commands: Callable[[Commands], None]) -> None:
        import aiohttp  # not at the top: every command would start a third of a second later

        secret = secrets.token_hex(16)
        self._session = aiohttp.ClientSession(
            url,
            headers={TOKEN_HEADER: f"Bearer {token}", DRIVER_HEADER: secret},
            timeout=aiohttp.ClientTimeout(total=5),
        )
        self._on_commands = on_commands
        self._newest: Progress | None = None
        self._changed = asyncio.Event()
        self._poster: asyncio.Task[None] | None = None
        self._reachable = True

    async def start(self) -> None:
        """Start posting."""
        self._poster = asyncio.create_task(self._post_forever(), name="reporter")

    @override
    def update(self, progress: Progress) -> None:
        self._newest = progress
        self._changed.set()

    @override
    def sample(self, transcript: str) -> None:
        """Samples are in the log only."""
        log.info("sample:\n%s", transcript)

    @override
    async def finish(self, progress: Progress) -> None:
        if self._poster is not None:
            # First, or an older snapshot could arrive after the last one.
            self._poster.cancel()
            await asyncio.wait([self._poster])
        # The sidecar may be restarting; the report is what the operator waits for.
        for _ in range(FINAL_TRIES):
            if await self._post(progress):
                break
            await asyncio.sleep(INTERVAL_SECONDS)
        await self._session.close()

    async def _post_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: it swallows a cancellation that coincides with a change.
                async with asyncio.timeout(INTERVAL_SECONDS):
                    await self._changed.wait()
            # Before the post: a change during it is posted right after.
            self._changed.clear()
            if self._newest is not None:
                await self._post(self._newest)

    async def _post(self, progress: Progress) -> bool:
        import aiohttp

        try:
            body = progress.model_dump_json(by_alias=True, exclude_none=True)
            async with self._session.post("/progress", data=body) as response:
                text = await response.text()
                response.raise_for_status()
            self._on_commands(Commands.model_validate_json(text))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # also of pydantic
            # Logged once for each outage, not every second.
            if self._reachable:
                log.warning(
                    "the reporter does not accept progress: %s: %s", type(error).__name__, error
                )
            self._reachable = False
            return False
        self._reachable = True
        return True


def rfc3339(seconds: float) -> str:
    """Format seconds since the epoch as RFC 3339 in UTC, in whole seconds."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
