"""A server that speaks OpenEnv's protocol, and breaks on command. The real one has its own test."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

from aiohttp import WSMsgType, web
from pydantic import BaseModel, ConfigDict, Field

LIFT: dict[str, Any] = {
    "$defs": {"Way": {"type": "string", "enum": ["up", "down"]}},
    "title": "LiftAction",
    "type": "object",
    "properties": {
        "metadata": {"type": "object"},
        "way": {"$ref": "#/$defs/Way", "description": "where to go"},
    },
    "required": ["way"],
    "additionalProperties": False,
}
"""The schema that pydantic makes of an action with an enum, as OpenEnv sends it."""


class Fault(Enum):
    """The way in which the server breaks."""

    SILENT = "accepts sessions, answers nothing"
    LOST = "ends the connection in mid-episode"
    ERROR = "the environment raises"
    HUGE = "an observation of a million characters"
    SURROGATE = "an observation with half a pair of surrogates"
    NO_JSON = "an answer that is no JSON"
    NO_DATA = "an answer without data"
    NAN = "a reward that is no number"


class OpenEnvServer:
    """A lift that should reach floor 0.

    Args:
        places: number of sessions.
        schema: of its action.
    """

    def __init__(self, places: int = 4, schema: dict[str, Any] = LIFT) -> None:
        self.fault: Fault | None = None
        self.sessions = 0
        """Open sessions."""
        self.opened = 0
        """Sessions so far."""
        self.resets: list[dict[str, Any]] = []
        self.actions: list[dict[str, Any]] = []
        self.url = ""
        self._places = places
        self._schema = schema

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[OpenEnvServer]:
        """Serve on a port of localhost."""
        app = web.Application()
        app.router.add_get("/schema", self._schemas)
        app.router.add_get("/list_environments", self._names)
        app.router.add_post("/lift/num_tasks", self._tasks)
        app.router.add_get("/ws", self._session)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _schemas(self, request: web.Request) -> web.Response:
        return web.json_response({"action": self._schema, "observation": {}, "state": {}})

    async def _names(self, request: web.Request) -> web.Response:
        return web.json_response(["lift"])

    async def _tasks(self, request: web.Request) -> web.Response:
        split = (await request.json())["split"]
        return web.json_response({"num_tasks": {"train": 10, "test": 3}[split]})

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.opened += 1
        if self.sessions >= self._places:
            error = {"code": "CAPACITY_REACHED", "message": "full", "max_sessions": self._places}
            await socket.send_json({"type": "error", "data": error})
            await socket.close()
            return socket
        self.sessions += 1
        try:
            await self._play(socket)
        finally:
            self.sessions -= 1
        return socket

    async def _play(self, socket: web.WebSocketResponse) -> None:
        floor = 0
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                continue
            asked = json.loads(message.data)
            if self.fault is Fault.SILENT:
                await asyncio.sleep(3600)
            if asked["type"] == "reset":
                self.resets.append(asked["data"])
                floor = random.Random(asked["data"].get("seed")).randint(1, 5)
                await self._observe(socket, floor)
                continue
            self.actions.append(asked["data"])
            if asked["data"].get("way") not in ("up", "down"):
                errors = [{"loc": ["way"], "msg": "Input should be 'up' or 'down'"}]
                error = {"code": "VALIDATION_ERROR", "message": "Invalid message", "errors": errors}
                await socket.send_json({"type": "error", "data": error})
            elif self.fault is Fault.ERROR:
                error = {"code": "EXECUTION_ERROR", "message": "the lift is stuck"}
                await socket.send_json({"type": "error", "data": error})
            elif self.fault is Fault.LOST:
                assert socket._req is not None
                assert socket._req.transport is not None
                socket._req.transport.abort()
                return
            else:
                floor += 1 if asked["data"]["way"] == "up" else -1
                await self._observe(socket, floor)

    async def _observe(self, socket: web.WebSocketResponse, floor: int) -> None:
        message = f"floor {floor}"
        if self.fault is Fault.HUGE:
            message += "\U0001f642" * 1_000_000
        if self.fault is Fault.SURROGATE:
            message += " \ud83d"
        reward = float("nan") if self.fault is Fault.NAN else True if floor == 0 else None
        observation = {
            "message": message,
            "ways": ["up", "down"][: 1 + (floor > 0)],
            "metadata": {},
        }
        data = {"observation": observation, "reward": reward, "done": floor == 0}
        text = json.dumps({"type": "observation", "data": data})
        if self.fault is Fault.NO_JSON:
            text = "<html>"
        if self.fault is Fault.NO_DATA:
            text = '{"type": "observation"}'
        await socket.send_str(text)


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")
    metadata: dict[str, Any] = Field(default_factory=dict)


class MoveAction(Model):
    step: int = Field(ge=-1, le=1)


class Place(Model):
    done: bool = False
    reward: float | None = None
    at: int


class Line:
    """An environment in OpenEnv's shape: a place on a line, from which one walks to 0."""

    closed = 0

    def __init__(self, length: int = 3) -> None:
        self.length = length

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Place:
        self.at = 1 + (seed or 0) % self.length
        return Place(at=self.at)

    def step(self, action: MoveAction, timeout_s: float | None = None) -> Place:
        self.at += action.step
        return Place(at=self.at, done=self.at == 0, reward=1.0 if self.at == 0 else None)

    def close(self) -> None:
        Line.closed += 1


class AsyncLine(Line):
    async def step_async(self, action: MoveAction) -> Place:
        await asyncio.sleep(0)
        return self.step(action)


class Unannotated(Line):
    def step(self, action, timeout_s=None):  # type: ignore[no-untyped-def]
        return super().step(action)
