"""Errors, commands, files and locks: what every other module of this folder uses."""

import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from devcluster.console import say

_POLL_SECONDS = 0.2
_ERROR_CHARACTERS = 3000


class DevclusterError(Exception):
    """A step failed; the message says which and where its log is. Exit code 1."""


class NoClusterPossible(DevclusterError):
    """This machine can have none of the kinds of cluster; the message is one line that says why. Exit code 3."""


class CommandFailed(DevclusterError):
    """A command ended with a non-zero status; the message carries the end of its output."""


def run(
    argv: Sequence[str | Path],
    *,
    stdin: str | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> str:
    """Runs a command to its end and returns its stdout.

    Args:
        env: added to this process's environment.
        log: receives stdout and stderr as they come; the return value is then empty.

    Raises:
        CommandFailed: with the end of the command's output.
    """
    words = [str(word) for word in argv]
    environment = {**os.environ, **(env or {})}
    if log is None:
        done = subprocess.run(
            words,
            input=stdin,
            cwd=cwd,
            env=environment,
            text=True,
            capture_output=True,
            check=False,
        )
        output, shown = done.stdout, f"{done.stdout}{done.stderr}"
    else:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as sink:
            done = subprocess.run(
                words,
                input=stdin,
                cwd=cwd,
                env=environment,
                text=True,
                stdout=sink,
                stderr=subprocess.STDOUT,
                check=False,
            )
        output, shown = (
            "",
            "" if done.returncode == 0 else f"{log}:\n{log.read_text(errors='replace')}",
        )
    if done.returncode != 0:
        raise CommandFailed(
            f"{' '.join(words[:6])} ended with {done.returncode}: {shown[-_ERROR_CHARACTERS:].strip()}"
        )
    return output


def succeeds(argv: Sequence[str | Path]) -> bool:
    """Whether the command exists and ends with status 0; its output is dropped."""
    try:
        return (
            subprocess.run(
                [str(word) for word in argv], capture_output=True, check=False
            ).returncode
            == 0
        )
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Polls `condition` until it holds.

    Raises:
        DevclusterError: it did not hold within `seconds`; `what` names it.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            raise DevclusterError(f"timed out after {seconds:.0f} s: {what}")
        time.sleep(_POLL_SECONDS)


def write_if_changed(path: Path, content: str, mode: int = 0o644) -> bool:
    """Writes a file only when its content differs (kube-proxy exits when its file is touched); says whether it wrote."""
    if path.is_file() and path.read_text() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    number, partial = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}."
    )  # each writer's own
    with open(number, "w") as file:
        file.write(content)
        os.fchmod(number, mode)
    Path(partial).replace(path)
    return True


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds a lock on `path`, which stays as an empty file, waiting for whoever has it; a killed holder frees it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another devcluster command ({path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
