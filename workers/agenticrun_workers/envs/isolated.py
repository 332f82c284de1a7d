"""Environments in processes of their own.

For environments that crash, hang in C code, leak, or cannot share a process: `envs[].isolated:
true`. A process that crashes or hangs is killed and costs the episode that it played. Processes are
forked from one that has imported the environment's module (`isolated_server`): FrozenLake's take
15 ms to start and 7 MB each, and a call takes 0.1 ms longer than one in the worker.

Worker and process exchange pickled frames, each after its length. Both ends belong to one user:
pickle is a format here, not a security boundary. Frames from an environment are limited in size all
the same.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from itertools import count
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.envs.env import EnvFault, StepResult
from agenticrun_workers.types import StopReason, Stream

LENGTH = struct.Struct("<Q")

NUMBER = struct.Struct("<Q")
"""Number of an environment, counted by its worker; sent with the file descriptor of its socket."""

STATUS = struct.Struct("<Qi")
"""Number of an environment and the exit status of its process (`os.waitstatus_to_exitcode`)."""

MAX_FRAME = 64 * 1024 * 1024
"""Bytes: the longest observation allowed, a picture of 4,000 x 4,000 pixels, and spare room."""


class TooLong(Exception):
    """A frame has more than `MAX_FRAME` bytes."""


def encoded(value: Any) -> bytes:
    """Return a value as a frame. Raises what pickling raises."""
    body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


def receive(end: socket.socket) -> Any:
    """Wait for the next frame and return its value. Raises `EOFError` if the peer has closed."""
    (length,) = LENGTH.unpack(_exactly(end, LENGTH.size))
    return pickle.loads(_exactly(end, length))


async def receive_async(reader: asyncio.StreamReader) -> Any:
    """Return the value of the next frame.

    Raises:
        EOFError: the other end is closed.
        TooLong: the frame is larger than `MAX_FRAME`.
        Exception: what unpickling raises.
    """
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MAX_FRAME:
        raise TooLong(f"{length:,} bytes; {MAX_FRAME:,} are allowed")
    return pickle.loads(await reader.readexactly(length))


def _exactly(end: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = end.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


MAX_GROWTH = 512 * 1024 * 1024
"""Bytes that a process may grow by before it is replaced, between two episodes."""


class IsolatedEnv:
    """An environment in another process; see `Env`.

    Made by `Isolation.start`; call `end` when it is not needed any more.
    """

    def __init__(self, pipe: _Pipe, facts: Mapping[str, Any]) -> None:
        self._pipe = pipe
        self._bytes_at_first: int = facts["bytes"]
        self._latest = facts
        self.instruction: str = facts["instruction"]
        self.reusable: bool = facts["reusable"]
        self.film = False
        """Take a picture of each state."""

    @property
    def worn_out(self) -> bool:
        """True if its process has grown so much that a new one should play the next episode."""
        return bool(self._latest["bytes"] - self._bytes_at_first > MAX_GROWTH)

    async def set_item(self, item: Mapping[str, Any]) -> None:
        """See `TakesItem`."""
        await self._call("set_item", dict(item))

    async def reset(self, seed: int, split: Stream) -> str | tuple[str, Mapping[str, Any]]:
        """See `Env`."""
        return cast("str | tuple[str, Mapping[str, Any]]", await self._call("reset", seed, split))

    async def step(self, action: str) -> StepResult:
        """See `Env`."""
        return cast(StepResult, await self._call("step", action))

    async def valid_actions(self) -> list[str]:
        """See `Env`."""
        return cast(list[str], await self._call("valid_actions"))

    def end(self) -> None:
        """Kill its process, even while a call runs. Safe to call twice."""
        self._pipe.end()

    async def _call(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments, self.film and name in ("reset", "step")))
        self._latest = await self._pipe.receive()
        self.instruction = self._latest["instruction"]
        return self._latest["value"]


class DrawingIsolatedEnv(IsolatedEnv):
    """An isolated environment that can draw; see `Renders`."""

    def render(self) -> NDArray[np.uint8]:
        """Return the picture that came with the last answer, if `film` was set."""
        if self._latest["picture_error"]:
            raise RuntimeError(self._latest["picture_error"])
        return cast(NDArray[np.uint8], self._latest["picture"])


class _Pipe:
    """The worker's end of the connection to one process."""

    def __init__(
        self,
        isolation: Isolation,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._isolation = isolation
        self._number = number
        self._reader = reader
        self._writer = writer

    def send(self, value: Any) -> None:
        self._writer.write(encoded(value))

    async def receive(self) -> Any:
        """Return the value of the next frame.

        A process that died, or that still owes an answer when the caller is cancelled, is ended.

        Raises:
        `EnvFault`.
        """
        try:
            good, said = await receive_async(self._reader)
        except (EOFError, ConnectionError):
            how = self._isolation.how_it_ended(self._number)
            self.end()
            raise EnvFault(StopReason.ENV_ERROR, f"the environment's process {how}") from None
        except asyncio.CancelledError:  # its answer would be taken for that of the next call
            self.end()
            raise
        except Exception as error:  # a frame may hold anything
            self.end()
            raise EnvFault(
                StopReason.ENV_ERROR,
                f"the environment's process sent no answer: {type(error).__name__}: {error}",
            ) from error
        if not good:
            raise EnvFault(StopReason.ENV_ERROR, said)
        return said

    def end(self) -> None:
        self._writer.transport.abort()
        self._isolation.forget(self._number)


class Isolation:
    """Starts the processes of one kind of environment.

    They all end with this process, however it ends.

    Args:
        timeout: seconds that building an environment may take (None: no limit).
    """

    def __init__(self, type: str, config: Mapping[str, Any], timeout: float | None = None) -> None:
        self._type = type
        self._config = dict(config)
        self._timeout = timeout
        self._numbers = count()
        self._server: tuple[socket.socket, subprocess.Popen[bytes]] | None = None
        self._statuses: dict[int, int | None] = {}
        """By environment not ended by us: the exit status; None while its process runs."""

    async def start(self) -> IsolatedEnv:
        """Start a new environment. Raises `EnvFault` if it cannot be built."""
        self._read_statuses()
        ours, theirs = socket.socketpair()
        number = next(self._numbers)
        with theirs:
            pipe = _Pipe(self, number, *await asyncio.open_connection(sock=ours))
            self._statuses[number] = None
            try:
                socket.send_fds(self._running_server(), [NUMBER.pack(number)], [theirs.fileno()])
            except OSError:  # it died, for example while it imported the environment's module
                self.stop()
                pipe.end()
                raise EnvFault(
                    StopReason.ENV_ERROR, f"the process that imports {self._type} ended"
                ) from None
        try:
            async with asyncio.timeout(self._timeout):
                facts = await pipe.receive()
        except TimeoutError:
            raise EnvFault(
                StopReason.TIMEOUT, f"{self._type} took more than {self._timeout} s to be built"
            ) from None
        return (DrawingIsolatedEnv if facts["draws"] else IsolatedEnv)(pipe, facts)

    def stop(self) -> None:
        """End all environments. The next `start` begins with a new server."""
        if self._server is not None:
            end, process = self._server
            end.close()
            process.wait()
            self._server = None

    def how_it_ended(self, number: int) -> str:
        """Say how a process ended. The server reports it before the process's own socket closes."""
        self._read_statuses()
        code = self._statuses.get(number)
        if code is None:
            return "ended"
        return (
            f"was ended by {signal.Signals(-code).name}"
            if code < 0
            else f"ended itself with exit code {code}"
        )

    def forget(self, number: int) -> None:
        """Drop an environment that was ended: its status does not matter any more."""
        self._statuses.pop(number, None)

    def _read_statuses(self) -> None:
        """Read all reports of the server, so that there is room for more."""
        while self._server is not None:
            try:
                message = self._server[0].recv(STATUS.size, socket.MSG_DONTWAIT)
            except OSError:
                return
            if len(message) < STATUS.size:
                return
            number, code = STATUS.unpack(message)
            if number in self._statuses:
                self._statuses[number] = code

    def _running_server(self) -> socket.socket:
        if self._server is None:
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "agenticrun_workers.envs.isolated_server",
                        str(theirs.fileno()),
                    ],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            ours.sendall(encoded((sys.path, self._type, self._config)))
            self._server = ours, process
        return self._server[0]
