"""The reading paths of ARCHITECTURE.md: each name is defined in the file of its row."""

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
