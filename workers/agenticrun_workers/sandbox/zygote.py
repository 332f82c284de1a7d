"""Client of the process that sandbox calls are forked from (`launcher`).

There is one for each process that uses the sandbox, with Python started and everything imported. It
starts with the first call, is replaced when it dies, and ends with the process that started it,
however that one ends: the kernel then closes `_Zygote.control`. A call's socket serves two
purposes: the zygote reports on it how the child ended, and kills the child when the caller shuts it
down.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

ANSWER_SECONDS = 10.0
"""Time for a live zygote to accept a request, or to reap a child that it killed."""

_THREADS = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **_THREADS}
"""Environment of the zygote.

One thread per library, since each costs address space. A fixed hash seed, so that the same code
prints the same twice.
"""


class Ended(Exception):
    """The zygote died, or it made no child; the message is its last output."""


@dataclass
class Child:
    """A call's process, and the read ends of its pipes."""

    _call: socket.socket
    _zygote: _Zygote
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
            except ConnectionError:
                said = b""
            if not said:
                raise Ended(self._zygote.last_words() or "it said nothing")
            self._status = int(said)
        return self._status

    def kill(self) -> int:
        """Kill it, wait until it is gone, and return its exit status.

        The status is not SIGKILL's if it had ended before. Raises `Ended`.
        """
        with suppress(OSError):  # the other end is closed
            self._call.shutdown(
                socket.SHUT_WR
            )  # a close would tell nothing while a fork of this process has the socket, too
        status = self.wait(ANSWER_SECONDS)
        if status is None:
            raise Ended("it does not answer")
        return status


@contextmanager
def child(launcher: Path, source: BinaryIO) -> Iterator[Child]:
    """Run `source` in a new process, which is gone in the end. Raises `Ended`."""
    with ExitStack() as ours:
        with _lock, ExitStack() as theirs:  # no fork of this process keeps their ends open
            readers, writers = [], []
            for _ in range(3):
                reader, writer = os.pipe()
                ours.callback(os.close, reader)
                theirs.callback(os.close, writer)
                readers.append(reader)
                writers.append(writer)
            call, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(call)
            theirs.enter_context(other_end)
            zygote = _request(launcher, [source.fileno(), *writers, other_end.fileno()])
        process = Child(call, zygote, *readers)
        try:
            yield process
        finally:
            with suppress(Ended):
                process.kill()


class _Zygote:
    def __init__(self, launcher: Path) -> None:
        self.launcher = launcher
        self._last_words: str | None = None
        with ExitStack() as files:
            self.control, other_end = map(
                files.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            )
            self.control.settimeout(ANSWER_SECONDS)
            self._errors = os.memfd_create("errors")  # no pipe that could fill up
            files.callback(os.close, self._errors)
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-S", str(launcher)],
                stdin=other_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                cwd="/",
                env=_ENVIRONMENT,
                start_new_session=True,  # an interrupt from the terminal is its caller's
            )
            other_end.close()
            self._files = files.pop_all()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.forget()

    def forget(self) -> None:
        """Close our files. A fork of the caller does only this."""
        self._last_words = self.last_words()
        self._files.close()

    def last_words(self) -> str:
        with _lock:
            if self._last_words is None:
                return os.pread(
                    self._errors, 500, max(os.fstat(self._errors).st_size - 500, 0)
                ).decode(errors="replace")
            return self._last_words


_lock = threading.RLock()
_zygote: _Zygote | None = None


def _request(launcher: Path, files: list[int]) -> _Zygote:
    """Ask the zygote to fork a child with these files."""
    global _zygote  # noqa: PLW0603 - one per process
    with _lock:
        if _zygote is not None and _zygote.launcher == launcher:
            with suppress(ConnectionError, TimeoutError):  # it is dead, or hangs
                socket.send_fds(_zygote.control, [b"1"], files)
                return _zygote
        if _zygote is not None:
            _zygote.end()
        _zygote = _Zygote(launcher)
        with suppress(ConnectionError):  # it died at once: the call's socket tells
            socket.send_fds(_zygote.control, [b"1"], files)
        return _zygote


def _forked() -> None:
    """Forget the parent's zygote in a fork, which starts its own."""
    global _zygote  # noqa: PLW0603 - one per process
    if _zygote is not None:
        _zygote.process.returncode = 0  # not a child of the fork's
        _zygote.forget()
        _zygote = None
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forked)
