"""Check docs/differences-from-roll.md.

It has a row for every deliberate difference, and each row names tests that exist.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROWS = dict(
    re.findall(
        r"^\| (C\d+) \|(.*)$", (ROOT / "docs/differences-from-roll.md").read_text(), re.MULTILINE
    )
)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_difference_has_a_row() -> None:
    assert sorted(ROWS, key=lambda name: int(name[1:])) == [f"C{number}" for number in range(1, 41)]


@pytest.mark.parametrize("name", ROWS)
def test_the_row_names_tests_that_exist(name: str) -> None:
    named = TEST.findall(ROWS[name])
    assert named
    missing = [
        f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / file).read_text()
    ]
    assert missing == []


def test_every_number_that_the_code_mentions_is_explained() -> None:
    sources = [*(ROOT / "workers").rglob("*.py"), *(ROOT / "tests/unit").rglob("*.py")]
    mentioned = {
        f"C{number}"
        for source in sources
        for number in re.findall(r"\(C(\d+)\)|[Dd]efect C(\d+)", source.read_text())
        for number in number
        if number
    }
    assert mentioned - ROWS.keys() == set()
