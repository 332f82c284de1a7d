"""`agenticrun run`: train on this machine. `agenticrun validate`: check a run file alone."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agenticrun_workers.cli.common import (
    Changes,
    RunFile,
    give_up,
    load,
    look_in,
    new_folder,
    refuse,
)


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
    look_in(file.parent)
    console = Console()
    from agenticrun_workers.driver.attempt import exit_code
    from agenticrun_workers.driver.local import run_locally
    from agenticrun_workers.errors import InvalidConfig

    try:
        report = run_locally(loaded, folder, console, in_process=in_process)
    except InvalidConfig as error:
        give_up(str(error))
    console.print(
        f"{report.outcome}: {report.message}", markup=False, highlight=False, soft_wrap=True
    )
    console.print(
        f"metrics      {folder / 'metrics.jsonl'}\ncheckpoints  {folder / 'checkpoints'}",
        highlight=False,
        soft_wrap=True,
    )
    if loaded.spec.tracking.tensorboard:
        console.print(
            f"curves       tensorboard --logdir {folder / 'tensorboard'}",
            highlight=False,
            soft_wrap=True,
        )
    raise typer.Exit(exit_code(report))


def validate(file: RunFile, changes: Changes = None) -> None:
    """Validate a file as the apiserver would, and import its environments as env workers do.

    Exit codes: 0 valid, 64 invalid.
    """
    loaded = load(file, changes, local=False)
    look_in(file.parent)
    from agenticrun_workers.errors import InvalidConfig
    from agenticrun_workers.rollout.env_worker import describe_envs

    try:
        describe_envs(loaded.spec.pipeline)
    except InvalidConfig as error:
        refuse(file, [str(error)])
    typer.echo(f"{file}: AgenticRun {loaded.metadata.name} is valid")
