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
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.envs.env import EnvFault, StepResult
from agenticrun_workers.fork_server import ForkServer
from agenticrun_workers.types import StopReason, Stream

LENGTH = struct.Struct("<Q")

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
    # The length comes from user code: it must not fill the worker's memory.
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


STATUS_SECONDS = 10.0
"""Time for the server to report how a process ended."""

MAX_STARTS = 64
"""Processes of one kind of environment that start at once; others wait.

The requests for them must fit into the server's socket while it imports the environment's module:
it holds about 280, and the next one would block the whole worker.
"""

MAX_TIMEOUTS = 2 * MAX_STARTS
"""After so many starts in a row that took too long, the server is replaced.

It may be frozen, or hang in the import of the module. Its socket has room for these requests and
for the waiting ones.
"""

MAX_GROWTH = 512 * 1024 * 1024
"""Bytes that a process may grow by before it is replaced, between two episodes."""


class IsolatedEnv:
    """An environment in another process; see `Env`.

    Made by `Isolation.start`; call `end` when it is no longer needed.
    """

    def __init__(self, pipe: _Pipe, facts: Mapping[str, Any]) -> None:
        self._pipe = pipe
        self._bytes_at_first: int = facts["bytes"]
        self._latest = facts
        self.isolated_class: str = facts["class"]
        self.instruction: str = facts["instruction"]
        self.reusable: bool = facts["reusable"]
        self.film = False
        """Take a picture of each state."""

    @property
    def worn_out(self) -> bool:
        """True if its process has grown so much that a new one should play the next episode."""
        return bool(self._latest["bytes"] - self._bytes_at_first > MAX_GROWTH)

    async def set_item(self, item: Mapping[str, Any]) -> None:
        await self._call("set_item", dict(item))

    async def reset(self, seed: int, split: Stream) -> str | tuple[str, Mapping[str, Any]]:
        return cast("str | tuple[str, Mapping[str, Any]]", await self._call("reset", seed, split))

    async def step(self, action: str) -> StepResult:
        return cast(StepResult, await self._call("step", action))

    async def valid_actions(self) -> list[str]:
        return cast(list[str], await self._call("valid_actions"))

    def end(self) -> None:
        """Kill its process, even while a call runs. Safe to call twice."""
        self._pipe.end()

    async def _call(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments, self.film and name in ("reset", "step")))
        self._latest = await self._pipe.receive()
        # An environment may change its instruction with each episode.
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
    """The worker's end of the connection to one process.

    Args:
        call: the call's socket of `ForkServer.fork`.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, call: socket.socket
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._call = call
        call.setblocking(False)

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
            try:
                how = await self._how_it_ended()
            finally:
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
        with suppress(OSError):  # closed before
            self._call.shutdown(socket.SHUT_RDWR)
        self._call.close()

    async def _how_it_ended(self) -> str:
        """Describe how the process ended. The server reports it shortly after the pipe closes."""
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                said = await asyncio.get_running_loop().sock_recv(self._call, 16)
        except (TimeoutError, OSError):
            said = b""
        if not said:
            return "ended"
        code = int(said)
        return (
            f"was ended by {signal.Signals(-code).name}"
            if code < 0
            else f"ended itself with exit code {code}"
        )


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
        self._server: ForkServer | None = None
        self._timeouts = 0
        """Starts by this server that took too long, since one was in time."""
        self._starting = asyncio.Semaphore(MAX_STARTS)

    async def start(self) -> IsolatedEnv:
        """Start a new environment, after a wait if many start. Raises `EnvFault` if it fails."""
        async with self._starting:
            return await self._start()

    def stop(self) -> None:
        """End all environments. The next `start` begins with a new server."""
        if self._server is not None:
            self._server.close()
            self._server.process.kill()  # it may hang; its children die with it
            self._server.process.wait()
            self._server = None
            self._timeouts = 0

    async def _start(self) -> IsolatedEnv:
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise self._refused(error) from error
        with theirs:
            try:
                server = self._running_server()
                call = server.fork([theirs.fileno()])
            except ConnectionError:  # for example while it imported the environment's module
                ours.close()
                self.stop()
                raise EnvFault(
                    StopReason.ENV_ERROR, f"the process that imports {self._type} ended"
                ) from None
            except OSError as error:  # no more files, for example: others may play on
                ours.close()
                raise self._refused(error) from error
            try:
                pipe = _Pipe(*await asyncio.open_connection(sock=ours), call)
            except BaseException:  # cancelled: the caller gets no environment to end
                with suppress(OSError):  # it has ended
                    call.shutdown(socket.SHUT_RDWR)
                call.close()
                ours.close()
                raise
        try:
            async with asyncio.timeout(self._timeout):
                facts = await pipe.receive()
        except TimeoutError:
            # Starts of a server that was replaced do not count against the new one.
            if server is self._server:
                self._timeouts += 1
                if self._timeouts >= MAX_TIMEOUTS:  # it may read no requests, which pile up
                    self.stop()
            raise EnvFault(
                StopReason.TIMEOUT, f"{self._type} took more than {self._timeout} s to be built"
            ) from None
        except EnvFault:
            pipe.end()
            raise
        if server is self._server:
            self._timeouts = 0
        return (DrawingIsolatedEnv if facts["draws"] else IsolatedEnv)(pipe, facts)

    def _refused(self, error: OSError) -> EnvFault:
        return EnvFault(StopReason.ENV_ERROR, f"{self._type} cannot be started: {error}")

    def _running_server(self) -> ForkServer:
        if self._server is None:
            # By a file, because a config may be longer than a command line.
            with tempfile.TemporaryFile() as setup:
                pickle.dump((sys.path, self._type, self._config), setup)
                setup.seek(0)
                self._server = ForkServer(
                    [
                        sys.executable,
                        "-m",
                        "agenticrun_workers.envs.isolated_server",
                        str(setup.fileno()),
                    ],
                    None,
                    pass_fds=[setup.fileno()],
                    # sys.path of this process, which may have been extended since it started.
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
        return self._server
