"""`agenticrun init`: a folder with an environment of one's own, its test, and a run."""

from __future__ import annotations

import builtins
import keyword
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from agenticrun_api.names import MAX_NAME_LENGTH
from agenticrun_workers.cli.common import give_up

TEMPLATE = Path(__file__).parent / "env-template"
"""A complete environment that is called treasure; it is tested as it is."""


def init(
    name: Annotated[
        str, typer.Argument(help="Name of the environment and its run, such as word-game.")
    ],
    folder: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder to make. It must be empty or not exist. Default: NAME.",
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Make a folder with a new environment, its test, and a run that trains on it.

    The environment works: test, check and train it before you write your own rules.
    Exit codes: 0 made, 2 the folder is not empty, 64 the name cannot be used.
    """
    module, run = name.replace("-", "_"), name.replace("_", "-")
    if (why := refusal(module, run)) is not None:
        give_up(f"{name!r} {why}: choose a name such as word-game")
    target = folder or Path(name)
    if target.exists() and any(target.iterdir()):
        typer.echo(f"{target} is not empty: choose a new folder with --output", err=True)
        raise typer.Exit(2)
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(TEMPLATE.iterdir()):
        if file.is_file():
            text = aligned(renamed(file.read_text(), module, run))
            (target / file.name.replace("treasure", module)).write_text(text)
    typer.echo(
        f"{target}: now try, in this folder\n"
        f"  pytest test_{module}.py    (if there is no pytest: pip install pytest)\n"
        f"  agenticrun check-env {module}:{class_name(module)}\n"
        f"  agenticrun debug -f agenticrun.yaml --policy human\n"
        f"  agenticrun run -f agenticrun.yaml\n"
        f"and write your own rules in {module}.py"
    )


def refusal(module: str, run: str) -> str | None:
    """Return why a name cannot be that of a module and of a run, or None."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", run):
        return "must be lower-case letters, digits and '-', and begin with a letter"
    if len(run) > MAX_NAME_LENGTH:
        return f"is longer than {MAX_NAME_LENGTH} characters"
    taken = {*sys.stdlib_module_names, *dir(builtins), "test", "tests"}
    if keyword.iskeyword(module) or module in taken:
        return "is a name of Python's own"
    return None


def class_name(module: str) -> str:
    """Return the name of the environment's class: WordGame for word_game."""
    return "".join(part.capitalize() for part in module.split("_"))


def renamed(text: str, module: str, run: str) -> str:
    """Return a file of the template for another environment. Prose keeps its treasure."""
    text = re.sub(r"\bTreasure\b", class_name(module), text)
    text = re.sub(r"\btreasure(?=:\w|\.py)|(?<=from )treasure\b|(?<=test_)treasure\b", module, text)
    return re.sub(r"(?<=configMap: )treasure\b|(?<=name: )treasure\b", run, text)


def aligned(text: str) -> str:
    """Return a run file with the explanations of the commands in its header in one column."""
    found = [re.fullmatch(r"(#   .*\S) +(\(.*\))", line) for line in text.splitlines()]
    width = max((len(line[1]) for line in found if line), default=0)
    return "".join(
        f"{command[1]:<{width}}  {command[2]}\n" if command else line
        for command, line in zip(found, text.splitlines(keepends=True), strict=True)
    )
