"""Our commands on the pages: the real parser takes them, and cheap ones run.

`test_blocks.py` checks that commands and options of every program exist.
"""

from __future__ import annotations

import contextlib
import re
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from agenticrun_api.overrides import load_run_with
from agenticrun_workers.cli import app
from pages import PAGES, ROOT, commands

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""Typer has a copy of click, whose names are private."""
COMMANDS = getattr(typer.main.get_command(app), "commands", {})
CHEAP = ("init", "validate")
"""Commands that take a second, and write to the current folder only."""

LINES = sorted(
    {
        tuple(words[1:])
        for page in PAGES
        for words in commands(page.read_text())
        if words[0] == "agenticrun" and len(words) > 2 and "..." not in words
    }
)
"""Whole command lines, with arguments; the pages name commands without any in their text."""

each_line = pytest.mark.parametrize("words", LINES, ids=lambda words: " ".join(words)[:70])


def refused(words: tuple[str, ...]) -> str:
    """Return what the parser refuses in a command line, or nothing; files need not exist."""
    try:
        COMMANDS[words[0]].make_context(words[0], list(words[1:]))
    except USAGE_ERROR as error:
        message = error.format_message()  # type: ignore[attr-defined]
        return "" if "does not exist" in message else message
    except typer.Exit:  # --help
        return ""
    return ""


@each_line
def test_the_parser_takes_it(words: tuple[str, ...]) -> None:
    named = all(word.startswith("-") for word in words[1:])  # `agenticrun eval --checkpoint`
    assert named or refused(words) == ""


@each_line
def test_examples_that_it_names_exist_and_take_what_it_sets(words: tuple[str, ...]) -> None:
    files = [ROOT / word for word in words if re.fullmatch(r"examples/\S+\.yaml", word)]
    changes = [value for option, value in pairwise(words) if option == "--set"]
    for file in files:
        load_run_with(file, [value for value in changes if not value.endswith("=...")], local=True)


@pytest.mark.parametrize(
    "words",
    [
        words
        for words in LINES
        if words[0] in CHEAP
        and "NAME" not in words
        and all((ROOT / word).exists() for word in words if word.endswith(".yaml"))
    ],
    ids=" ".join,
)
def test_a_cheap_command_runs(words: tuple[str, ...], tmp_path: Path) -> None:
    absolute = [str(ROOT / word) if (ROOT / word).is_file() else word for word in words]
    with contextlib.chdir(tmp_path):
        result = CliRunner().invoke(app, absolute)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "line",
    ["run -o folder", "run -f run.yaml --in-proces", "watch lake extra", "samples a --step one"],
)
def test_what_the_parser_refuses_is_noticed(line: str) -> None:
    assert refused(tuple(line.split())) != ""


def test_commands_are_found() -> None:
    assert len(LINES) > 30
