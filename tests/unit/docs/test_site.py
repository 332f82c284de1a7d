"""The site has every page, shows the files that pages link to, and loads nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import outside_pages as site

ROOT = Path(__file__).parents[3]
CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages_of(navigation: Any) -> list[str]:
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for part in parts for page in pages_of(part)]


NAVIGATION = pages_of(CONFIG["nav"])


def test_every_page_of_docs_is_in_the_navigation_once() -> None:
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    missing = sorted(pages - set(NAVIGATION))
    assert missing == [], f"mkdocs.yml: put {missing} into the navigation, by purpose"
    assert len(NAVIGATION) == len(set(NAVIGATION))


def test_the_navigation_names_pages_that_exist() -> None:
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert sorted(set(NAVIGATION) - pages - site.outside_pages().keys()) == []


@pytest.mark.parametrize(
    ("source", "link", "moved"),
    [
        ("docs/sokoban.md", "../examples/sokoban.yaml", "repository/examples/sokoban.yaml.md"),
        ("docs/sokoban.md", "debug.md#config", "debug.md#config"),
        ("docs/sokoban.md", "../SECURITY.md", "repository/SECURITY.md"),
        ("docs/decisions/README.md", "../../ARCHITECTURE.md", "../repository/ARCHITECTURE.md"),
        ("docs/sokoban.md", "../examples/math", "repository/examples/math.md"),
        ("docs/sokoban.md", "../charts/agenticrun", "repository/charts/agenticrun/README.md"),
        ("ARCHITECTURE.md", "docs/glossary.md", "../glossary.md"),
        ("ARCHITECTURE.md", "docs/decisions", "../decisions/README.md"),
        ("charts/agenticrun/README.md", "../../docs/gpus.md", "../../../gpus.md"),
        ("docs/sokoban.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("docs/sokoban.md", "missing.md", "missing.md"),
    ],
)
def test_a_link_leads_to_the_page_of_the_site(source: str, link: str, moved: str) -> None:
    assert site.moved(f"See [it]({link}).", ROOT / source) == f"See [it]({moved})."


def test_a_picture_is_found_from_the_page_of_the_site() -> None:
    moved = site.moved("![a run](docs/images/report.png)", ROOT / "README.md")
    assert moved == "![a run](../images/report.png)"


def test_what_looks_like_a_link_in_code_stays() -> None:
    text = "`[a](../README.md)`\n\n```yaml\nb: [c](../README.md)\n```\n"
    assert site.moved(text, ROOT / "docs/cli.md") == text


def test_a_page_shows_a_file_or_all_text_files_of_a_folder() -> None:
    assert (ROOT / "examples/sokoban.yaml").read_text().strip() in site.page(
        ROOT / "examples/sokoban.yaml"
    )
    shown = re.findall(r"^## `(.*)`$", site.page(ROOT / "examples/judged"), re.MULTILINE)
    assert shown == ["agenticrun.yaml", "judged.py", "kustomization.yaml", "words.jsonl"]


@pytest.mark.parametrize(
    ("html", "loads"),
    [
        ('<script src="https://unpkg.com/shim"></script>', True),
        ("<link rel=stylesheet href=//fonts.example.org/a.css>", True),
        ('<img alt="x" src="http://example.org/a.png">', True),
        ('<a href="https://example.org">a link is fine</a><img src="images/a.png">', False),
    ],
)
def test_a_page_that_loads_from_another_host_is_noticed(html: str, loads: bool) -> None:
    assert bool(site.loaded_from_elsewhere(html)) is loads


def test_a_broken_link_is_an_error() -> None:
    built = re.findall(r"mkdocs build (.*)", (ROOT / "Makefile").read_text())
    assert built == ["--strict"], "--quiet hides warnings from --strict: broken links would pass"
    links = CONFIG["validation"]["links"]
    assert {links[kind] for kind in ("not_found", "anchors", "unrecognized_links")} == {"warn"}


def test_the_theme_loads_no_fonts() -> None:
    assert CONFIG["theme"]["font"] is False


CODE = re.compile(r"^(?:    |\t)(\S[^\n]*)$", re.MULTILINE)


def commands(page: str) -> list[str]:
    """The indented lines without comments and output. Blocks between ``` are no commands."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = CODE.findall(text.split("## What works today")[0])
    return [re.sub(r"\s{2,}#.*", "", line).rstrip(" \\") for line in lines]


def test_the_chinese_quick_start_has_the_commands_of_the_readme() -> None:
    assert commands("docs/quick-start.zh.md") == commands("README.md")
