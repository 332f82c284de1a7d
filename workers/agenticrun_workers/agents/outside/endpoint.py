"""OpenAI-compatible endpoint of an env worker.

One server on this machine serves all episodes, each below a secret path. It listens only while
episodes of outside agents are running.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from agenticrun_workers.agents.outside.messages import ApiError
from agenticrun_workers.agents.outside.session import Session

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_BODY_BYTES = 64 * 1024 * 1024
SECRET_BYTES = 24
PATHS = "chat/completions, responses, completions and models"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(session: Session) -> AsyncIterator[str]:
    """Serve an episode and yield the URL of its root, with `/v1` and `/reward` below it.

    At the end, requests in progress are cancelled.
    """
    endpoint = _endpoints.setdefault(asyncio.get_running_loop(), Endpoint())
    async with endpoint.serving(session) as url:
        yield url


class Endpoint:
    """Server that runs while it has sessions."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._requests: dict[str, set[asyncio.Task[Any]]] = {}
        self._changing = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._port = 0

    @asynccontextmanager
    async def serving(self, session: Session) -> AsyncIterator[str]:
        """See `serving` of this module."""
        secret = secrets.token_urlsafe(SECRET_BYTES)
        async with self._changing:
            if self._runner is None:
                await self._start()
            self._sessions[secret], self._requests[secret] = session, set()
        try:
            yield f"http://{HOST}:{self._port}/s/{secret}"
        finally:
            del self._sessions[secret]
            under_way = self._requests.pop(secret)
            for request in under_way:
                request.cancel()
            async with self._changing:
                if not self._sessions and self._runner is not None:
                    runner, self._runner = self._runner, None
                    await runner.cleanup()

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._answered], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/s/{secret}/v1/chat/completions", self._chat),
                web.post("/s/{secret}/v1/completions", self._completions),
                web.post("/s/{secret}/v1/responses", self._responses),
                web.get("/s/{secret}/v1/models", self._models),
                web.get("/s/{secret}/v1/models/{model:.+}", self._model),
                web.post("/s/{secret}/reward", self._reward),
            ]
        )
        # When a client disconnects, its request is also cancelled in the engine.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        self._port = self._runner.addresses[0][1]

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Track the requests of each session, and return all errors in the API's format."""
        try:
            secret = request.path.removeprefix("/s/").partition("/")[0]
            if secret not in self._sessions:
                raise ApiError(
                    404,
                    "no episode is played at this base_url: it is over, or the URL is wrong",
                    code="unknown_session",
                )
            task = asyncio.current_task()
            assert task is not None
            self._requests[secret].add(task)
            try:
                return await handler(request)
            finally:
                self._requests.get(secret, set()).discard(task)
        except ApiError as error:
            return web.json_response(error.body, status=error.status)
        except web.HTTPException as error:
            message = (
                f"{request.method} {request.path_qs.partition('/v1/')[2]}: {error.reason} "
                f"(known under /v1: {PATHS})"
            )
            return web.json_response(ApiError(error.status, message).body, status=error.status)
        except Exception:
            log.exception("a request of an outside agent failed")
            return web.json_response(
                ApiError(500, "internal error; see the env worker's log").body, status=500
            )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        response = await self._session(request).chat(await _json(request))
        if response.options.stream:
            return await _stream(request, response.chat_chunks())
        return web.json_response(response.chat_body())

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        response = await self._session(request).complete(await _json(request))
        if response.options.stream:
            return await _stream(request, response.text_chunks())
        return web.json_response(response.text_body())

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        responded = await self._session(request).respond(await _json(request))
        if responded.streams:
            return await _stream(request, responded.events())
        return web.json_response(responded.body())

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [_model_body(self._session(request))]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        body, name = _model_body(self._session(request)), request.match_info["model"]
        if body["id"] != name:
            raise ApiError(
                404,
                f"model: {name!r} is not served; {body['id']!r} is",
                param="model",
                code="model_not_found",
            )
        return web.json_response(body)

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        self._session(request).post_reward(await _json(request))
        return web.json_response({})

    def _session(self, request: web.Request) -> Session:
        return self._sessions[request.match_info["secret"]]


_endpoints: WeakKeyDictionary[asyncio.AbstractEventLoop, Endpoint] = WeakKeyDictionary()


def _model_body(session: Session) -> dict[str, Any]:
    return {"id": session.policy.model, "object": "model", "created": 0, "owned_by": "agenticrun"}


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except ValueError as error:
        raise ApiError(400, f"the request's body is not JSON: {error}") from error


async def _stream(request: web.Request, chunks: Iterable[dict[str, Any]]) -> web.StreamResponse:
    """Send chunks as server-sent events. Those of `/v1/responses` have names, and no `[DONE]`."""
    stream = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    await stream.prepare(request)
    named = False
    for chunk in chunks:
        named = "type" in chunk
        name = f"event: {chunk['type']}\n" if named else ""
        await stream.write(f"{name}data: {json.dumps(chunk)}\n\n".encode())
    if not named:
        await stream.write(b"data: [DONE]\n\n")
    await stream.write_eof()
    return stream
