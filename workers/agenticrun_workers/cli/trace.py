"""`agenticrun trace`: record what all processes of a run do in its next steps."""

from __future__ import annotations

import gzip
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from agenticrun_workers.cli.report import size_of
from agenticrun_workers.cli.source import (
    Context,
    Namespace,
    RunName,
    RunSource,
    open_run,
    or_give_up,
)

LAST_SECONDS = 90.0
"""Patience with a run that was asked to end its recording early."""


def trace(
    run: RunName,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Number of steps to record.")] = 3,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The file to write.", dir_okay=False),
    ] = Path("trace.json.gz"),
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Record the next steps of a run that trains, and write a trace for ui.perfetto.dev.

    The trace shows what driver, trainer ranks, engines and env workers do, and why they are idle.
    Ctrl-C ends the recording early; so does the end of the run. Both give what there is.
    Exit codes: 0 written, 64 there is no such run, or it does not train.
    """
    name = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    with or_give_up():
        source = open_run(run, namespace, context)
        source.ask_for_trace(name, steps)
        typer.echo(f"{run}: recording begins with the next step; Ctrl-C ends it early", err=True)
        content = wait_for_trace(source, name)
    output.write_bytes(content)
    typer.echo(f"{output}: {size_of(len(content))}; open it in ui.perfetto.dev")
    for line in summary_lines(_facts(content)):
        typer.echo(line)


def wait_for_trace(source: RunSource, name: str) -> bytes:
    """Return the trace. The first Ctrl-C ends the recording, the second one the command."""
    patience: float | None = None
    while True:
        try:
            content = source.trace(name)
            if content is not None:
                return content
            if patience is not None and time.monotonic() > patience:
                raise typer.Exit(1)
            time.sleep(source.trace_poll_seconds)
        except KeyboardInterrupt:
            if patience is not None:
                raise
            patience = time.monotonic() + LAST_SECONDS
            source.end_trace(name)


def _facts(content: bytes) -> dict[str, Any]:
    """Return what a trace says about itself."""
    facts: dict[str, Any] = json.loads(gzip.decompress(content))["otherData"]
    return facts


def summary_lines(facts: dict[str, Any]) -> list[str]:
    """Return what each kind of process did, as shares of its time, and what is missing."""
    first, steps = facts["first_step"], facts["whole_steps"]
    whole = f"{steps} whole step{'s' * (steps != 1)} from step {first}"
    lines = [f"recorded     {whole}, {facts['seconds']:.1f} s"]
    for kind, shares in facts["shares"].items():
        named = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
        lines.append(f"{kind:<12} {named}")
    if errors := facts["clock_error_ms"]:
        lines.append(f"clocks       within {max(errors.values()):.1f} ms of the driver's")
    return [*lines, *(f"incomplete   {note}" for note in facts["incomplete"])]
