"""`agenticrun run`: train on this machine."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from agenticrun_api import AgenticRun
from agenticrun_workers.cli.common import (
    Changes,
    RunFile,
    check_writable,
    give_up,
    load,
    look_in,
    new_folder,
)
from agenticrun_workers.cli.run_notes import closing_lines, code_notes
from agenticrun_workers.reporting.display import RunConsole
from agenticrun_workers.reporting.run_folder import RunFolder


def run(
    file: RunFile,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for metrics and checkpoints. Pass a stopped run's folder to resume it. "
            "Default: a new folder, runs/<name>/<time>.",
            file_okay=False,
        ),
    ] = None,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process",
            help="Run trainer, engines and environments as threads of this process, without Ray: "
            "breakpoint() works in an environment, an estimator or a loss.",
        ),
    ] = False,
    trace_steps: Annotated[
        int,
        typer.Option(
            min=0,
            help="Record a Perfetto trace of the start and of so many steps, in the output "
            "folder. `agenticrun trace` records a run that trains.",
        ),
    ] = 0,
    changes: Changes = None,
) -> None:
    """Train on this machine, with the same YAML as on Kubernetes.

    Ctrl-C saves a checkpoint and ends the run. Exit codes: 0 succeeded, 1 failed and a retry may
    help, 64 the YAML can never work, 75 stopped.
    """
    loaded = load(file, changes)
    folder = (
        output or new_folder(Path("runs") / loaded.metadata.name, datetime.now(UTC))
    ).resolve()
    train(loaded, folder, file.parent, file, in_process=in_process, trace_steps=trace_steps)


def train(
    run: AgenticRun,
    folder: Path,
    code: Path,
    file: Path,
    *,
    in_process: bool = False,
    trace_steps: int = 0,
) -> NoReturn:
    """Train a run in an output folder, say where everything is, and end the command.

    Args:
        run: the run.
        folder: its output folder.
        code: the folder of its modules.
        file: its run file, which the last line names if the run failed.
        in_process: without Ray.
        trace_steps: number of steps to record from the beginning.
    """
    look_in(code)
    console = RunConsole()
    for line in code_notes(run, code):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    from agenticrun_workers.driver.local import run_locally
    from agenticrun_workers.driver.outcome import exit_code
    from agenticrun_workers.errors import CannotStart, InvalidConfig

    check_writable(folder)
    try:
        report = run_locally(
            run,
            folder,
            console,
            in_process=in_process,
            code=code.resolve(),
            trace_steps=trace_steps,
        )
    except (CannotStart, InvalidConfig) as error:
        give_up(str(error))
    with suppress(OSError):  # The run is over; a closed stdout must not change its exit code.
        for line in closing_lines(run, RunFolder(folder), report, file):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(exit_code(report))
