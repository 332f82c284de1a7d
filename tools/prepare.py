"""Install and build what `make demo` and `make test` need, side by side.

Three commands use different things most of the time: the environment waits for the network, the Go
programs for the processor, the images for the network and the disk. So they run at once, each with
its name before its lines. When one fails, the others are stopped and its output is shown.

What is there already takes a second. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("AgenticRun needs Python 3.11 or newer: set PYTHON=/path/to/python3.11")

from devcluster import prerequisites
from devcluster.clusters import Cluster, HostCluster, choose
from devcluster.settings import Settings
from devcluster.shell import NoClusterPossible
from prometheus import refusal

ROOT = Path(__file__).resolve().parent.parent
PROMETHEUS = (sys.executable, str(ROOT / "tools/prometheus.py"))
DEVCLUSTER = (sys.executable, str(ROOT / "tools/devcluster"))
SILENT_SECONDS = 30.0
STOP_SECONDS = 15.0
SHOWN_LINES = 40
INTERRUPTED = 130
# The Go programs take longest. The others get what they leave of the processor.
NICE = ("nice", "-n", "10")


class Task:
    """One command of several that run at once. Its lines are printed with its name and kept."""

    def __init__(self, name: str, command: Sequence[str], width: int = 0) -> None:
        """Start the command."""
        self.name, self.lines = name, list[str]()
        self._label = f"{name:<{width}} | "
        self._begun = self._heard = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that it can be stopped with all that it started
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """Return the exit status once there is one; say now and then that a silent task runs."""
        status = self.process.poll()
        if status is not None:
            self._reader.join(5)  # what it left running may hold the pipe open
        elif time.monotonic() - self._heard >= SILENT_SECONDS:
            self.say(f"running for {self.seconds:.0f} s")
        return status

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._begun

    def say(self, line: str) -> None:
        """Print a line with the name of the task."""
        self._heard = time.monotonic()
        print(f"{self._label}{line}", flush=True)

    def signal(self, number: signal.Signals) -> None:
        """Signal the command and everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip())
                self.say(self.lines[-1])


def run_together(commands: dict[str, Sequence[str]]) -> int:
    """Run commands at once until all have ended or one has failed.

    Returns:
        0, or the exit status of the command that failed; the others are stopped then.
    """
    # A flag, not an exception: one that arrives while a command is being started would lose it.
    # No Event: its lock, held by the wait that the signal interrupts, would never be free again.
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, interrupt)
    # Who started us may have blocked them, as a program does that waits for signals in one thread.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
    tasks: list[Task] = []
    try:
        width = max(map(len, commands))
        for name, command in commands.items():
            tasks.append(Task(name, command, width))
        running = list(tasks)
        while running:
            for task in list(running):
                status = task.poll()
                if status is None:
                    continue
                running.remove(task)
                if status != 0:
                    _stop(running)
                    print(
                        f"\n{task.name} failed after {task.seconds:.0f} s; the end of its output:"
                    )
                    print(*task.lines[-SHOWN_LINES:], sep="\n", flush=True)
                    return status if status > 0 else 128 - status
                task.say(f"done in {task.seconds:.0f} s")
            if interrupted:
                return INTERRUPTED
            time.sleep(0.1)
        return 0
    finally:
        _stop(tasks)
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(tasks: Sequence[Task]) -> None:
    """End tasks that are still running, and what they started."""
    alive = [task for task in tasks if task.process.poll() is None]
    for task in alive:
        task.say("stopped")
        task.signal(signal.SIGTERM)
    end = time.monotonic() + STOP_SECONDS
    for task in alive:
        with contextlib.suppress(subprocess.TimeoutExpired):
            task.process.wait(max(0.0, end - time.monotonic()))
        task.signal(signal.SIGKILL)
        task.process.wait()


def chosen_cluster(settings: Settings) -> Cluster | None:
    """Return the cluster of this machine; None, after saying why, if it can have none."""
    try:
        return choose(settings)
    except NoClusterPossible as error:
        print(error, flush=True)
        return None


def install_venv(settings: Settings, cluster: Cluster | None) -> None:
    """Install what Debian's Python lacks to make an environment, where we may install packages.

    Both the Python environment and the programs of the cluster begin with one.
    """
    if isinstance(cluster, HostCluster) and not prerequisites.has_venv():
        prerequisites.install_packages(settings)


def commands(
    settings: Settings, cluster: Cluster | None, *, engines: bool
) -> dict[str, Sequence[str]]:
    """Return what has to be done on this machine, by name.

    Args:
        settings: those of the development cluster.
        cluster: the cluster of this machine.
        engines: what only tests need, too: the environments of SGLang and vLLM, and Prometheus.
    """
    make = ("make", "--no-print-directory", "setup", *(("engines",) if engines else ()))
    found: dict[str, Sequence[str]] = {"environment": (*NICE, *make)}
    if cluster is None:
        return found
    if isinstance(cluster, HostCluster):
        found["programs"] = (*DEVCLUSTER, "build")
    found["images"] = (*NICE, *DEVCLUSTER, "images", "--build-only")
    if engines:
        if reason := refusal(settings):
            print(f"no Prometheus: the tests that need it will fail: {reason}", flush=True)
        else:
            found["prometheus"] = PROMETHEUS
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines",
        action="store_true",
        help="also what only tests need: the environments of SGLang and vLLM, and Prometheus",
    )
    options = parser.parse_args()
    settings = Settings.from_environment()
    cluster = chosen_cluster(settings)
    install_venv(settings, cluster)
    return run_together(commands(settings, cluster, engines=options.engines))


if __name__ == "__main__":
    sys.exit(main())
