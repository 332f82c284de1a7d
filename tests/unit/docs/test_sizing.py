"""The tables of sizing.md and storage.md are those that `agenticrun plan` computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import sizing

SIZING = (sizing.DOCS / "sizing.md").read_text()


@pytest.mark.parametrize("page", sizing.PAGES, ids=lambda page: page.name)
def test_the_committed_tables_are_what_the_tool_writes(page: Path) -> None:
    assert page.read_text() == sizing.written(page.read_text()), "run: make generate"


def test_every_table_is_on_a_page_and_has_every_model() -> None:
    text = "".join(page.read_text() for page in sizing.PAGES)
    assert set(re.findall(r"<!-- table: (\w+) -->", text)) == set(sizing.TABLES)
    assert all(text.count(f"| {name} |") == len(sizing.TABLES) for name in sizing.NAMES.values())


def test_numbers_of_the_text_are_those_of_the_tool() -> None:
    assert f"micro-batches of {sizing.TOKENS:,} tokens" in SIZING
    assert f"{sizing.LENGTH} tokens each" in SIZING
