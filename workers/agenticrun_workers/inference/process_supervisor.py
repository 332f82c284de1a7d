"""The process between us and an engine's server: when it ends, nothing of the engine is left.

Run as a script: `python process_supervisor.py PARENT_PID FOLDER COMMAND...`, with the server's environment. It starts the command in a
session of its own and ends when the command ends, when its standard input closes, or when its parent is gone, however that died.
Before it ends it kills every process that descends from the command, also those that left its process group, and removes FOLDER.
SIGTERM is handed on to the command, which may then end in its own time. The exit status is the command's.

Why a process: PR_SET_PDEATHSIG alone reaches only the direct child, and follows the thread that started it instead of the process.
Why two: Ray kills the children of an actor that it ends. That takes the first, which only stands in for the keeper; the keeper, its
child, sees it go.

Standard library only, and nothing of ours: it runs in whatever Python starts it, in a few milliseconds.
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
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TRACKER_SECONDS = 10.0
"""So long may Python's resource trackers clean up."""
LOOK_SECONDS = 1.0
"""How often it looks whether its parent lives: standard input stays open where the parent had forked."""


def main(parent: int, folder: str, command: list[str]) -> int:
    own = os.getpid()
    signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGTERM,)
    )  # it waits until there is somebody to hand it on to
    keeper = os.fork()
    return _stand_in(parent, keeper) if keeper else _keep(own, folder, command)


def _stand_in(parent: int, keeper: int) -> int:
    """Hand signals on to the keeper and its exit status back; end when the parent is gone, and the keeper will too."""
    awaited = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    while os.getppid() == parent:
        ended, status = os.waitpid(keeper, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        caught = signal.sigtimedwait(awaited, LOOK_SECONDS)
        if caught is not None and caught.si_signo == signal.SIGTERM:
            os.kill(keeper, signal.SIGTERM)
    return 0


def _keep(parent: int, folder: str, command: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    # Descendants whose parents die become ours instead of init's, so that they can be found.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def begin() -> None:
        # The keeper has one thread, so the server is killed exactly when the keeper is.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))

    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=begin
    )
    signal.signal(signal.SIGTERM, lambda *_: server.send_signal(signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while server.poll() is None and os.getppid() == parent:
        ready, _, _ = select.select([0, wake], [], [], LOOK_SECONDS)
        if 0 in ready:
            break
        if wake in ready:
            os.read(wake, 4096)
    if server.poll() is None:
        server.kill()
    code = server.wait()
    _kill_descendants()
    shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _kill_descendants() -> None:
    """Kill until nothing is left: a process may fork between the look and the kill.

    Python's resource trackers are killed last: they remove the semaphores of the others from /dev/shm, and end, when those are gone.
    """
    patience = time.monotonic() + TRACKER_SECONDS
    while pids := _descendants(os.getpid(), _children_of_all()):
        for pid in pids:
            if time.monotonic() > patience or not _is_resource_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(0.01)


def _is_resource_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _descendants(pid: int, children: dict[int, list[int]]) -> list[int]:
    direct = children.get(pid, [])
    return [*direct, *(pid for child in direct for pid in _descendants(child, children))]


def _children_of_all() -> dict[int, list[int]]:
    """Parent -> children, of every process on the machine."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, _, rest = stat.read_text(errors="replace").partition(
                " "
            )  # the kernel cuts names, within a letter too
            parent = int(rest.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(pid))
    return children


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
