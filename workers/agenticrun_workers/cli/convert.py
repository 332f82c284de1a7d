"""`agenticrun convert`: convert a ROLL configuration to an AgenticRun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


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
    details: Annotated[
        bool,
        typer.Option("--details", help="Report every field, not only what the user must read."),
    ] = False,
    first_step: Annotated[
        bool,
        typer.Option(
            "--first-step",
            help="Write a run of one step with a tiny model, for `agenticrun run --in-process`.",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite an output file that has other content.")
    ] = False,
) -> None:
    """Convert a ROLL YAML to an AgenticRun.

    A short report goes to standard error: lines that need a decision, and settings that mean
    something else here. ROLL does not have to be installed.
    Exit codes: 0 ready, 2 the output file exists with other content, 3 lines need a decision,
    64 the file cannot be read.
    """
    from agenticrun_workers.convert import ConvertError, as_yaml, compose
    from agenticrun_workers.convert import convert as converted
    from agenticrun_workers.convert.outcome import (
        ConvertExit,
        exit_code,
        show_details,
        summary,
        undecided_lines,
    )
    from agenticrun_workers.convert.tiny import tiny

    try:
        conversion = converted(compose(file, config_dir), file.stem)
    except ConvertError as error:
        message = str(error)
        typer.echo(message if message.startswith(str(file)) else f"{file}: {message}", err=True)
        raise typer.Exit(ConvertExit.UNREADABLE) from None
    if details:
        show_details(
            conversion.lines, Console(stderr=True, width=None if sys.stderr.isatty() else 140)
        )
    for line in summary(conversion, file.name):
        typer.echo(line, err=True)
    todo = "".join(f"# needs a decision: {line}\n" for line in undecided_lines(conversion))
    document = tiny(conversion.document) if first_step else conversion.document
    text = todo + as_yaml(document)
    if output is None:
        typer.echo(text.encode(), nl=False)  # YAML is UTF-8, whatever the terminal shows
    else:
        if output.exists() and output.read_bytes() != text.encode() and not force:
            typer.echo(
                f"{output}: exists with other content, and is left as it is: name another file "
                "with -o, or overwrite it with --force",
                err=True,
            )
            raise typer.Exit(ConvertExit.REFUSED)
        output.write_text(text, encoding="utf-8")
        command = f"run -f {output} --in-process" if first_step else f"validate -f {output}"
        before = "fix the lines above first, then" if conversion.undecided else "next:"
        typer.echo(f"written: {output}; {before} `agenticrun {command}`", err=True)
    raise typer.Exit(exit_code(conversion))
