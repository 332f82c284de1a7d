"""Runs Python code in a sandbox process, watches it, and collects its output.

The code runs in one process that cannot start another, so killing it ends everything. Layers,
each of which works without privileges, as root and as any other user:

    limits             memory, processor time, size and number of open files, no core dumps
    no_new_privileges  no program gives it rights; no process of the same user can look into it
    landlock           reads only Python's own files, writes only plain files in its scratch folder
    seccomp            a list of system calls; no processes, programs, sockets, signals (`seccomp`)
    capabilities       none left (they matter only as root)
    namespaces         a network of its own without any device (where users may make namespaces)

The environment holds only a few constants, and no file descriptor is inherited.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import platform
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal

from agenticrun_workers.fork_server import ForkServer
from agenticrun_workers.sandbox import seccomp

SandboxMode = Literal["required", "best-effort"]
"""Run code only if all of `REQUIRED` hold, or with whatever the machine provides."""

End = Literal["finished", "failed", "time", "output", "files", "killed"]
"""Why the code ended: normally, by an exception or exit status, at a limit, or by a signal."""

REQUIRED = ("limits", "no_new_privileges", "landlock", "seccomp")

LAUNCHER = Path(__file__).with_name("launcher.py")
PACKAGES = Path(__file__).parents[2]
"""The folder of `agenticrun_workers`."""
START_SECONDS = 60.0
"""Time for the process to report which layers hold."""
TICK_SECONDS = 0.05
"""Interval at which its files are counted."""
PIPE_BYTES = 16 * os.sysconf("SC_PAGE_SIZE")
"""Capacity of a pipe on Linux."""
MOST_FILES = 32
"""Maximum number of files in the scratch folder, and of open files."""


ANSWER_SECONDS = 10.0
"""Time for a live server to accept a request, or to reap a child that it killed."""

_THREADS = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **_THREADS}
"""Environment of the server.

One thread per library, since each costs address space. A fixed hash seed, so that the same code
prints the same twice.
"""


class SandboxUnavailable(Exception):
    """This machine lacks the required containment; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resources that the code may use."""

    seconds: float = 10.0
    memory_mb: int = 512
    """Address space; mapped libraries count as well."""
    output_bytes: int = 64 * 1024
    """Bytes of standard output and standard error together."""
    scratch_mb: int = 16
    """Size of all its files."""

    def __post_init__(self) -> None:
        for key, value in (
            ("seconds", self.seconds),
            ("memoryMb", self.memory_mb),
            ("outputBytes", self.output_bytes),
        ):
            if not value > 0:
                raise ValueError(f"{key} must be above 0, not {value}")
        if self.scratch_mb < 0:
            raise ValueError(f"scratchMb must be 0 or more, not {self.scratch_mb}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of running code."""

    stdout: str
    stderr: str
    end: End
    seconds: float
    layers: Mapping[str, str]
    """The layers that contained it; see `describe`."""


def run_python(code: str, limits: Limits | None = None, mode: SandboxMode = "required") -> Outcome:
    """Run `code` in a process and a scratch folder of its own, both gone when this call returns.

    Blocks; safe to call from many threads. Whatever the code does is an `Outcome`.

    Raises:
        SandboxUnavailable: this machine cannot contain code, or no process started.
    """
    if sys.platform != "linux":
        raise SandboxUnavailable(f"code can be contained on Linux only, not on {sys.platform}")
    limits = limits or Limits()
    scratch = tempfile.mkdtemp(prefix="sandbox-")
    try:
        with tempfile.TemporaryFile() as source:  # no pipe that could fill up
            source.write(
                json.dumps(_order(limits, mode, scratch)).encode()
                + b"\n"
                + code.encode(errors="replace")
            )
            try:
                return _run(source, limits, mode, scratch)
            # Only if no line of the code has run: a second run must not repeat its effects.
            except _NotBegun:
                return _run(source, limits, mode, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _NotBegun(SandboxUnavailable):
    """The server died before the code began: a new one may succeed."""


def _run(source: BinaryIO, limits: Limits, mode: SandboxMode, scratch: str) -> Outcome:
    source.seek(0)
    begun = False
    try:
        with _child(LAUNCHER, source) as process:
            layers = _layers(process)
            begun = True
            _check(layers, mode)
            return _watch(process, limits, scratch, layers)
    except Ended as error:
        if begun:
            raise SandboxUnavailable(
                f"the process that forks the sandbox's processes ended during a call: {error}"
            ) from error
        raise _NotBegun(f"the sandbox's process did not start: {error}") from error


@cache
def describe() -> Mapping[str, str]:
    """Return what each layer of this machine's sandbox does, or `no: ` and why it does not hold."""
    return run_python("", mode="best-effort").layers


def _order(limits: Limits, mode: SandboxMode, scratch: str) -> dict[str, object]:
    """Return the `launcher.Order` for these limits."""
    return {
        "limits": {
            "AS": limits.memory_mb * 2**20,
            "CPU": int(limits.seconds) + 2,
            "FSIZE": limits.scratch_mb * 2**20,
            "NOFILE": MOST_FILES,
            "CORE": 0,
        },
        "readable": _readable(),
        "scratch": scratch,
        "packages": _packages(),
        "seccomp": _filter(platform.machine()),
        "required": list(REQUIRED) if mode == "required" else [],
    }


@cache
def _filter(machine: str) -> str:
    return (
        base64.b64encode(seccomp.program(machine)).decode()
        if machine in seccomp.ARCHITECTURES
        else ""
    )


@cache
def _readable() -> list[str]:
    """Return folders and files of Python, its packages and their libraries."""
    own = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    libraries = [
        "/lib",
        "/lib64",
        "/usr/lib",
        "/usr/lib64",
        "/usr/local/lib",
        os.path.join(sys.base_prefix, "lib"),
    ]
    return [
        *own,
        *_packages(),
        *libraries,
        "/etc/ld.so.cache",
        "/usr/share/zoneinfo",
        "/etc/localtime",
        str(LAUNCHER),
    ]


@cache
def _packages() -> list[str]:
    return list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))


def _layers(process: Child) -> dict[str, str]:
    """Return what the launcher reports. Raises `SandboxUnavailable` if it reports nothing."""
    with selectors.DefaultSelector() as selector:
        selector.register(process.report, selectors.EVENT_READ)
        said = os.read(process.report, 65536) if selector.select(START_SECONDS) else b""
    # A launcher that hangs holds its pipes open.
    if not said:
        process.kill()
        errors = os.read(process.errors, 65536)
        raise SandboxUnavailable(
            f"the sandbox's process did not start: {errors.decode(errors='replace')[-500:]}"
        )
    layers: dict[str, str] = json.loads(said)
    return layers


def _check(layers: Mapping[str, str], mode: SandboxMode) -> None:
    missing = {name: layers[name] for name in REQUIRED if layers[name].startswith("no: ")}
    if mode == "required" and missing:
        raise SandboxUnavailable(
            f"this machine cannot contain code: "
            f"{'; '.join(f'{name}: {why[4:]}' for name, why in missing.items())}. Landlock needs "
            "Linux 5.13 and an x86-64 or aarch64 machine; sandbox: best-effort runs code with the "
            "layers that there are"
        )


def _watch(process: Child, limits: Limits, scratch: str, layers: Mapping[str, str]) -> Outcome:
    """Read what the code writes until it ends, or kill it at a limit."""
    start = time.monotonic()
    written = {process.output: bytearray(), process.errors: bytearray()}
    end: End | None = None
    with selectors.DefaultSelector() as selector:
        for fd in written:
            selector.register(fd, selectors.EVENT_READ)
        while end is None:
            _read(selector, written, TICK_SECONDS)
            end = _limit_met(limits, scratch, written)
            if (
                end is None
                and not selector.get_map()
                and (status := process.wait(TICK_SECONDS)) is not None
            ):
                end = _end(status)
            # The code may be within its time although this thread was late: its end decides.
            if end is None and time.monotonic() - start > limits.seconds:
                late = _end_when_late(process)
                _read(selector, written, 0)
                end = _limit_met(limits, scratch, written) or late
    texts = [
        written[fd][: limits.output_bytes].decode(errors="replace")
        for fd in (process.output, process.errors)
    ]
    return Outcome(texts[0], texts[1], end, time.monotonic() - start, layers)


def _read(
    selector: selectors.BaseSelector, written: Mapping[int, bytearray], seconds: float
) -> None:
    """Read all that the pipes hold; one read empties a pipe."""
    for key, _ in selector.select(seconds):
        chunk = os.read(key.fd, PIPE_BYTES)
        written[key.fd].extend(chunk)
        if not chunk:
            selector.unregister(key.fd)


def _end_when_late(process: Child) -> End:
    """Kill the process. If it has ended already, it was in time, even if this thread was late."""
    try:
        status = process.kill()
    except Ended:
        return "time"
    return "time" if status == -signal.SIGKILL else _end(status)


def _end(status: int) -> End:
    if status == -signal.SIGXCPU:
        return "time"
    return "killed" if status < 0 else "failed" if status else "finished"


def _limit_met(limits: Limits, scratch: str, written: Mapping[int, bytearray]) -> End | None:
    if sum(map(len, written.values())) > limits.output_bytes:
        return "output"
    # Polled: no quota of the kernel counts a folder's bytes.
    count, size = _usage(scratch)
    return "files" if count > MOST_FILES or size > limits.scratch_mb * 2**20 else None


def _usage(scratch: str) -> tuple[int, int]:
    """Return number and size in bytes of the files. Some may vanish during the count."""
    count, size = 0, 0
    with os.scandir(scratch) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                count, size = count + 1, size + entry.stat(follow_symlinks=False).st_size
    return count, size


class Ended(Exception):
    """The server died, or it made no child; the message is its last output."""


@dataclass
class Child:
    """A call's process, and the read ends of its pipes."""

    _call: socket.socket
    _server: _Server
    output: int
    errors: int
    report: int
    _status: int | None = None

    def wait(self, seconds: float) -> int | None:
        """Return its exit status as in `subprocess`; None if it still runs. Raises `Ended`."""
        if self._status is None:
            self._call.settimeout(seconds)
            try:
                said = self._call.recv(16)
            except TimeoutError:
                return None
            # The server is gone, and its children with it.
            except ConnectionError:
                said = b""
            if not said:
                raise Ended(self._server.last_words() or "it reported nothing")
            self._status = int(said)
        return self._status

    def kill(self) -> int:
        """Kill it, wait until it is gone, and return its exit status.

        The status is not SIGKILL's if it had ended before. Raises `Ended`.
        """
        with contextlib.suppress(OSError):  # the other end is closed
            self._call.shutdown(
                socket.SHUT_WR
            )  # a close would tell nothing while a fork of this process has the socket, too
        status = self.wait(ANSWER_SECONDS)
        if status is None:
            raise Ended("it does not answer")
        return status


@contextlib.contextmanager
def _child(launcher: Path, source: BinaryIO) -> Iterator[Child]:
    """Run `source` in a new process, which is gone in the end. Raises `Ended`."""
    with contextlib.ExitStack() as ours:
        with (
            _lock,
            contextlib.ExitStack() as theirs,
        ):  # no fork of this process keeps their ends open
            readers, writers = [], []
            for _ in range(3):
                reader, writer = os.pipe()
                ours.callback(os.close, reader)
                theirs.callback(os.close, writer)
                readers.append(reader)
                writers.append(writer)
            server, call = _request(launcher, [source.fileno(), *writers])
            ours.enter_context(call)
        process = Child(call, server, *readers)
        try:
            yield process
        finally:
            with contextlib.suppress(Ended):
                process.kill()


class _Server(ForkServer):
    """The process that sandbox calls are forked from (`launcher`).

    There is one for each process that uses the sandbox, with Python started and everything
    imported. It starts with the first call, is replaced when it dies, and ends with the process
    that started it, however that one ends.
    """

    def __init__(self, launcher: Path) -> None:
        self.launcher = launcher
        self._last_words: str | None = None
        self._errors = os.memfd_create("errors")  # no pipe that could fill up
        try:
            super().__init__(
                [sys.executable, "-s", "-P", "-S", str(launcher), str(PACKAGES)],
                ANSWER_SECONDS,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                cwd="/",
                env=_ENVIRONMENT,
                start_new_session=True,  # an interrupt from the terminal is its caller's
            )
        except BaseException:
            os.close(self._errors)
            raise

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.forget()

    def forget(self) -> None:
        """Close our files. A fork of the caller does only this."""
        self._last_words = self.last_words()
        self.close()
        os.close(self._errors)

    def last_words(self) -> str:
        with _lock:
            if self._last_words is None:
                return os.pread(
                    self._errors, 500, max(os.fstat(self._errors).st_size - 500, 0)
                ).decode(errors="replace")
            return self._last_words


_lock = threading.RLock()
_server: _Server | None = None


def _request(launcher: Path, files: list[int]) -> tuple[_Server, socket.socket]:
    """Ask the server for a child with these files; return it, and the call's socket.

    Raises `Ended`.
    """
    global _server  # noqa: PLW0603 - one per process
    with _lock:
        # A dead server is noticed by its socket; a new one takes its place.
        if _server is not None and _server.launcher == launcher:
            with contextlib.suppress(ConnectionError, TimeoutError):  # it is dead, or hangs
                return _server, _server.fork(files)
        if _server is not None:
            _server.end()
        _server = _Server(launcher)
        try:
            return _server, _server.fork(files)
        except ConnectionError:  # it died at once
            raise Ended(_server.last_words()) from None


def _forked() -> None:
    """Forget the parent's server in a fork, which starts its own."""
    global _server  # noqa: PLW0603 - one per process
    if _server is not None:
        _server.process.returncode = 0  # not a child of the fork's
        _server.forget()
        _server = None
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forked)
