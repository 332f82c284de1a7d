"""Links between the pages lead somewhere, and the README knows every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/decisions/*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def _links(page: Path) -> list[tuple[str, str]]:
    """Targets and anchors, those in code left out."""
    return LINK.findall(re.sub(r"`[^`\n]*`", "", page.read_text()))


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_links_to_what_exists(page: Path) -> None:
    broken = []
    for target, anchor in _links(page):
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


def test_the_first_page_links_to_every_page() -> None:
    linked = {target for target, _ in _links(ROOT / "docs/index.md")} | {"index.md"}
    missing = [page.name for page in sorted(ROOT.glob("docs/*.md")) if page.name not in linked]
    assert missing == [], f"link {missing} in the table of docs/index.md"
