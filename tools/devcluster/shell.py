"""Errors, commands, files and locks: what every other module of this folder uses."""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from devcluster.console import progress

_ERROR_CHARACTERS = 3000


class DevclusterError(Exception):
    """A step failed; the message says which and where its log is. Exit code 1."""


class NoClusterPossible(DevclusterError):
    """This machine can have no cluster; the message is one line that says why. Exit code 3."""


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
    """Run a command to its end and return its stdout.

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
        end = shown[-_ERROR_CHARACTERS:].strip()
        raise CommandFailed(f"{' '.join(words[:6])} ended with {done.returncode}: {end}")
    return output


def succeeds(argv: Sequence[str | Path]) -> bool:
    """Return True if the command exists and ends with status 0; drop its output."""
    try:
        return (
            subprocess.run(
                [str(word) for word in argv], capture_output=True, check=False
            ).returncode
            == 0
        )
    except FileNotFoundError:
        return False


def write_if_changed(path: Path, content: str, mode: int = 0o644) -> bool:
    """Write a file only if its content differs: kube-proxy exits when its file is touched.

    Returns:
        True if it wrote.
    """
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
    """Hold a lock for the block, after waiting for the process that has it.

    The file at `path` stays and names its last holder. The kernel frees the lock of a process that
    was killed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            with progress(f"waiting for another devcluster command ({file.read() or path})"):
                fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"process {os.getpid()}: {' '.join(sys.argv)}")
        file.flush()
        yield
