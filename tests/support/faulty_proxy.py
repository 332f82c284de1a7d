"""A proxy in front of a real apiserver that breaks on command: `Fault` lists how.

The operator connects to it with plain HTTP. Other clients of the apiserver do not use it.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum

import aiohttp
from aiohttp import web

STORM_SHARE = 0.7
"""Share of the requests that a storm of errors hits."""
SLOW_SECONDS = 4.0
"""Delay of the events of a slow watch."""
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


class Fault(Enum):
    """The way in which the proxy breaks until the fault is over."""

    FROZEN = "all connections freeze, and go on afterwards"
    FROZEN_NEW = "all connections are reset, new ones are accepted, and nothing comes"
    FROZEN_WATCHES = "watches freeze, other requests are answered"
    DEAD = "all connections so far freeze forever, new ones work"
    RESET = "all connections are reset, and most new requests"
    GONE = "410 for watches, the first one in the middle of the stream"
    CONFLICTS = "409 for most writes"
    TOO_MANY = "429 with Retry-After for all requests"
    ERRORS = "500 and 503 for most requests"
    SLOW_WATCH = "events of watches are late"
    LOST_ANSWERS = "most writes are carried out and not answered"


class FaultyProxy:
    """The proxy, and its faults."""

    def __init__(self, apiserver: str, context: ssl.SSLContext, seed: int = 0):
        """Create a proxy.

        Args:
            apiserver: its address.
            context: how to verify the apiserver's certificate.
            seed: chooses which requests a storm hits.
        """
        self._apiserver = apiserver
        self._context = context
        self._random = random.Random(seed)
        self._fault: Fault | None = None
        self._over = asyncio.Event()
        self._open: set[asyncio.Transport] = set()
        self._dead: set[asyncio.Transport] = set()
        self.hits: Counter[Fault] = Counter()
        """Requests and streams that each fault has hit."""
        self.requests: list[float] = []
        """When each request arrived."""
        self.url = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[FaultyProxy]:
        """Serve on a port of localhost."""
        self._over.set()
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        connector = aiohttp.TCPConnector(limit=0, ssl=self._context)
        async with aiohttp.ClientSession(
            self._apiserver, connector=connector, auto_decompress=False
        ) as self._session:
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                self.end()
                await runner.cleanup()

    @property
    def healthy(self) -> bool:
        return self._fault is None

    def begin(self, fault: Fault) -> None:
        """Break. Dead connections stay dead, but the proxy counts as healthy at once."""
        open_ = {transport for transport in self._open if not transport.is_closing()}
        self._open = set(open_)
        if fault is Fault.DEAD:
            self._dead = open_
            return
        self._over.clear()
        self._fault = fault
        if fault in (Fault.RESET, Fault.FROZEN_NEW):
            for transport in open_:
                transport.abort()

    def end(self) -> None:
        """Be healthy again."""
        self._fault = None
        self._over.set()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError
        self._open.add(transport)
        body = await request.read()
        self.requests.append(time.monotonic())
        await self._wait(transport)
        if (refusal := self._refusal(request)) is not None:
            return refusal
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOP}
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.request(
            request.method,
            request.rel_url,
            headers=headers,
            data=body or None,
            skip_auto_headers=["Content-Type"],
            timeout=timeout,
        ) as answer:
            headers = {
                key: value for key, value in answer.headers.items() if key.lower() not in _HOP
            }
            if "watch" in request.query and answer.status == 200:
                return await self._stream(request, transport, answer, headers)
            content = await answer.read()
        await self._wait(transport)
        if transport.is_closing():  # the client gave up
            return web.Response()
        write = request.method != "GET"
        if self._fault is Fault.RESET or (write and self._strikes(Fault.LOST_ANSWERS)):
            transport.abort()
        return web.Response(status=answer.status, body=content, headers=headers)

    async def _stream(
        self,
        request: web.Request,
        transport: asyncio.Transport,
        answer: aiohttp.ClientResponse,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        """Pass on the events of a watch, line by line."""
        response = web.StreamResponse(headers=headers)
        lines: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        reader = asyncio.create_task(_read_lines(answer, lines))
        try:
            await response.prepare(request)
            while True:
                due, line = await self._next(lines)
                if self._fault is Fault.SLOW_WATCH:
                    self.hits[Fault.SLOW_WATCH] += 1
                    await asyncio.sleep(max(0.0, due + SLOW_SECONDS - time.monotonic()))
                await self._wait(transport, watch=True)
                if line == _GONE:
                    self.hits[Fault.GONE] += 1
                await response.write(line)
                if line in (b"", _GONE):
                    return response
        except ConnectionResetError:
            return response
        finally:
            reader.cancel()

    async def _next(self, lines: asyncio.Queue[tuple[float, bytes]]) -> tuple[float, bytes]:
        """Return the next line, or the event that says that the watch is too old."""
        while True:
            if self._fault is Fault.GONE:
                return time.monotonic(), _GONE
            try:
                return await asyncio.wait_for(lines.get(), 0.1)
            except TimeoutError:
                continue

    async def _wait(self, transport: asyncio.Transport, watch: bool = False) -> None:
        """Return when the connection is not frozen."""
        if transport in self._dead:
            self.hits[Fault.DEAD] += 1
            await asyncio.Event().wait()
        frozen = self._fault in (Fault.FROZEN, Fault.FROZEN_NEW)
        frozen = frozen or (self._fault is Fault.FROZEN_WATCHES and watch)
        if frozen and self._fault:
            self.hits[self._fault] += 1
            await self._over.wait()

    def _refusal(self, request: web.Request) -> web.Response | None:
        """Return the answer of an apiserver that does not carry out the request."""
        if self._strikes(Fault.RESET):
            if request.transport:
                request.transport.abort()
            return web.Response()
        if self._fault is Fault.GONE and "watch" in request.query:
            self.hits[Fault.GONE] += 1
            return _status(410, "Expired", "too old resource version")
        if request.method in ("PATCH", "PUT", "POST") and self._strikes(Fault.CONFLICTS):
            return _status(409, "Conflict", "the object has been modified")
        if self._fault is Fault.TOO_MANY:
            self.hits[Fault.TOO_MANY] += 1
            refusal = _status(429, "TooManyRequests", "please try again later")
            refusal.headers["Retry-After"] = "1"
            return refusal
        if self._strikes(Fault.ERRORS):
            status = self._random.choice((500, 503))
            if status == 500:
                return web.Response(status=500, text="Internal Server Error\n")
            return _status(503, "ServiceUnavailable", "apiserver is shutting down")
        return None

    def _strikes(self, fault: Fault) -> bool:
        """Return True if the storm hits this request."""
        hit = self._fault is fault and self._random.random() < STORM_SHARE
        self.hits[fault] += hit
        return hit


async def _read_lines(
    answer: aiohttp.ClientResponse, lines: asyncio.Queue[tuple[float, bytes]]
) -> None:
    """Put each line into the queue with the time of its arrival, and an empty one at the end."""
    rest = b""
    try:
        async for chunk in answer.content.iter_any():
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                lines.put_nowait((time.monotonic(), line + b"\n"))
    except aiohttp.ClientError:
        pass
    lines.put_nowait((time.monotonic(), b""))


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "code": code, "reason": reason, "message": message}
    return web.json_response(body, status=code)


_GONE = (
    json.dumps(
        {
            "type": "ERROR",
            "object": {
                "kind": "Status",
                "code": 410,
                "reason": "Expired",
                "message": "too old resource version",
            },
        }
    ).encode()
    + b"\n"
)
