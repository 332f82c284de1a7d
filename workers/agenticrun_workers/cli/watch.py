"""`agenticrun watch`, `samples` and `logs`: look at a run while it trains, or afterwards."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from agenticrun_api import Role
from agenticrun_api.names import REPORTER_CONTAINER
from agenticrun_workers.cli.common import give_up
from agenticrun_workers.cli.kubectl import SourceError
from agenticrun_workers.cli.source import (
    ALL,
    Context,
    Namespace,
    Reading,
    RunName,
    RunSource,
    open_run,
    or_give_up,
)
from agenticrun_workers.reporting.display import draw
from agenticrun_workers.reporting.run_folder import Episode

STEPS = 500
"""Steps that the curves of `watch` show."""
ROLES = (*(role.value for role in Role), REPORTER_CONTAINER)


def watch(
    run: RunName,
    interval: Annotated[
        float, typer.Option(min=0.2, help="Seconds between two looks at the run.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print the run as it is now, and end.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Show a run while it trains: phase, progress, metrics, curves, step time, newest episode.

    It ends with the run; Ctrl-C ends it before, and the run continues.
    Exit codes: 0 done, 64 the run cannot be read.
    """
    source = open_run(run, namespace, context)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    with or_give_up():
        reading = source.read(steps=STEPS, samples=1)
    if once or not console.is_terminal:
        console.print(draw(reading.view()))
        return
    with Live(draw(reading.view()), console=console, auto_refresh=False) as live:
        try:
            _follow(source, reading, interval, live)
        # Ctrl-C ends the watching, not the run: it is no error.
        except KeyboardInterrupt:
            return


def _follow(source: RunSource, reading: Reading, interval: float, live: Live) -> None:
    shown = draw(reading.view())
    while not reading.finished:
        time.sleep(interval)
        try:
            reading = source.read(steps=STEPS, samples=1)
        except SourceError as error:  # a cluster that does not answer may answer again
            live.update(Group(shown, Text(str(error), "bold red")), refresh=True)
            continue
        shown = draw(reading.view())
        live.update(shown, refresh=True)


def samples(
    run: RunName,
    step: Annotated[
        int | None, typer.Option(min=0, help="Episodes of this step. Default: the newest ones.")
    ] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="Episodes of validations only.")
    ] = False,
    count: Annotated[
        int | None,
        typer.Option(
            "--count",
            "-c",
            min=1,
            help="Print at most this many episodes. Default: 1, or all with --list.",
        ),
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="One line per episode, without its turns.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Print sample episodes turn by turn, the newest last.

    Exit codes: 0 printed, 64 there are none.
    """
    limit = count or (ALL if listing else 1)
    with or_give_up():
        newest = limit == 1 and step is None and not validation
        # On a cluster, every file is copied from a pod first.
        files_read = 1 if newest else ALL
        reading = open_run(run, namespace, context).read(steps=0, samples=files_read)
    folder = reading.folder
    files = folder.sample_files()
    if step is not None:
        files = [file for file in files if file.stem in (f"step-{step}", f"step-{step}-val")]
    if validation:
        files = [file for file in files if file.stem.endswith("-val")]
    found: list[Episode] = []
    for file in reversed(files):
        if len(found) >= limit:
            break
        found = [*folder.episodes(file), *found]
    # Why they could not be read says more than that there are none.
    if not found and reading.missing:
        give_up("\n".join(reading.missing))
    if not found:
        steps = sorted({file.stem for file in folder.sample_files()})
        give_up(
            "there are no such samples; tracking.sampleLogs and pipeline.loggingSteps decide how "
            f"many are kept. There are: {', '.join(steps) or 'none'}"
        )
    # A pipe has no width, and the default of 80 breaks most lines.
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    for episode in found[-limit:]:
        _print_episode(console, episode, turns=not listing)


def _print_episode(console: Console, episode: Episode, *, turns: bool) -> None:
    kind = ", validation" if episode.validation else ""
    facts = ", ".join(f"{name} {value}" for name, value in episode.facts.items())
    title = f"step {episode.step}{kind}: {facts}"
    if not turns:
        console.print(title, markup=False, soft_wrap=True)
        return
    parts = []
    for name, text in episode.parts:
        style = {"answer": "green", "end:": "bold"}.get(name.split()[0], "")
        parts += [Text(name, "dim"), *([Text(text, style)] if text else [])]
    console.print(Panel(Group(*parts), title=Text(title), title_align="left"))
    if episode.picture:
        console.print(f"frames: {episode.picture}", markup=False, soft_wrap=True)


def logs(
    run: RunName,
    role: Annotated[str, typer.Option(help=f"One of {', '.join(ROLES)}.")] = Role.DRIVER.value,
    lines: Annotated[
        int, typer.Option("--lines", min=0, help="Number of lines from the end of each log.")
    ] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines as they come, until Ctrl-C.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Print the logs of a role: the driver's, or those of all pods of a role.

    Exit codes: 0 printed, 1 a log could not be read, 64 there is none.
    """
    if role not in ROLES:
        raise typer.BadParameter(f"--role is one of {', '.join(ROLES)}, not {role!r}")
    with or_give_up():
        open_run(run, namespace, context).logs(role, lines=lines, follow=follow)
