"""Each threat of docs/security.md is tried by a test, or accepted in so many words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/security.md").read_text()
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> list[list[str]]:
    section = PAGE.split("## Threats\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]} {row[1]}"[:60])
def test_it_is_tried_or_accepted(row: list[str]) -> None:
    _, _, control, tried = row
    found = TEST.findall(tried)
    for file, name in found:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
    assert bool(found) is not (tried == "accepted")
    assert control.startswith("none") is (tried == "accepted")
