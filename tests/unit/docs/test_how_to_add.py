"""The diffs of docs/how-to-add.md consist of lines that are in the files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DIFF = re.compile(r"^```diff\n\+\+\+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIFFS = DIFF.findall((ROOT / "docs/how-to-add.md").read_text())


def one_line(text: str) -> str:
    """The text however it is wrapped."""
    return re.sub(r"\s+", " ", text).strip()


@pytest.mark.parametrize(("path", "lines"), DIFFS)
def test_the_lines_are_in_the_file(path: str, lines: str) -> None:
    added = "".join(line.removeprefix("+") for line in lines.splitlines(keepends=True))
    assert one_line(added) in one_line((ROOT / path).read_text())


def test_every_diff_of_the_page_is_read() -> None:
    assert len(DIFFS) == (ROOT / "docs/how-to-add.md").read_text().count("```diff")
    assert all(line.startswith("+") for _, lines in DIFFS for line in lines.splitlines())
