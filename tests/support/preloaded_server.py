"""`python preloaded_server.py SOCKET MODULE...`: fork processes that have imported modules.

It serves `preloaded_client.py` until its standard input closes; then its processes are killed. A
process is also killed when its client has ended.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import os
import runpy
import select
import signal
import socket
import sys
import warnings
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Import the modules and serve; a forked process returns when its program has ended."""
    path, *modules = sys.argv[1:]
    gc.disable()  # it would look through all that is imported, again and again
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pyproject.toml lists those of a test's own imports
        for module in modules:
            importlib.import_module(module)
    gc.enable()
    # setuptools, which DeepSpeed imports, adds a folder; a program has it after its own import
    sys.path[:] = [entry for entry in sys.path if not entry.endswith("setuptools/_vendor")]
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a forked process would have only this one"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path + ".new")
        listener.listen(100)
        Path(path + ".new").rename(path)  # it is there when it answers
        connection = _serve(listener)
    _run(connection)


def _serve(listener: socket.socket) -> socket.socket:
    """Fork a process per connection. Returns its connection in the forked process only."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written
    gc.freeze()  # collections of the forked leave shared pages alone
    waiting: dict[int, socket.socket] = {}
    server = os.getpid()
    poll = select.poll()
    for readable in (sys.stdin.fileno(), woken, listener.fileno()):
        poll.register(readable, select.POLLIN)
    while True:
        ready = {file for file, _ in poll.poll()}
        if sys.stdin.fileno() in ready:
            os._exit(0)
        if woken in ready:
            os.read(woken, 4096)
            _report_ended(waiting, poll)
        for pid, connection in waiting.items():
            if connection.fileno() in ready:
                os.kill(pid, signal.SIGKILL)  # it is reaped above, so the pid is still its own
                poll.unregister(connection)
        if listener.fileno() not in ready:
            continue
        connection, _ = listener.accept()
        pid = os.fork()
        if pid:
            waiting[pid] = connection
            with suppress(OSError):
                connection.send(pid.to_bytes(4, "big"))
            poll.register(connection, 0)  # not readable: only that the client has ended
            continue
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != server:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (woken, wake):
            os.close(end)
        for other in waiting.values():
            other.close()
        return connection


def _report_ended(waiting: dict[int, socket.socket], poll: select.poll) -> None:
    while waiting:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with waiting.pop(pid) as connection, suppress(OSError):
            with suppress(KeyError):
                poll.unregister(connection)
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _run(connection: socket.socket) -> None:
    """Become the process that the client asked for, as if it had been started as such."""
    with connection:
        head, files, _, _ = socket.recv_fds(connection, 4, 3)
        body = bytearray()
        while len(body) < int.from_bytes(head, "big"):
            body += connection.recv(1 << 20)
    folder, count, *words = body.decode("utf-8", "surrogateescape").split("\0")
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.setsid()
    os.chdir(folder)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [entry for entry in sys.path[1:] if entry not in inherited]
    os.environ.clear()
    for word in words[int(count) :]:
        name, _, value = word.partition("=")
        os.environ[name] = value
    sys.argv = words[: int(count)]
    unbuffered = False
    while sys.argv[0] in ("-u", "-B"):  # options of the interpreter
        unbuffered |= sys.argv.pop(0) == "-u"
    # The server's own streams remember what its files could do, such as seeking.
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    out, err = (io.BufferedWriter(io.FileIO(number, "w", closefd=False)) for number in (1, 2))
    sys.stdout = io.TextIOWrapper(out, line_buffering=unbuffered)
    sys.stderr = io.TextIOWrapper(err, errors="backslashreplace", line_buffering=True)
    own = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    module = sys.argv[1] if sys.argv[0] == "-m" else None
    first = folder if module else str(Path(sys.argv[0]).parent)
    sys.path[:] = list(dict.fromkeys([first, *own, *installed]))
    if module:
        del sys.argv[0]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
