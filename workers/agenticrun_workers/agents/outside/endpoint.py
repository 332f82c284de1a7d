"""OpenAI- and Anthropic-compatible endpoint of an env worker.

One server serves all episodes of an env worker, each below a secret path. It listens only while
episodes of outside agents are running.

On 127.0.0.1 the path is the whole secret, so that an agent needs no more than a base_url. URLs end
up in the logs of proxies, so at an address of the network clients also need the episode's token, as
their API key.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from aiohttp import web

from agenticrun_workers.agents.outside.anthropic_messages import error_body
from agenticrun_workers.agents.outside.messages import ApiError
from agenticrun_workers.agents.outside.session import Session

log = logging.getLogger(__name__)

LOCALHOST = "127.0.0.1"
MAX_BODY_BYTES = 64 * 1024 * 1024
SECRET_BYTES = 24
ANY_KEY = "none"
"""API key where any key works."""
PATHS = "chat/completions, responses, messages, completions and models"
ANTHROPIC = "/v1/messages"
THREAD = "X-Session-ID"
"""Header with the name of a conversation."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Address:
    """Address of one episode."""

    url: str
    """`/v1` and `/reward` are below it."""
    api_key: str = field(repr=False)


@asynccontextmanager
async def serving(session: Session, host: str | None = None) -> AsyncIterator[Address]:
    """Serve an episode. At the end, requests in progress are cancelled.

    Args:
        session: session of the episode.
        host: the address of this machine at which clients with the episode's token reach it. None:
            127.0.0.1, without a token.

    Raises:
        OSError: the server cannot listen there.
    """
    endpoints = _endpoints.setdefault(asyncio.get_running_loop(), {})
    async with endpoints.setdefault(host, Endpoint(host)).serving(session) as address:
        yield address


class Endpoint:
    """Server that runs while it has sessions."""

    wrong_key: ClassVar[str] = "the API key is not the token of this episode: send task.api_key"

    def __init__(self, host: str | None, port: int = 0) -> None:
        self._needs_token = host is not None
        self._host = host or LOCALHOST
        self._sessions: dict[str, Session] = {}
        self._tokens: dict[str, str] = {}
        """Token of each session that needs one."""
        self._requests: dict[str, set[asyncio.Task[Any]]] = {}
        self._changing = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._asked_port = port
        """0: any free one."""
        self._port = 0

    @asynccontextmanager
    async def serving(self, session: Session) -> AsyncIterator[Address]:
        """Serve the endpoint while the block runs."""
        secret = secrets.token_urlsafe(SECRET_BYTES)
        async with self._changing:
            if self._runner is None:
                await self._start()
            self._sessions[secret], self._requests[secret] = session, set()
            if self._needs_token:
                self._tokens[secret] = secrets.token_urlsafe(SECRET_BYTES)
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            yield Address(
                f"http://{host}:{self._port}/s/{secret}", self._tokens.get(secret, ANY_KEY)
            )
        finally:
            del self._sessions[secret]
            self._tokens.pop(secret, None)
            under_way = self._requests.pop(secret)
            for request in under_way:
                request.cancel()
            async with self._changing:
                if not self._sessions and self._runner is not None:
                    runner, self._runner = self._runner, None
                    await runner.cleanup()

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._answered], client_max_size=MAX_BODY_BYTES)
        app.add_routes(self._routes())
        # When a client disconnects, its request is also cancelled in the engine.
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._asked_port).start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner, self._port = runner, runner.addresses[0][1]

    def _routes(self, prefix: str = "/s/{secret}") -> list[web.RouteDef]:
        return [
            web.post(f"{prefix}/v1/chat/completions", self._chat),
            web.post(f"{prefix}/v1/completions", self._completions),
            web.post(f"{prefix}/v1/responses", self._responses),
            web.post(f"{prefix}{ANTHROPIC}", self._messages),
            web.post(f"{prefix}{ANTHROPIC}/count_tokens", self._count_tokens),
            web.get(f"{prefix}/v1/models", self._models),
            web.get(f"{prefix}/v1/models/{{model:.+}}", self._model),
            web.post(f"{prefix}/reward", self._reward),
        ]

    @asynccontextmanager
    async def _admitted(self, request: web.Request) -> AsyncIterator[None]:
        """Find the session of a request, and track the request. Raises `ApiError`."""
        secret = request.path.removeprefix("/s/").partition("/")[0]
        if secret not in self._sessions:
            raise ApiError(
                404,
                "no episode is played at this base_url: it is over, or the URL is wrong",
                code="unknown_session",
            )
        self._check_token(request, self._tokens.get(secret))
        task = asyncio.current_task()
        assert task is not None
        self._requests[secret].add(task)
        try:
            yield
        finally:
            self._requests.get(secret, set()).discard(task)

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Return all errors in the format of the request's API."""
        try:
            async with self._admitted(request):
                return await handler(request)
        except ApiError as error:
            return _refusal(request, error)
        except web.HTTPException as error:
            path = request.path_qs.partition("/v1/")[2] or request.path
            message = f"{request.method} {path}: {error.reason} (known under /v1: {PATHS})"
            if path.startswith(ANTHROPIC[1:]):
                message += ". Anthropic's clients add /v1 to their base_url: leave it out there"
            return _refusal(request, ApiError(error.status, message))
        except Exception:
            log.exception("a request to the endpoint failed")
            return _refusal(request, ApiError(500, "internal error; see the log of the server"))

    def _check_token(self, request: web.Request, token: str | None) -> None:
        """Raise `ApiError` if there is a token and the request does not have it."""
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        keys = [request.headers.get("x-api-key", ""), given if scheme.lower() == "bearer" else ""]
        if token is not None and not any(
            hmac.compare_digest(key.encode(), token.encode()) for key in keys
        ):
            raise ApiError(
                401,
                self.wrong_key,
                code="invalid_api_key",
            )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        response = await self._session(request).chat(await _json(request), _thread(request))
        if response.options.stream:
            return await _stream(request, response.chat_chunks())
        return web.json_response(response.chat_body())

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        response = await self._session(request).complete(await _json(request), _thread(request))
        if response.options.stream:
            return await _stream(request, response.text_chunks())
        return web.json_response(response.text_body())

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        responded = await self._session(request).respond(await _json(request), _thread(request))
        if responded.streams:
            return await _stream(request, responded.events())
        return web.json_response(responded.body())

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        answered = await self._session(request).messages(await _json(request), _thread(request))
        if answered.streams:
            return await _stream(request, answered.events())
        return web.json_response(answered.body())

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        body = await _json(request)
        size = self._session(request).count_tokens(body, _thread(request))
        return web.json_response({"input_tokens": size})

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


_endpoints: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str | None, Endpoint]] = (
    WeakKeyDictionary()
)
"""Endpoints by event loop and host."""


def _model_body(session: Session) -> dict[str, Any]:
    return {"id": session.policy.model, "object": "model", "created": 0, "owned_by": "agenticrun"}


def _refusal(request: web.Request, error: ApiError) -> web.StreamResponse:
    body = error_body(error) if ANTHROPIC in request.path else error.body
    return web.json_response(body, status=error.status)


def _thread(request: web.Request) -> str | None:
    return request.headers.get(THREAD)


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except ValueError as error:
        raise ApiError(400, f"the request's body is not JSON: {error}") from error
    except RecursionError as error:
        raise ApiError(400, "the request's body is nested too deep") from error


async def _stream(request: web.Request, chunks: Iterable[dict[str, Any]]) -> web.StreamResponse:
    """Send chunks as server-sent events. Those with a type have it as name, and no `[DONE]`."""
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
