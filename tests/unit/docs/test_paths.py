"""Files and folders that the pages name exist, so that a rename is noticed here."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from functools import cache
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("charts/*/*.md")])
CODE = re.compile(r"`([^`\s]+)`")

USERS_OWN = {"my_envs.py", "my_agent.py"}
"""Files that a reader writes."""


@cache
def files() -> frozenset[str]:
    """The repository's files and folders, as git knows them; those not committed yet, too."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    found = {Path(name) for name in listed if name and (ROOT / name).exists()}
    return frozenset(str(path) for file in found for path in (file, *file.parents[:-1]))


def alternatives(name: str) -> list[str]:
    """`a/{b,c}.py` is a/b.py and a/c.py."""
    parts = re.split(r"\{([^{}]*)\}", name)
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def is_path(name: str) -> bool:
    """A Python file, or something below one of the repository's top folders."""
    top = {file.partition("/")[0] for file in files() if "/" in file}
    return name.endswith(".py") or (name.partition("/")[0] in top and "/" in name.rstrip("/"))


def exists(name: str) -> bool:
    """True for a path from the root, and for a Python file's name or the end of its path."""
    wanted = name.removeprefix("./").rstrip("/")
    return wanted in files() or any(
        fnmatch(file, wanted) or (name.endswith(".py") and fnmatch(file, f"*/{wanted}"))
        for file in files()
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_the_page_names_exists(page: Path) -> None:
    named = {
        name
        for found in CODE.findall(page.read_text())
        if re.fullmatch(r"[\w.{},*/-]+", found) and is_path(found)
        for name in alternatives(found)
    }
    assert sorted(name for name in named - USERS_OWN if not exists(name)) == []
