"""docs/chat-formats.md is what its tool writes."""

from __future__ import annotations

from pathlib import Path

from docs.chat_formats import page


def test_the_page_is_up_to_date() -> None:
    written = (Path(__file__).parents[3] / "docs/chat-formats.md").read_text()
    assert written == page(), "run tools/docs/chat_formats.py"
