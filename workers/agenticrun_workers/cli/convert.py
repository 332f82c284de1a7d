"""`agenticrun convert`: convert a ROLL configuration to an AgenticRun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agenticrun_api.names import ExitCode


def convert(
    file: Annotated[
        Path, typer.Argument(help="YAML file of a ROLL AgenticConfig.", exists=True, dir_okay=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write the AgenticRun to. Default: standard output.",
            dir_okay=False,
        ),
    ] = None,
    config_dir: Annotated[
        Path | None,
        typer.Option(
            help="Additional folder to search for the entries of the file's `defaults:`.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Convert a ROLL YAML to an AgenticRun.

    A report about every field goes to standard error. ROLL does not have to be installed.
    Exit codes: 0 converted, 64 the configuration cannot be converted.
    """
    from agenticrun_workers.convert import ConvertError, as_yaml, compose
    from agenticrun_workers.convert import convert as converted
    from agenticrun_workers.convert.fields import show

    try:
        conversion = converted(compose(file, config_dir), file.stem)
    except ConvertError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(ExitCode.INVALID_CONFIG) from None
    show(conversion.lines, Console(stderr=True, width=None if sys.stderr.isatty() else 140))
    text = as_yaml(conversion.document)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text)
        typer.echo(f"{output}: check it with `agenticrun validate -f {output}`", err=True)
