"""`agenticrun export`: a checkpoint's policy as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agenticrun_workers.cli.common import Changes, RunFile, give_up, load, look_in

Checkpoint = Annotated[
    str,
    typer.Option(
        "--checkpoint",
        help="Folder or URI of a checkpoint (step-N), or of a run's checkpoints: then the newest one.",
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
            help="Folder to write; it must not hold anything yet.",
            file_okay=False,
        ),
    ],
    changes: Changes = None,
) -> None:
    """Write weights, config and tokenizer of a checkpoint's policy, for AutoModelForCausalLM, vLLM and the like. Needs no Ray."""
    loaded = load(file, changes)
    if output.exists() and any(output.iterdir()):
        typer.echo(f"{output} holds files already: name a new folder", err=True)
        raise typer.Exit(2)
    look_in(file.parent)
    from agenticrun_workers.driver.export import export_checkpoint
    from agenticrun_workers.errors import InvalidConfig

    try:
        step = export_checkpoint(loaded, checkpoint, output)
    except InvalidConfig as error:
        give_up(str(error))
    typer.echo(f"{output}: the policy after {step} steps")
