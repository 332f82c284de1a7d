"""Start, find and stop the processes of the cluster.

A process is known by its pid AND its start time (field 22 of /proc/<pid>/stat), so that a recycled
pid is never signalled, also after a crash or a restart of the machine.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from devcluster.shell import DevclusterError, write_if_changed

_TERM_THEN_KILL_SECONDS = 5.0
_KILLED_SECONDS = 60.0
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": str(Path.home()),
}


@dataclass(frozen=True)
class ProcessSpec:
    """One process of the cluster.

    Attributes:
        files: configuration it reads, path to content; written before the start.
        in_netns: runs in the node's network namespace (else in the host's).
    """

    name: str
    argv: tuple[str, ...]
    files: Mapping[Path, str] = field(default_factory=dict)
    in_netns: bool = True

    @property
    def digest(self) -> str:
        """Hash of program, flags and configuration; a change means that it must be replaced."""
        files = {str(path): content for path, content in sorted(self.files.items())}
        return hashlib.sha256(json.dumps([self.argv, files, self.in_netns]).encode()).hexdigest()


@dataclass(frozen=True)
class ProcessRecord:
    """The record of a process that was started."""

    pid: int
    start_ticks: int
    digest: str


def start_ticks(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it is gone or a zombie.

    A process is listed as a zombie when its first thread has ended. While others run, they hold its
    ports and files, so it counts as alive.
    """
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[
        text.rindex(")") + 2 :
    ].split()  # the command name before may hold spaces and parentheses
    state, threads = fields[0], int(fields[17])
    return None if state == "X" or (state == "Z" and threads <= 1) else int(fields[19])


class ProcessTable:
    """The processes that this tool started, with one record file for each name."""

    def __init__(self, folder: Path, logs: Path, netns: Path) -> None:
        """Use a folder for records, a folder for logs, and a network namespace by its path."""
        self._folder = folder
        self._logs = logs
        self._netns = netns
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        """Processes that this object started. They outlive it, unless it stops them."""

    def record(self, name: str) -> ProcessRecord | None:
        """Return the record of `name` if that very process is alive."""
        try:
            record = ProcessRecord(**json.loads((self._folder / f"{name}.json").read_text()))
        except (
            FileNotFoundError,
            ValueError,
            TypeError,
        ):  # never started, or a file cut short by a crash
            return None
        return record if start_ticks(record.pid) == record.start_ticks else None

    def alive(self, name: str) -> bool:
        """Return True if the process is running."""
        return self.record(name) is not None

    def names(self) -> list[str]:
        """Return all names on record, dead or alive."""
        return sorted(path.stem for path in self._folder.glob("*.json"))

    def log(self, name: str) -> Path:
        """Return the log of the process."""
        return self._logs / f"{name}.log"

    def start(self, spec: ProcessSpec) -> bool:
        """Start a process unless it runs as specified; replace one that runs differently.

        Returns:
            True if it started the process.
        """
        running = self.record(spec.name)
        if running is not None:
            if running.digest == spec.digest:
                return False
            self.stop([spec.name])
        self._reap(spec.name)
        for path, content in spec.files.items():
            write_if_changed(path, content)
        self._logs.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        enter = ("nsenter", f"--net={self._netns}", "--") if spec.in_netns else ()
        with self.log(spec.name).open("a") as log:
            process = subprocess.Popen(
                [*enter, *spec.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_ENVIRONMENT,
                start_new_session=True,
            )
        ticks = start_ticks(process.pid)
        if ticks is None:
            process.wait()
            raise DevclusterError(f"{spec.name} ended at once; see {self.log(spec.name)}")
        self._children[spec.name] = process
        record = ProcessRecord(process.pid, ticks, spec.digest)
        write_if_changed(self._folder / f"{spec.name}.json", json.dumps(record.__dict__))
        return True

    def stop(self, names: Iterable[str], grace_seconds: float = _TERM_THEN_KILL_SECONDS) -> None:
        """Send TERM to all, and KILL to what is left after the grace period; wait for their end.

        Raises:
            DevclusterError: a process survived SIGKILL for a minute.
        """
        names = list(names)
        self._signal(names, signal.SIGTERM)
        if not self._wait_gone(names, grace_seconds):
            self._signal(names, signal.SIGKILL)
            if not self._wait_gone(names, _KILLED_SECONDS):
                raise DevclusterError(
                    f"did not die: {', '.join(name for name in names if self.alive(name))}"
                )
        for name in names:
            self._reap(name)
            (self._folder / f"{name}.json").unlink(missing_ok=True)

    def _reap(self, name: str) -> None:
        """Leave no zombie of a child that has ended."""
        if name in self._children:
            self._children.pop(name).poll()

    def _signal(self, names: Iterable[str], number: signal.Signals) -> None:
        for name in names:
            record = self.record(name)
            if record is not None:
                with contextlib.suppress(ProcessLookupError):  # it may end on its own in between
                    os.kill(record.pid, number)

    def _wait_gone(self, names: Iterable[str], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while any(self.alive(name) for name in names):
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)
        return True
