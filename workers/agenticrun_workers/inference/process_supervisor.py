"""The process between us and an engine's server. When it ends, nothing of the server is left.

Run as a script: `python process_supervisor.py PARENT_PID FOLDER COMMAND...`, with the environment
of the server. It starts the command in a session of its own, and ends when the command ends, when
its standard input closes, or when its parent is gone, however the parent died. Before it ends, it
kills all descendants of the command, even outside its process group, and removes FOLDER and
the descendants' files in /dev/shm.
It forwards SIGTERM to the command, which may then end in its own time. Its exit status is that of
the command.

Imports nothing of ours, so that it starts fast and keeps little memory.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TRACKER_SECONDS = 10.0
"""Time for Python's resource trackers to clean up."""
POLL_SECONDS = 1.0
"""Interval of checks that the parent lives. Standard input stays open if the parent has forked."""
LOOK_SECONDS = 30.0
"""Interval of looks at shared memory in use. If a server crashes, what it made since may stay."""
SHARED_MEMORY = "/dev/shm"


def main(parent: int, folder: str, command: list[str]) -> int:
    own = os.getpid()
    # SIGTERM stays pending until there is a process to forward it to.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    # Two processes: Ray kills the children of an actor that it ends. That hits only the relay; the
    # supervisor is the relay's child and cleans up.
    supervisor = os.fork()
    return _relay(parent, supervisor) if supervisor else _supervise(own, folder, command)


def _relay(parent: int, supervisor: int) -> int:
    """Forward signals to the supervisor and return its exit status.

    Return early if the parent is gone; the supervisor then ends, too.
    """
    awaited = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    while os.getppid() == parent:
        ended, status = os.waitpid(supervisor, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        caught = signal.sigtimedwait(awaited, POLL_SECONDS)
        # Ctrl-C of a terminal is for the program that started us, which then ends us in order.
        if caught is not None and caught.si_signo == signal.SIGTERM:
            os.kill(supervisor, signal.SIGTERM)
    return 0


def _supervise(parent: int, folder: str, command: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    # Orphaned descendants become our children instead of init's, so that we find them.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def begin() -> None:
        # The signal follows the thread that started the server, not the process. The supervisor has
        # one thread, so the kernel kills the server exactly when it dies. It reaches only the
        # direct child: the server's descendants are killed in `_kill_descendants`.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))

    shared = SharedMemory()

    def terminate(*_: object) -> None:
        shared.look()
        server.send_signal(signal.SIGTERM)

    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=begin,  # noqa: PLW1509 - this process has one thread
    )
    signal.signal(signal.SIGTERM, terminate)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    # Ctrl-C of a terminal must not cut the cleaning short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    # Without this, a signal between `poll` and `select` would be noticed a second late.
    signal.set_wakeup_fd(waker)
    # A handler of our own, because by default SIGCHLD wakes nothing.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    look_at = time.monotonic() + LOOK_SECONDS
    while server.poll() is None and os.getppid() == parent:
        if time.monotonic() >= look_at:
            shared.look()
            look_at = time.monotonic() + LOOK_SECONDS
        ready, _, _ = select.select([0, wake], [], [], POLL_SECONDS)
        # Nothing is ever written to standard input: it is readable when the other end has closed.
        if 0 in ready:
            break
        if wake in ready:
            os.read(wake, 4096)
    # Before the kill: mappings of dead processes cannot be seen.
    shared.look()
    if server.poll() is None:
        server.kill()
    code = server.wait()
    _kill_descendants()
    shared.remove()
    shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _kill_descendants() -> None:
    """Kill until nothing is left: a process may fork between the look and the kill.

    Python's resource trackers die last. They remove the semaphores of the other processes from
    /dev/shm, and end by themselves when those are gone.
    """
    deadline = time.monotonic() + TRACKER_SECONDS
    while processes := psutil.Process().children(recursive=True):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                if time.monotonic() > deadline or not any(
                    "multiprocessing.resource_tracker" in word for word in process.cmdline()
                ):
                    process.kill()
        # Reaped, because zombies would count as children forever.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(0.01)


class SharedMemory:
    """The files right in /dev/shm, not in a folder, that the server's processes share.

    A server that is killed leaves them, until /dev/shm is full. Only what was not there before the
    server counts, and nothing here raises: the processes must end in any case.
    """

    def __init__(self) -> None:
        self._earlier: set[str] = set()
        self._made: set[str] = set()
        with contextlib.suppress(OSError):
            # Files of other programs, and of engines that served before.
            self._earlier |= {*os.listdir(SHARED_MEMORY)}

    def look(self) -> None:
        """Note the files that the processes write to now. Later they can no longer be found."""
        with contextlib.suppress(OSError, psutil.Error):
            self._made |= mapped_by(psutil.Process().children(recursive=True), "rw-s")
            self._made -= self._earlier

    def remove(self) -> None:
        """Delete the files, except files of another user or still mapped by another process."""
        if not self._made:
            return
        with contextlib.suppress(OSError, psutil.Error):
            # A segment may be shared with a process that is not the server's, such as Ray's.
            others = list(psutil.process_iter())
            for name in self._made - mapped_by(others) - _opened_by(others):
                path = os.path.join(SHARED_MEMORY, name)
                with contextlib.suppress(OSError):
                    if os.stat(path).st_uid == os.getuid():
                        os.unlink(path)


def mapped_by(processes: Iterable[psutil.Process], permissions: str = "") -> set[str]:
    """Return the names of the files right in /dev/shm that these processes map, as far as readable.

    `permissions`: only mappings with these, as in /proc/PID/maps.
    """
    found: set[str] = set()
    for process in processes:
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{process.pid}/maps", errors="surrogateescape") as maps,
        ):
            for line in maps:
                if SHARED_MEMORY in line:
                    _, allowed, _, _, _, path = line.rstrip("\n").split(None, 5)
                    if permissions in allowed:
                        found.add(path)
    return _names(found)


def _opened_by(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the names of the files right in /dev/shm that these processes have open."""
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for file in os.scandir(f"/proc/{process.pid}/fd"):
                with contextlib.suppress(OSError):
                    found.add(os.readlink(file.path))
    return _names(found)


def _names(paths: Iterable[str]) -> set[str]:
    return {os.path.basename(path) for path in paths if os.path.dirname(path) == SHARED_MEMORY}


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
