"""An engine's server as a child of an asyncio program: started on a free port, watched, and stopped without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from agenticrun_workers.inference.engine import EngineStartError
from agenticrun_workers.inference.ports import free_port, listeners_of, listens_alone

HOST = "127.0.0.1"
START_TRIES = 4
"""Another program may take the port between our look and the server's bind."""
LOOK_SECONDS = 0.1
PROBE_SECONDS = 30.0
QUOTED_LINES = 25
KEEPER = Path(__file__).with_name("process_supervisor.py")
INHERITED_NOT = ("PYTHON", "VIRTUAL_ENV", "RAY_")
"""Variables of our own Python and Ray: the server has an environment of its own."""


@dataclass(frozen=True)
class Server:
    """How to start an engine's server.

    `command` makes its command line for a port; it must listen on `HOST` there. `health` is answered 200 once it serves.
    """

    name: str
    command: Callable[[int], Sequence[str]]
    log_folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    health: str = "/health"
    start_seconds: float = 1200.0
    stop_seconds: float = 10.0
    """How long it may take to end by itself after SIGTERM."""


class EngineProcess:
    """One run of a server. Its processes end with this program, however that ends: see `process_supervisor`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._keeper: asyncio.subprocess.Process | None = None
        self._ready = self._stopping = False
        self._port = 0
        self.log = Path()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    @property
    def alive(self) -> bool:
        return (
            self._ready
            and not self._stopping
            and self._keeper is not None
            and self._keeper.returncode is None
        )

    async def start(self) -> None:
        """Returns when the server serves. Raises `EngineStartError` with the end of its log, and leaves nothing."""
        server = self._server
        server.log_folder.mkdir(parents=True, exist_ok=True)
        for _ in range(START_TRIES):
            self._port = free_port(HOST)
            self.log = server.log_folder / f"{server.name}-{os.getpid()}-{self._port}.log"
            await self._launch()
            try:
                async with asyncio.timeout(server.start_seconds):
                    self._ready = await self._becomes_ready()
                if self._ready:
                    return
            except TimeoutError:
                await self.stop()
                raise EngineStartError(
                    f"{server.name} was not ready after {server.start_seconds:.0f} s. {self._quote()}"
                ) from None
            except BaseException:
                await self.stop()
                raise
            if not self._port_was_taken():
                raise EngineStartError(self.failure())
        raise EngineStartError(
            f"{server.name} found its port taken {START_TRIES} times. {self._quote()}"
        )

    async def stop(self) -> None:
        """Let the server end by itself for a while, then kill all of it. Safe to call twice, and before `start`."""
        keeper, self._stopping = self._keeper, True
        if keeper is None:
            return
        if self._ready and self._server.stop_seconds:
            with contextlib.suppress(ProcessLookupError):
                keeper.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(keeper.wait(), self._server.stop_seconds)
        self._let_go(keeper)
        await keeper.wait()

    def kill(self) -> None:
        """End the server at once: its requests in flight fail."""
        if self._keeper is not None:
            self._let_go(self._keeper)

    async def gone(self) -> str:
        """Wait until the server has ended by itself or was killed; returns what to tell people."""
        assert self._keeper is not None, "started"
        await self._keeper.wait()
        return self.failure()

    def failure(self) -> str:
        """What to tell people about a server that has ended."""
        code = self._keeper.returncode if self._keeper else None
        ended = "was killed" if code == 128 + signal.SIGKILL else f"ended with status {code}"
        return f"{self._server.name} {ended}. {self._quote()}"

    async def _launch(self) -> None:
        folder = tempfile.mkdtemp(prefix="agenticrun-engine-")
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(INHERITED_NOT)
        }
        environment |= {"TMPDIR": folder, **self._server.environment}
        command = self._server.command(self._port)
        try:
            with self.log.open("wb") as log:
                self._keeper = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-IS", str(KEEPER), str(os.getpid()), folder, *command),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            shutil.rmtree(folder)
            raise EngineStartError(f"{self._server.name} cannot be started: {error}") from error

    async def _becomes_ready(self) -> bool:
        """False: it ended, or somebody else answers on its port."""
        assert self._keeper is not None, "launched"
        ended, serves = (
            asyncio.create_task(self._keeper.wait()),
            asyncio.create_task(self._serves()),
        )
        try:
            await asyncio.wait({ended, serves}, return_when=asyncio.FIRST_COMPLETED)
            return not ended.done() and await self._is_ours()
        finally:
            ended.cancel()
            serves.cancel()

    async def _serves(self) -> None:
        async with aiohttp.ClientSession(
            self.url, timeout=aiohttp.ClientTimeout(total=PROBE_SECONDS)
        ) as http:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with http.get(self._server.health) as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(LOOK_SECONDS)

    async def _is_ours(self) -> bool:
        """Whether what listens on the port is our server; otherwise it is stopped."""
        assert self._keeper is not None, "launched"
        if listens_alone(self._keeper.pid, self._port):
            return True
        self._let_go(self._keeper)
        await self._keeper.wait()
        return False

    def _port_was_taken(self) -> bool:
        return bool(listeners_of(self._port)) or "address already in use" in self._tail().lower()

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-QUOTED_LINES:])

    def _quote(self) -> str:
        return f"The end of its log {self.log}:\n{self._tail()}"

    def _let_go(self, keeper: asyncio.subprocess.Process) -> None:
        """Closing its standard input makes the keeper kill what is left."""
        assert keeper.stdin is not None, "a pipe"
        keeper.stdin.close()
