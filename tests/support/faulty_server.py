"""A proxy in front of a real SGLang or vLLM server that breaks on command: `Fault` lists how."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

import aiohttp
from aiohttp import web

from agenticrun_workers.inference.sglang.server import GENERATE as SGLANG
from agenticrun_workers.inference.vllm.engine import GENERATE as VLLM

FOREIGN = 10**6
"""Added to token ids, which are then outside of every vocabulary."""
HUGE = 2**40
"""No token id is so large: it does not fit into 32 bits."""


class Fault(Enum):
    """The way in which the proxy breaks until it is closed. Most hit only requests to sample."""

    ERRORS = "answers 500 to everything"
    NO_JSON = "events that are no JSON"
    FOREIGN_IDS = "token ids outside the vocabulary"
    HUGE_IDS = "token ids that do not fit into 32 bits"
    NO_IDS = "fractions instead of token ids"
    FEW_LOGPROBS = "fewer log-probs than tokens"
    LOST_EVENT = "an event is left out"
    TRUNCATED = "the stream ends early"
    RESET = "the connection is reset in the middle of a stream"
    SILENT = "accepts everything, answers nothing"
    DEAF = "answers polls, but no request"
    SLOW = "one token per second"


class FaultyServer:
    """The proxy.

    Args:
        server: URL of the real server.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self.fault: Fault | None = None
        self.hits = 0
        """Requests that the fault has changed."""
        self.url = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[FaultyServer]:
        """Serve on a port of localhost."""
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        try:
            async with aiohttp.ClientSession(
                self._server, connector=connector, timeout=timeout
            ) as self._session:
                yield self
        finally:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        samples = request.path in (SGLANG, VLLM)
        body = await request.read()
        if self.fault is Fault.ERRORS:
            self.hits += 1
            return web.Response(status=500, text="Internal Server Error")
        if self.fault is Fault.SILENT or (self.fault is Fault.DEAF and samples):
            self.hits += 1
            await asyncio.Event().wait()
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            async with self._session.request(
                request.method, request.rel_url, data=body or None, headers=headers
            ) as answer:
                if samples and answer.status == 200:
                    return await self._stream(request, answer)
                return web.Response(status=answer.status, body=await answer.read())
        except aiohttp.ClientError:  # the real server has ended
            _reset(request)
            return web.Response()

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Pass on the events of a response, changed by the fault that there is at each of them."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        sent, begun = 0, loop.time()
        async for event in _events(answer):
            changed, fault = event, self.fault
            if event.startswith(b"data: {") and fault is not None:
                self.hits += 1
                content = json.loads(event.removeprefix(b"data: "))
                tokens = _tokens(content)
                if fault is Fault.LOST_EVENT and not sent and not _ends(content):
                    sent += len(tokens)
                    continue
                if fault in (Fault.TRUNCATED, Fault.RESET):
                    if fault is Fault.RESET:
                        _reset(request)
                    break
                if fault is Fault.SLOW:
                    sent += len(tokens)
                    await asyncio.sleep(max(0.0, begun + sent - loop.time()))
                elif change := CHANGES.get(fault):
                    change(content)
                    changed = b"data: " + json.dumps(content).encode()
                elif fault is Fault.NO_JSON:
                    changed = b"data: <html>"
            await response.write(changed + b"\n\n")
        return response


async def _events(answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    rest = b""
    async for data in answer.content.iter_any():
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            yield event


def _reset(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _tokens(content: dict[str, Any]) -> list[Any]:
    """The new tokens of an event, to be changed in place."""
    found: list[Any] = (
        content["choices"][0]["token_ids"] if "choices" in content else content["output_ids"]
    )
    return found


def _logprobs(content: dict[str, Any]) -> list[Any]:
    found: list[Any] = (
        content["choices"][0]["logprobs"]["content"]
        if "choices" in content
        else content["meta_info"].get("output_token_logprobs") or []
    )
    return found


def _ends(content: dict[str, Any]) -> bool:
    part = content["choices"][0] if "choices" in content else content["meta_info"]
    return part["finish_reason"] is not None


def _all_tokens(value: Callable[[int], Any]) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        tokens = _tokens(content)
        tokens[:] = [value(token) for token in tokens]

    return change


def _fewer_logprobs(content: dict[str, Any]) -> None:
    logprobs = _logprobs(content)
    del logprobs[random.randrange(len(logprobs) or 1) :]


CHANGES: dict[Fault, Callable[[dict[str, Any]], None]] = {
    Fault.FOREIGN_IDS: _all_tokens(lambda token: token + FOREIGN),
    Fault.HUGE_IDS: _all_tokens(lambda token: token + HUGE),
    Fault.NO_IDS: _all_tokens(lambda token: token + 0.5),
    Fault.FEW_LOGPROBS: _fewer_logprobs,
}
