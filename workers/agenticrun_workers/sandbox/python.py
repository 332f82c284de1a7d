"""Runs Python code in a sandbox process, watches it, and collects its output.

The code runs in one process that cannot start another, so killing that one ends everything. Layers,
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
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal

from agenticrun_workers.sandbox import seccomp, zygote

SandboxMode = Literal["required", "best-effort"]
"""Run code only if all of `REQUIRED` hold, or with whatever the machine provides."""

End = Literal["finished", "failed", "time", "output", "files", "killed"]
"""Why the code ended: normally, by an exception or exit status, at a limit, or by a signal."""

REQUIRED = ("limits", "no_new_privileges", "landlock", "seccomp")

LAUNCHER = Path(__file__).with_name("launcher.py")
START_SECONDS = 60.0
"""Time for the process to report which layers hold."""
TICK_SECONDS = 0.05
"""Interval at which its files are counted."""
PIPE_BYTES = 16 * os.sysconf("SC_PAGE_SIZE")
"""Capacity of a pipe on Linux."""
MOST_FILES = 32
"""Maximum number of files in the scratch folder, and of open files."""


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
            except _NotBegun:
                return _run(source, limits, mode, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _NotBegun(SandboxUnavailable):
    """The zygote died before the code began: a new one may succeed."""


def _run(source: BinaryIO, limits: Limits, mode: SandboxMode, scratch: str) -> Outcome:
    source.seek(0)
    begun = False
    try:
        with zygote.child(LAUNCHER, source) as process:
            layers = _layers(process)
            begun = True
            _check(layers, mode)
            return _watch(process, limits, scratch, layers)
    except zygote.Ended as error:
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
    """See `launcher.Order`."""
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


def _layers(process: zygote.Child) -> dict[str, str]:
    """Return what the launcher reports. Raises `SandboxUnavailable` if it reports nothing."""
    with selectors.DefaultSelector() as selector:
        selector.register(process.report, selectors.EVENT_READ)
        said = os.read(process.report, 65536) if selector.select(START_SECONDS) else b""
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


def _watch(
    process: zygote.Child, limits: Limits, scratch: str, layers: Mapping[str, str]
) -> Outcome:
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


def _end_when_late(process: zygote.Child) -> End:
    """Kill it. A process that has ended already was in time, even if this thread was late."""
    try:
        status = process.kill()
    except zygote.Ended:
        return "time"
    return "time" if status == -signal.SIGKILL else _end(status)


def _end(status: int) -> End:
    if status == -signal.SIGXCPU:
        return "time"
    return "killed" if status < 0 else "failed" if status else "finished"


def _limit_met(limits: Limits, scratch: str, written: Mapping[int, bytearray]) -> End | None:
    if sum(map(len, written.values())) > limits.output_bytes:
        return "output"
    count, size = _usage(scratch)
    return "files" if count > MOST_FILES or size > limits.scratch_mb * 2**20 else None


def _usage(scratch: str) -> tuple[int, int]:
    """Return number and size in bytes of the files, some of which may vanish meanwhile."""
    count, size = 0, 0
    with os.scandir(scratch) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                count, size = count + 1, size + entry.stat(follow_symlinks=False).st_size
    return count, size
