"""The tables of ARCHITECTURE.md: each name is defined in a file of its row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("workers/agenticrun_workers", "operator/agenticrun_operator")


def rows() -> list[tuple[Path, str]]:
    """Return file and name of every row of both tables."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text[text.index("## Reading paths") : text.index("## The maths")]
    tables = section.split("**From ")[1:]
    found = []
    for folder, table in zip(FOLDERS, tables, strict=True):
        for file, names in re.findall(r"^\| `([\w/]+\.py)` \| ([^|]+) \|", table, re.MULTILINE):
            found += [(ROOT / folder / file, name) for name in re.findall(r"`(\w+)`", names)]
    return found


@pytest.mark.parametrize(("file", "name"), rows(), ids=lambda part: getattr(part, "name", part))
def test_a_name_to_know_is_defined_in_its_file(file: Path, name: str) -> None:
    defined = {
        node.name
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert name in defined, f"ARCHITECTURE.md: {name} is not defined in {file.name}"


def answers() -> list[tuple[list[Path], str]]:
    """Return the files and one name of every row of "Where is ...?"."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text[text.index("## Where is ...?") : text.index("## Reading paths")]
    found = []
    for files, names in re.findall(r"^\| .+\? \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE):
        paths = [
            ROOT / folder / file
            for file in re.findall(r"`(\S+)`", files)
            for folder in (*FOLDERS, "")
            if (ROOT / folder / file).exists()
        ]
        found += [(paths, name) for name in re.findall(r"`([\w.]+)`", names)]
    return found


def defined_in(file: Path) -> set[str]:
    """Return classes, functions and methods of a file."""
    body = ast.parse(file.read_text()).body
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    names = {node.name for node in body if isinstance(node, kinds)}
    return names | {
        f"{owner.name}.{node.name}"
        for owner in body
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, kinds)
    }


@pytest.mark.parametrize(
    ("files", "name"), answers(), ids=lambda part: part if isinstance(part, str) else ""
)
def test_a_question_is_answered_in_the_files_of_its_row(files: list[Path], name: str) -> None:
    assert 1 <= len(files) <= 2
    assert any(name in defined_in(file) for file in files), f"ARCHITECTURE.md: no {name} in {files}"


def test_at_least_ten_questions_are_answered() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text[text.index("## Where is ...?") : text.index("## Reading paths")]
    assert section.count("? | `") >= 10
    assert len({tuple(files) for files, _ in answers()}) == section.count("? | `")
