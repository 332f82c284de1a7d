"""The command line: `agenticrun run`, `agenticrun validate`, `agenticrun version`.

Ray, torch and transformers take seconds to import, so each command imports what it needs.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from agenticrun_api import AgenticRun, InvalidRun, load_run
from agenticrun_api.names import ExitCode

app = typer.Typer(
    help="Train LLM agents with reinforcement learning: on this machine here, on Kubernetes with `kubectl apply`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RunFile = Annotated[Path, typer.Option("--file", "-f", help="YAML file with one AgenticRun.", exists=True, dir_okay=False)]


@app.command()
def run(
    file: RunFile,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for metrics and checkpoints; a run that was stopped goes on there. Default: runs/<name>/<time>.",
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Train on this machine, with the same YAML as on a cluster. Ctrl-C saves a checkpoint and ends."""
    loaded = _load(file)
    started = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder = (output or Path("runs") / loaded.metadata.name / started).resolve()
    console = Console()
    from agenticrun_workers.local import run_locally
    from agenticrun_workers.pipeline.session import exit_code

    report = run_locally(loaded, folder, file.resolve().parent, console)
    console.print(f"{report.outcome}: {report.message}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"metrics      {folder / 'metrics.jsonl'}\ncheckpoints  {folder / 'checkpoints'}", highlight=False, soft_wrap=True)
    if loaded.spec.tracking.tensorboard:
        console.print(f"curves       tensorboard --logdir {folder / 'tensorboard'}", highlight=False, soft_wrap=True)
    raise typer.Exit(exit_code(report))


@app.command()
def validate(file: RunFile) -> None:
    """Check a YAML file as the apiserver would, and import its environments as the workers would."""
    loaded = _load(file)
    sys.path.insert(0, str(file.resolve().parent))
    from agenticrun_workers.rollout.env_worker import describe_envs
    from agenticrun_workers.rollout.errors import InvalidConfig

    try:
        describe_envs(loaded.spec.pipeline)
    except InvalidConfig as error:
        _refuse(file, [str(error)])
    typer.echo(f"{file}: AgenticRun {loaded.metadata.name} is valid")


@app.command()
def version() -> None:
    """Print the version of AgenticRun."""
    typer.echo(installed_version("agenticrun"))


def _load(file: Path) -> AgenticRun:
    try:
        return load_run(file)
    except InvalidRun as error:
        _refuse(file, error.errors)


def _refuse(file: Path, errors: list[str] | tuple[str, ...]) -> NoReturn:
    typer.echo(f"{file} is not a valid AgenticRun:", err=True)
    for error in errors:
        typer.echo(f"  {error}", err=True)
    raise typer.Exit(ExitCode.INVALID_CONFIG)


def main() -> None:
    """Entry point of the `agenticrun` command."""
    app()


if __name__ == "__main__":
    main()
