"""A process that forks others on request, and its client.

Sandbox calls and isolated environments use it: everything is imported once, so a new process takes
milliseconds. Client and server share a socket of packets. Each packet asks for a child and hands
over the child's files and, as the last one, the call's socket. That socket serves two purposes: the
server reports on it how the child ended, and kills the child when the client shuts it down. When
the client closes its end or dies, the server kills all children and ends.

The sandbox's server imports this file and nothing else of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

MOST_FILES = 16
"""Maximum number of files in a request."""
PR_SET_PDEATHSIG = 1

libc = ctypes.CDLL(None, use_errno=True)


class ForkServer:
    """Client of one server, which starts with it.

    Args:
        command: runs `serve` on its standard input.
        timeout: seconds for a live server to accept a request; None: no limit.
        options: of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], timeout: float | None, **options: Any) -> None:
        import subprocess  # not at the top: the server does not need it

        # Packets keep their borders: each request is one message, with its files.
        self._control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(timeout)
        # Closed here, so that the server sees the end of the client.
        with other_end:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdin=other_end.fileno(), **options
            )

    def fork(self, files: Sequence[int]) -> socket.socket:
        """Ask for a child with these files, and return the call's socket.

        Its first packet is the exit status in decimal, as in `subprocess`. It closes without one if
        there is no child.

        Raises:
            OSError: the server is dead, or hangs.
        """
        call, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # On an error the caller gets no socket, so it is closed here.
        with contextlib.ExitStack() as failed, other_end:
            failed.enter_context(call)
            socket.send_fds(self._control, [bytes([len(files) + 1])], [*files, other_end.fileno()])
            failed.pop_all()
        return call

    def close(self) -> None:
        """Let the server end with its children. A fork of the client only closes its copy."""
        self._control.close()


def serve(control: int) -> list[int]:
    """Fork a child per request. Returns in the children only.

    A child leads a session of its own, dies with the server, and has none of the files that are
    opened here.

    Args:
        control: file descriptor of the server's end of the socket.

    Returns:
        file descriptors of the files that the child was given.
    """
    client = socket.socket(fileno=control)
    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written to `wake`
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the client may have blocked SIGCHLD
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or ignore it, in the background
    gc.freeze()  # children's collections then leave shared pages alone
    calls: dict[int, int] = {}
    """Processes by their call's socket."""
    events = select.poll()
    for fd in (control, woken):
        events.register(fd, select.POLLIN)
    while True:
        # a new call may reuse the number of a socket that was just closed, and must not get that
        # one's event: requests come last
        for fd, _ in sorted(events.poll(), key=lambda event: event[0] == control):
            if fd == control:
                try:
                    request, handed, _, _ = socket.recv_fds(
                        client, 1, MOST_FILES, socket.MSG_CMSG_CLOEXEC
                    )
                # A client that is gone ends the server, however the kernel reports it.
                except ConnectionError:
                    request = b""
                # Children die with the server; killing them here also ends their process groups.
                if not request:
                    signal.set_wakeup_fd(-1)
                    for pid in calls.values():
                        kill(pid)
                    sys.exit()
                child = _fork(handed, request[0])
                if child == 0:
                    # A child that keeps them would hold calls of others open.
                    for own in (woken, wake, handed[-1], *calls):
                        os.close(own)
                    client.close()
                    return handed[:-1]
                if child is not None:
                    calls[handed[-1]] = child
                    events.register(handed[-1], select.POLLIN)
            elif fd == woken:
                os.read(woken, 4096)
                for call, status in _ended(calls):
                    # The client may have shut the call down already.
                    with contextlib.suppress(KeyError):
                        events.unregister(call)
                    # The client may no longer read.
                    with contextlib.suppress(OSError):
                        os.write(call, str(status).encode())
                    os.close(call)
            elif fd in calls:  # clients never write: this one has shut the call down
                events.unregister(fd)
                kill(calls[fd])


def _fork(handed: list[int], expected: int) -> int | None:
    """Return the child's process id, 0 in the child, or None if there is no child."""
    parent = os.getpid()
    try:
        # The kernel drops files that exceed the limit of the server, without an error.
        if len(handed) != expected:
            raise OSError("too many open files")
        pid = os.fork()
    except OSError as error:
        print(f"no child: {error}", file=sys.stderr, flush=True)
        for fd in handed:
            os.close(fd)
        return None
    if pid == 0:
        # First in the child: it must not outlive the server, whatever happens next.
        libc.prctl(PR_SET_PDEATHSIG, *(ctypes.c_ulong(n) for n in (signal.SIGKILL, 0, 0, 0)))
        # The server died before the signal was set, so it will never come.
        if os.getppid() != parent:
            os._exit(1)
        # So that everything the child starts can be killed as a group.
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return 0
    for fd in handed[:-1]:
        os.close(fd)
    return pid


def _ended(calls: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Remove calls that have ended; yield their sockets, and exit statuses as in `subprocess`."""
    sockets = {pid: call for call, pid in calls.items()}
    while sockets:
        # WNOWAIT: the pid must stay taken until its group is killed.
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return
        if found.si_pid in sockets:
            # Kill what is left of its process group before waitpid frees the pid for reuse.
            kill(found.si_pid)
        _, status = os.waitpid(found.si_pid, 0)
        call = sockets.pop(found.si_pid, None)
        if call is not None:  # None: an imported module has started this process
            del calls[call]
            yield call, os.waitstatus_to_exitcode(status)


def kill(pid: int) -> None:
    """Kill a child and its group."""
    for end in (os.kill, os.killpg):
        with contextlib.suppress(OSError):  # no group yet
            end(pid, signal.SIGKILL)
