"""A session with a server of OpenEnv: one WebSocket, one environment.

The protocol has no request numbers: a session of which a call was cancelled is out of step, and
must be closed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from agenticrun_workers.envs.env import AtCapacity, EnvFault
from agenticrun_workers.envs.remote import Patience, uses_proxy
from agenticrun_workers.types import StopReason

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Longest message of a server. Observations are cut to what a policy can read afterwards."""

CLOSE_SECONDS = 2.0
"""Time for a server to answer that a session is closed; a frozen one never does."""

INVALID_ACTION = "VALIDATION_ERROR"
SESSION_ENDED = "SESSION_ERROR"
NO_PLACE = "CAPACITY_REACHED"


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code
        self.message = message


class Server:
    """The address of a server, and what it answers over plain HTTP.

    Args:
        url: such as http://maze:8000.
        headers: of every request.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url
        self._headers = dict(headers)
        self._answers: dict[str, Any] = {}

    async def schema(self) -> dict[str, Any]:
        """Return the JSON schema of an action. Raises `EnvFault`."""
        schema = (await self._ask("GET", "/schema")).get("action")
        if not isinstance(schema, dict):
            raise _fault(f"{self.url}/schema has no schema of an action: is it an OpenEnv server?")
        return schema

    async def number_of_tasks(self, split: str) -> int:
        """Return the number of tasks of a split. Raises `EnvFault`."""
        names = await self._ask("GET", "/list_environments")
        found = await self._ask("POST", f"/{names[0]}/num_tasks", {"split": split})
        number = found.get("num_tasks")
        if not isinstance(number, int) or number < 1:
            raise _fault(f"{self.url} has no tasks in the split {split!r} (splits)")
        return number

    def forget(self) -> None:
        """Ask again next time: another version of the server may run now."""
        self._answers.clear()

    async def open(self) -> Session:
        """Open a session. Raises `EnvFault`."""
        import aiohttp  # not at the top: every command would start a third of a second later

        patience = Patience()
        while True:
            client = self._client()
            try:
                async with asyncio.timeout(patience.left):
                    socket = await client.ws_connect(
                        f"{self.url}/ws",
                        max_msg_size=MAX_MESSAGE_BYTES,
                        timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS),
                    )
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                await client.close()
                if patience.over:
                    raise self._unreachable("/ws", error) from error
                await asyncio.sleep(patience.pause())
            except BaseException:
                await client.close()
                raise
            else:
                return Session(self, client, socket)

    def _client(self) -> Any:
        import aiohttp

        return aiohttp.ClientSession(
            headers=self._headers,
            trust_env=uses_proxy(self.url),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON answer to a request, from memory if it was asked before."""
        import aiohttp

        key = f"{method} {path} {json.dumps(body)}"
        patience = Patience()
        while key not in self._answers:
            try:
                async with (
                    asyncio.timeout(patience.left),
                    self._client() as client,
                    client.request(method, self.url + path, json=body) as answer,
                ):
                    answer.raise_for_status()
                    self._answers[key] = await answer.json(content_type=None)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                known = isinstance(error, aiohttp.ClientResponseError | ValueError)
                if known or patience.over:
                    raise self._unreachable(path, error) from error
                await asyncio.sleep(patience.pause())
        return self._answers[key]

    def _unreachable(self, path: str, error: Exception) -> EnvFault:
        why = str(error) or type(error).__name__
        return _fault(f"{self.url}{path} does not answer as an OpenEnv server does: {why}")


class Session:
    """One environment on the server, until `close`."""

    def __init__(self, server: Server, client: Any, socket: Any) -> None:
        self._server = server
        self._client = client
        self._socket = socket

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of its answer.

        Raises:
            Refused: the server answers with an error.
            AtCapacity: the server has no place for this session.
            EnvFault: the connection is lost, or the answer is no answer.
        """
        import aiohttp

        with suppress(ConnectionError):  # closed by the server: its reason can still be read
            await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            self._server.forget()
            why = self._socket.exception() or message.extra or message.type.name
            raise _fault(f"{self._server.url} ended the session: {why}")
        try:
            answer = json.loads(message.data)
            data = answer["data"]
            kind = answer["type"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _fault(f"{self._server.url} sent {message.data[:80]!r}") from None
        if not isinstance(data, dict):
            raise _fault(f"{self._server.url} sent data of {type(data).__name__}")
        if kind == "error":
            raise self._refusal(data)
        return data

    async def close(self) -> None:
        """Close the session and its connection, even if the server is frozen."""
        try:
            await self._socket.close()
        finally:
            await self._client.close()

    def _refusal(self, data: Mapping[str, Any]) -> Exception:
        code, message = str(data.get("code", "")), str(data.get("message", ""))
        if code != NO_PLACE:
            errors = data.get("errors")
            # What pydantic says about each field of an invalid action.
            details = (
                f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg', '')}"
                for each in (errors if isinstance(errors, list) else ())
                if isinstance(each, dict)
            )
            return Refused(code, "; ".join(part.removeprefix(": ") for part in details) or message)
        return AtCapacity(
            f"{self._server.url} has {data.get('max_sessions', 'too few')} places for sessions, "
            "all taken: raise max_concurrent_envs of the server, or lower envs[].maxConcurrent"
        )


def _fault(message: str) -> EnvFault:
    return EnvFault(StopReason.ENV_ERROR, message)
