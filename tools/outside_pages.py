"""Pages of the site for the files outside docs/ that the documentation links to.

The site has to work without network and without the repository. So a link such as
../examples/sokoban.yaml leads to a page of the site that shows this file, a link to a folder to a
page with all of its files, and a link to a Markdown file, such as ARCHITECTURE.md, to a page made
of it. The links between these files are followed as well.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTSIDE = "repository"
"""Folder of the site for files outside docs/."""

LINK = re.compile(r"(\[[^\]]*\]\()(?!\w+:|#)([^)#\s]+)((?:#[^)\s]+)?\))")
CODE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".jsonl": "json"}
ELSEWHERE = re.compile(
    r"<(?:script|img|iframe|source|link)\b[^>]*?(?:src|href)=[\"']?(https?:|//)[^>]*>"
)
GENERATED = {"__pycache__"}


def address(path: Path) -> str:
    """Return where the site has a file of the repository, relative to the top of the site."""
    path = path / "README.md" if (path / "README.md").exists() else path
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    inside = f"{OUTSIDE}/{path.relative_to(ROOT).as_posix()}"
    return inside if path.suffix == ".md" else f"{inside}.md"


def without_code(text: str) -> str:
    """Return the text with code as blanks: what looks like a link there is none."""
    return CODE.sub(lambda found: " " * len(found[0]), text)


def links(text: str, source: Path) -> Iterator[tuple[re.Match[str], Path]]:
    """Yield each link to another file that exists, with that file."""
    for found in LINK.finditer(without_code(text)):
        target = (source.parent / found[2]).resolve()
        if target.exists() and target.is_relative_to(ROOT):
            yield found, target


def moved(text: str, source: Path) -> str:
    """Return the Markdown of a file with its links as they are in the site."""
    here = os.path.dirname(address(source))
    parts, end = [], 0
    for found, target in links(text, source):
        parts += [text[end : found.start(2)], os.path.relpath(address(target), here or ".")]
        end = found.end(2)
    return "".join([*parts, text[end:]])


def files_of(path: Path) -> list[Path]:
    """Return the file, or all files of a folder that are text and not hidden."""
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    return [
        file
        for file in found
        if file.is_file()
        and not any(part.startswith(".") or part in GENERATED for part in file.parts)
        and b"\0" not in file.read_bytes()
    ]


def page(path: Path) -> str:
    """Return a page about a file or folder outside docs/."""
    if path.suffix == ".md":
        return moved(path.read_text(), path)
    parts = ["---\nsearch:\n  exclude: true\n---\n", f"# `{path.relative_to(ROOT)}`\n"]
    for file in files_of(path):
        if path.is_dir():
            parts.append(f"## `{file.relative_to(path)}`\n")
        language = LANGUAGES.get(file.suffix, "text")
        parts.append(f"``````{language}\n{file.read_text().rstrip()}\n``````\n")
    return "\n".join(parts)


def outside_pages() -> dict[str, str]:
    """Return address and text of every page outside docs/ that a page of the site links to."""
    pages: dict[str, str] = {}
    waiting = sorted(DOCS.rglob("*.md"))
    while waiting:
        source = waiting.pop()
        for _, target in links(source.read_text(), source):
            if target.is_relative_to(DOCS) or address(target) in pages:
                continue
            shown = target / "README.md" if (target / "README.md").exists() else target
            pages[address(shown)] = page(shown)
            if shown.suffix == ".md":
                waiting.append(shown)
    return pages


def loaded_from_elsewhere(html: str) -> str:
    """Return the first tag with which the page loads something from another host, or nothing."""
    found = ELSEWHERE.search(html)
    return found[0] if found else ""
