"""`agenticrun check-env`: test an environment against the environment protocol."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agenticrun_api.yaml_text import read_yaml
from agenticrun_workers.cli.common import Changes, Seeds, StepTimeout, give_up, load, look_in
from agenticrun_workers.findings import Report

COLOURS = {"ok": "green", "warning": "yellow", "FAILED": "bold red", "-": "dim"}


def check_env(
    env: Annotated[
        str | None, typer.Argument(help="Name of a registered environment, or module:Class.")
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            "-c",
            metavar="KEY=VALUE",
            help="Set a config key of the environment; values are YAML. Repeatable.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="Check an environment of this run instead.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    tag: Annotated[
        str | None, typer.Option(help="Environment of the run, by its tag. Default: the first one.")
    ] = None,
    seeds: Seeds = 20,
    turns: Annotated[
        int, typer.Option(min=1, max=10_000, help="Maximum number of turns per episode.")
    ] = 20,
    timeout: StepTimeout = 10.0,
    changes: Changes = None,
) -> None:
    """Check an environment: seeds, processes, threads, types, odd answers, hangs, images, speed.

    Exit codes: 0 no check failed, 1 a check failed, 64 the environment cannot be built.
    """
    if (env is None) == (file is None):
        raise typer.BadParameter("name an environment, or a run with --file")
    look_in(file.parent if file else Path())
    from agenticrun_workers.envs.checking import check_env as checked
    from agenticrun_workers.plugins import PluginError

    items: list[Any] = []
    chosen: dict[str, Any] = {}
    if file is not None:
        name, chosen, items = _of_run(file, tag, changes, seeds)
    else:
        name = str(env)
    for pair in config or ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"--config takes KEY=VALUE, not {pair!r}")
        try:
            chosen[key] = read_yaml(value)
        except yaml.YAMLError as error:
            raise typer.BadParameter(f"--config {key}: {value!r} is not YAML: {error}") from error
    try:
        report = checked(name, chosen, seeds=seeds, items=items, turns=turns, timeout=timeout)
    except PluginError as error:
        give_up(str(error))
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table(report, name))
    raise typer.Exit(int(report.failed))


def table(report: Report, name: str) -> Table:
    """Return a table with one row per check: verdict, finding and, below it, advice."""
    shown = Table(title=Text(name), title_justify="left")
    for column in ("check", "", "found"):
        shown.add_column(column)
    for check, finding in report.findings.items():
        found = Text(finding.found)
        if finding.advice:
            found.append(f"\n{finding.advice}", style="italic")
        shown.add_row(check, Text(finding.verdict, style=COLOURS[finding.verdict]), found)
    return shown


def _of_run(
    file: Path, tag: str | None, changes: list[str] | None, count: int
) -> tuple[str, dict[str, Any], list[Any]]:
    """Return type, config and `count` data set items of an environment of a run."""
    pipeline = load(file, changes).spec.pipeline
    tags = [spec.tag for spec in pipeline.envs]
    if tag is not None and tag not in tags:
        give_up(f"{file} has no environment {tag!r}; it has {', '.join(tags)}")
    spec = pipeline.env(tag or tags[0])
    if spec.dataset is None:
        return spec.type, dict(spec.config), []
    from agenticrun_workers.errors import InvalidConfig
    from agenticrun_workers.rollout.datasets import EpisodeItems
    from agenticrun_workers.types import Stream

    try:
        items = EpisodeItems(pipeline)
    except InvalidConfig as error:
        give_up(str(error))
    return (
        spec.type,
        dict(spec.config),
        [items.of(spec.tag, Stream.TRAIN, group) for group in range(count)],
    )
