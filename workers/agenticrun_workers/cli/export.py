"""`agenticrun export`: write the policy of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agenticrun_api.names import ExitCode
from agenticrun_workers.cli.common import Changes, RunFile, give_up, load, look_in

Checkpoint = Annotated[
    str,
    typer.Option(
        "--checkpoint",
        help="Folder or URI of a checkpoint (step-N), or of all checkpoints of a run: "
        "then the newest one is used.",
    ),
]


def export(
    file: RunFile,
    checkpoint: Checkpoint,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Folder to write. It must be empty or not exist.",
            file_okay=False,
        ),
    ],
    push: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="OWNER/NAME",
            help="Also push the folder to this repository of the Hugging Face Hub, with HF_TOKEN.",
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="With --push: a new repository is public.")
    ] = False,
    changes: Changes = None,
) -> None:
    """Write the policy of a checkpoint as a Hugging Face folder: weights, config and tokenizer.

    AutoModelForCausalLM, vLLM and similar tools can load it. The command does not start Ray.
    Exit codes: 0 written, 1 the Hub does not take it, 2 the folder is not empty, 64 run or
    checkpoint cannot be used.
    """
    loaded = load(file, changes)
    if output.exists() and any(output.iterdir()):
        typer.echo(f"{output} is not empty: choose a new folder", err=True)
        raise typer.Exit(2)
    look_in(file.parent)
    from agenticrun_workers.driver.export import export_checkpoint
    from agenticrun_workers.errors import InvalidConfig
    from agenticrun_workers.models import hub

    try:
        if push:  # first, because an export of a large model takes minutes
            hub.create_repository(push, private=not public)
        step = export_checkpoint(loaded, checkpoint, output)
    except InvalidConfig as error:
        give_up(str(error))
    except hub.HubError as error:
        typer.echo(f"--push: {error}", err=True)
        raise typer.Exit(ExitCode.FAILED) from error
    typer.echo(f"{output}: the policy after {step} steps")
    if push:
        try:
            message = f"{loaded.metadata.name}: the policy after {step} steps"
            typer.echo(hub.push(output, push, message))
        except hub.HubError as error:
            typer.echo(
                f"--push: {error}\nThe folder is complete: try again with "
                f"`hf upload {push} {output}`",
                err=True,
            )
            raise typer.Exit(ExitCode.FAILED) from error
