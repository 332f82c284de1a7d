"""The endpoint of outside agents for one policy and any client, without episodes or recordings.

Each request has a session of its own, so that nothing is kept, and may choose its sampling.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar

from aiohttp import web
from typing_extensions import override

from agenticrun_workers.agents.agent import AgentLimits, Episode, Generate
from agenticrun_workers.agents.outside.endpoint import Endpoint
from agenticrun_workers.agents.outside.messages import refused
from agenticrun_workers.agents.outside.session import Policy, Session
from agenticrun_workers.types import EpisodeKey, Stream

RANGES = {"temperature": (0, 10), "top_p": (1e-6, 1), "top_k": (0, 1_000_000), "min_p": (0, 1)}
"""Sampling parameters that a request may have, with their bounds."""
SESSION = web.RequestKey("session", Session)


class PolicyEndpoint(Endpoint):
    """Server of `/v1` at a fixed address.

    Args:
        policy: its limits are the defaults of requests.
        generate: samples a response.
        host: address to listen at.
        port: 0 takes a free one.
        api_key: clients need it; None: they need none.
    """

    wrong_key: ClassVar[str] = "the API key is not that of this server"

    def __init__(
        self, policy: Policy, generate: Generate, host: str, port: int, api_key: str | None
    ) -> None:
        super().__init__(host, port)
        self._policy = policy
        self._generate = generate
        self._api_key = api_key
        self._numbers = itertools.count()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Serve while the block runs, and return the base_url. Raises `OSError`."""
        await self._start()
        assert self._runner is not None
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            yield f"http://{host}:{self._port}/v1"
        finally:
            await self._runner.cleanup()

    @override
    def _routes(self, prefix: str = "") -> list[web.RouteDef]:
        return [route for route in super()._routes(prefix) if "/v1/" in route.path]

    @override
    @asynccontextmanager
    async def _admitted(self, request: web.Request) -> AsyncIterator[None]:
        self._check_token(request, self._api_key)
        request[SESSION] = self._made(await request.read())
        try:
            yield
        finally:
            del request[SESSION]  # a connection keeps its last request

    @override
    def _session(self, request: web.Request) -> Session:
        return request[SESSION]

    def _made(self, text: bytes) -> Session:
        """Return a session for a request, with the sampling that its body asks for."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):  # refused where the body is read
            found = {}
        body = found if isinstance(found, dict) else {}
        policy = replace(self._policy, limits=asked_limits(self._policy.limits, body))
        # With a seed, equal requests have equal answers.
        seed = 0 if body.get("seed") is not None else secrets.randbits(63)
        key = EpisodeKey(Stream.VALIDATION, next(self._numbers), 0)
        return Session(policy, Episode(key, "", seed, seed), self._generate)


def asked_limits(limits: AgentLimits, body: dict[str, Any]) -> AgentLimits:
    """Return the limits with the sampling that a request asks for. Raises `ApiError`."""
    asked = {name: body[name] for name in RANGES if body.get(name) is not None}
    for name, value in asked.items():
        low, high = RANGES[name]
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not (low <= value <= high)
        ):
            raise refused(name, f"must be a number from {low} to {high}, not {value!r}")
    if "top_k" in asked and not isinstance(asked["top_k"], int):
        raise refused("top_k", f"must be a whole number, not {asked['top_k']!r}")
    return replace(limits, **asked)
