"""Options and helpers that several commands share: the run file, `--set`, invalid runs."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from agenticrun_api import AgenticRun, InvalidRun
from agenticrun_api.names import ExitCode
from agenticrun_api.overrides import load_run_with
from agenticrun_workers.reporting.run_folder import RunFolder

RunFile = Annotated[
    Path,
    typer.Option(
        "--file", "-f", help="YAML file with one AgenticRun.", exists=True, dir_okay=False
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Change a field before validation: pipeline.envs[0].maxSteps=4. Paths start below "
        "spec; metadata.name works too. Values are YAML. Repeatable.",
    ),
]

Seeds = Annotated[int, typer.Option(min=1, max=10_000, help="Number of episodes per check.")]
StepTimeout = Annotated[
    float, typer.Option(min=0.1, help="Time limit of one reset or step, in seconds.")
]


def load(file: Path, changes: Iterable[str] | None, *, local: bool = True) -> AgenticRun:
    """Return the run in `file` with `changes` applied.

    `local` is False for a run that is meant for a cluster.

    If the run is invalid, print all errors and end the command with exit code 64.
    """
    try:
        return load_run_with(file, changes or [], local=local)
    except InvalidRun as error:
        refuse(file, error.errors)


def look_in(folder: Path) -> None:
    """Add `folder` to the module search path of this process and its child processes.

    Environments and data sets often lie beside the run file. If it is the run.yaml of an output
    folder, they lie where the run was started.
    """
    started = [
        Path(attempt["code"]) for attempt in RunFolder(folder).attempts()[-1:] if "code" in attempt
    ]
    found = str(next(iter(started), folder).resolve())
    sys.path.insert(0, found)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [found, os.environ.get("PYTHONPATH")]))


def refuse(file: Path, errors: Iterable[str]) -> NoReturn:
    """Print the errors of an invalid run and end the command with exit code 64."""
    typer.echo(f"{file} is not a valid AgenticRun:", err=True)
    for error in errors:
        typer.echo(f"  {error}", err=True)
    raise typer.Exit(ExitCode.INVALID_CONFIG)


def give_up(message: str) -> NoReturn:
    """Print `message` and end the command with exit code 64."""
    typer.echo(message, err=True)
    raise typer.Exit(ExitCode.INVALID_CONFIG)


def check_writable(folder: Path, *, keep: bool = False) -> None:
    """End the command with exit code 64 if an output folder cannot be made or written to.

    Args:
        folder: the folder.
        keep: True to leave the folders that were made for it; a run that is refused leaves none.
    """
    made = [path for path in (folder, *folder.parents) if not keep and not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        done = "written to" if folder.is_dir() else "made"
        give_up(f"--output: {folder} cannot be {done}: {error.strerror}")
    finally:
        with suppress(OSError):  # another process uses them already
            for path in made:
                path.rmdir()


def new_folder(parent: Path, now: datetime) -> Path:
    """Create a folder named after the time, unique even when several processes start at once.

    Example: 20261121-104500, or 20261121-104500-2 if that one exists.
    """
    name = now.strftime("%Y%m%d-%H%M%S")
    check_writable(parent, keep=True)
    folder, others = parent / name, count(2)
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            folder = parent / f"{name}-{next(others)}"
        else:
            return folder
