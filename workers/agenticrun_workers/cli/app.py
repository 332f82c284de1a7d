"""The application with all commands."""

from __future__ import annotations

import errno
import io
import sys
from typing import Annotated

import typer

from agenticrun_api.names import ExitCode
from agenticrun_api.version import __version__
from agenticrun_workers.cli.check_env import check_env
from agenticrun_workers.cli.check_model import check_model
from agenticrun_workers.cli.control import checkpoint, resume, stop, suspend
from agenticrun_workers.cli.convert import convert
from agenticrun_workers.cli.debug import debug
from agenticrun_workers.cli.doctor import doctor
from agenticrun_workers.cli.evaluate import evaluate
from agenticrun_workers.cli.export import export
from agenticrun_workers.cli.init import init
from agenticrun_workers.cli.package import package
from agenticrun_workers.cli.plan import plan
from agenticrun_workers.cli.report import report
from agenticrun_workers.cli.run import run
from agenticrun_workers.cli.serve import serve
from agenticrun_workers.cli.trace import trace
from agenticrun_workers.cli.validate import validate
from agenticrun_workers.cli.watch import logs, samples, watch

app = typer.Typer(
    help="Train LLM agents with reinforcement learning. `agenticrun run` trains on this "
    "machine, `kubectl apply` on Kubernetes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(run)
app.command()(validate)
app.command()(plan)
app.command("check-env")(check_env)
app.command("check-model")(check_model)
app.command()(debug)
app.command("eval")(evaluate)
app.command()(export)
app.command()(serve)
app.command()(convert)
app.command()(report)
app.command()(doctor)
app.command()(init)
app.command()(package)
for command in (watch, samples, logs, trace, stop, checkpoint, suspend, resume):
    app.command()(command)


def _print_version(asked: bool) -> None:  # typer calls it
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `agenticrun` command.

    A terminal or a pipe of another encoding gets `?` for characters that it does not have: answers
    of a model and bars of a curve may hold any, and a run must not fail when it prints its end.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is None:
            raise
        typer.echo(f"{error.filename} cannot be written: {error.strerror}", err=True)
        sys.exit(ExitCode.INVALID_CONFIG)


UNWRITABLE = frozenset(
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
"""Errors of a place that a command was given, which need no traceback."""
