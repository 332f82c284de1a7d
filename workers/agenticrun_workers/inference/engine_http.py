"""JSON over HTTP to an engine's server on this machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from agenticrun_workers.inference.engine import EngineError, InvalidRequest
from agenticrun_workers.inference.server_process import EngineProcess

HEADERS = {"Content-Type": "application/json"}
KEEP_ALIVE_SECONDS = 2.0
"""Less than the 5 s after which uvicorn closes a connection that nobody uses."""
STALE = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
"""The server closed the connection while we took it up again, and has read nothing: the request is sent once more. If it ended, there is
nothing to connect to."""
END_SECONDS = 60.0
"""How long a server may take to end after its connections broke: on a busy machine its keeper looks for the last process for a while."""


class EngineHttp:
    """Connections that stay open, as many as there are requests in flight."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._session = aiohttp.ClientSession(
            process.url,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def post(
        self, path: str, body: Mapping[str, Any], *, seconds: float | None = None
    ) -> Any:
        """The answer's JSON.

        Args:
            seconds: how long it may take; None: for ever, as long as the server lives.

        Raises:
            InvalidRequest: the server refused it (400).
            EngineError: any other failure; if the server has ended, with the end of its log.
        """
        try:
            async with asyncio.timeout(seconds):
                try:
                    status, data = await self._send(path, body)
                except STALE:
                    status, data = await self._send(path, body)
        except aiohttp.ClientError as error:
            raise EngineError(await self._why(path, error)) from error
        except TimeoutError:
            raise EngineError(
                f"{path} of {self._process.url} was not answered in {seconds:.0f} s"
            ) from None
        if status == 200:
            return json.loads(data) if data else None
        kind = InvalidRequest if status == 400 else EngineError
        raise kind(f"{path} was answered {status}: {data.decode(errors='replace')[:2000]}")

    async def close(self) -> None:
        await self._session.close()

    async def _send(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        async with self._session.post(path, data=json.dumps(body), headers=HEADERS) as answer:
            return answer.status, await answer.read()

    async def _why(self, path: str, error: aiohttp.ClientError) -> str:
        """Connections break a moment before the server's processes are gone."""
        try:
            return await asyncio.wait_for(self._process.gone(), END_SECONDS)
        except TimeoutError:
            return f"{path} of {self._process.url} failed: {error!r}"
