"""The server that forks isolated environments, and the code of a forked process.

python -m agenticrun_workers.envs.isolated_server FD

It has imported the environment's module, so a new process takes milliseconds and shares its memory.
FD is a socket to the env worker. It brings one frame (the worker's module path, type and config of
the environment), and then for each environment a number and the file descriptor of its own socket.
Closing a socket on the worker's side kills the environment behind it, even one that hangs; the
server then reports the exit status on FD. It ends with its worker, however the worker ends, and so
do all environments.

Each process answers its worker's calls on its main thread, one after the other.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import resource
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from agenticrun_workers.envs.calls import Outcome, attempt, raised, reset_arguments
from agenticrun_workers.envs.env import Renders, find_env, make_env
from agenticrun_workers.envs.isolated import NUMBER, STATUS, encoded, receive

MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def serve(end: socket.socket, type: str, config: dict[str, Any]) -> None:
    """Build the environment and answer calls until the worker closes its end.

    The first frame, and the answer to every call, is (True, value) or (False, error message).
    """
    made = attempt(make_env, type, config)
    if made.error is not None:
        end.sendall(encoded((False, f"it could not be built: {raised(made.error, make_env)}")))
        return
    with asyncio.Runner() as runner:
        child = _Child(made.value, runner)
        end.sendall(encoded((True, child.facts())))
        while True:
            try:
                name, arguments, film = receive(end)
            except EOFError:
                return
            end.sendall(child.answer(name, arguments, film))


class _Child:
    """The environment and the event loop for its async methods."""

    def __init__(self, env: Any, runner: asyncio.Runner) -> None:
        self._env = env
        self._runner = runner

    def facts(self) -> dict[str, Any]:
        return {
            "instruction": getattr(self._env, "instruction", ""),
            "draws": isinstance(self._env, Renders),
            "reusable": getattr(self._env, "reusable", True),
            "bytes": _peak_bytes(),
        }

    def answer(self, name: str, arguments: tuple[Any, ...], film: bool) -> bytes:
        """Return one frame: the method's result, and a picture if `film` is set.

        Only `reset` and `step` are filmed.
        """
        call = getattr(self._env, name)
        places, names = (
            reset_arguments(self._env, *arguments) if name == "reset" else (arguments, {})
        )
        outcome = attempt(call, *places, **names)
        if inspect.isawaitable(outcome.value):
            outcome = attempt(self._runner.run, _awaited(outcome.value))
        if outcome.error is not None:
            return encoded((False, str(raised(outcome.error, call))))
        picture = (
            attempt(self._env.render) if film and isinstance(self._env, Renders) else Outcome()
        )
        said = {
            "value": outcome.value,
            "instruction": getattr(self._env, "instruction", ""),
            "picture": picture.value,
            "picture_error": ""
            if picture.error is None
            else str(raised(picture.error, self._env.render)),
            "bytes": _peak_bytes(),
        }
        try:
            return encoded((True, said))
        except Exception as error:  # pickle raises what the objects raise
            return encoded(
                (
                    False,
                    f"{name} returned something that cannot leave the environment's process: "
                    f"{error}",
                )
            )


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_UNIT


PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class _Process:
    number: int
    pid: int
    end: socket.socket
    """The child's end of the socket, kept open here until the exit status is reported."""


class _Server:
    def __init__(self, worker: socket.socket) -> None:
        self._worker = worker
        path, self._type, self._config = receive(worker)
        sys.path[:] = path
        with suppress(Exception):  # the first environment says it in its own words
            find_env(self._type)
        self._processes: dict[int, _Process] = {}
        self._wakeup, waking = socket.socketpair()
        self._waking = waking
        for each in (self._wakeup, waking):
            each.setblocking(False)
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Serve until the worker is gone."""
        while True:
            poll = select.poll()
            poll.register(self._worker, select.POLLIN)
            poll.register(self._wakeup, select.POLLIN)
            for process in self._processes.values():
                poll.register(process.end, 0)  # hang-ups are told always
            ready = {descriptor for descriptor, _ in poll.poll()}
            for process in [
                each for each in self._processes.values() if each.end.fileno() in ready
            ]:
                _kill(process.pid)
            with suppress(BlockingIOError):
                self._wakeup.recv(4096)
            self._reap()
            if self._worker.fileno() in ready and not self._start():
                signal.set_wakeup_fd(-1)
                for process in self._processes.values():
                    _kill(process.pid)
                return

    def _start(self) -> bool:
        """Fork one environment. Returns False if the worker is gone."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._worker, NUMBER.size, 1)
        except ConnectionError:
            return False
        if len(message) < NUMBER.size or not descriptors:
            return False
        end = socket.socket(fileno=descriptors[0])
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_environment(parent, end)
        (number,) = NUMBER.unpack(message)
        self._processes[pid] = _Process(number, pid, end)
        return True

    def _become_environment(self, parent: int, end: socket.socket) -> NoReturn:
        """Run an environment in the new process, with no files of the server but its own socket."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            _die_with_parent(parent)
            for other in (
                self._worker,
                self._wakeup,
                self._waking,
                *(process.end for process in self._processes.values()),
            ):
                other.close()
            serve(end, self._type, self._config)
            status = 0
        except ConnectionError:  # the worker is not interested any more
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _reap(self) -> None:
        """Report the status of each process that ended, then close the last copy of its socket."""
        while self._processes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            process = self._processes.pop(pid, None)
            if process is None:  # the environment's module started it while it was imported
                continue
            _kill(pid)  # whatever it has started itself
            with suppress(
                OSError
            ):  # also BlockingIOError: a worker that does not read misses reports
                self._worker.send(
                    STATUS.pack(process.number, os.waitstatus_to_exitcode(status)),
                    socket.MSG_DONTWAIT,
                )
            process.end.close()


def _kill(pid: int) -> None:
    """Kill the process and its group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        libc: Any = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    _Server(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
