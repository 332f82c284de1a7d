"""The pages of the documentation, and the commands and blocks on them."""

from __future__ import annotations

import itertools
import re
import shlex
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("charts/*/*.md")])
PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^(?: {4,}\S[^\n]*)?\n)+", re.MULTILINE)
CODE_BLOCK = re.compile(r"(?<=\n\n)(?:^ {4,}\S[^\n]*\n)+", re.MULTILINE)
"""A block without a fence: indented lines below an empty one."""
PROGRAMS = ("agenticrun", "kubectl", "helm", "make")
SHELLS = ("console", "bash", "sh", "")


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for _, language, text in FENCED.findall(page.read_text()) if language in languages]


def indented_yaml(page: Path) -> list[str]:
    """YAML without a fence: indented blocks that begin with a key."""
    found = [textwrap.dedent(part) for part in INDENTED.findall(FENCED.sub("", page.read_text()))]
    return [text for text in found if re.match(r"\s*[a-zA-Z]+:(\s|$)", text)]


def commands(text: str) -> Iterator[list[str]]:
    """The command lines of a page's blocks and inline code, as words."""
    fenced = [block for _, language, block in FENCED.findall(text) if language in SHELLS]
    plain = FENCED.sub("", text)
    inline = re.findall(rf"`((?:{'|'.join(PROGRAMS)}) [^`]+)`", plain)
    for part in [*fenced, *INDENTED.findall(plain), *inline]:
        for line in re.sub(r"\\\n\s*", " ", part).splitlines():
            yield from commands_of(line.strip().removeprefix("$ "))


def commands_of(line: str) -> Iterator[list[str]]:
    if line.split(" ", maxsplit=1)[0] not in PROGRAMS:
        return
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return  # prose with an apostrophe
    separators = [-1, *(n for n, word in enumerate(words) if word in ("&&", "|", ">")), len(words)]
    for before, after in pairwise(separators):
        if words[before + 1] in PROGRAMS:
            yield words[before + 1 : after]


def shell_lines(page: Path) -> Iterator[str]:
    """Yield every command line of a page: of fenced blocks, and of indented ones that are shell.

    `console` blocks have output between the lines with a prompt. Scripts (`bash`, `sh`) are not
    among them: `bash -n` reads them whole.
    """
    text = re.sub(r"\\\n\s*", " ", page.read_text())
    for _, language, block in FENCED.findall(text):
        if language == "console":
            yield from with_prompt(block)
    for block in CODE_BLOCK.findall(FENCED.sub("", text)):
        lines = textwrap.dedent(block).splitlines()
        if is_shell(lines[0]):
            prompted = [*with_prompt("\n".join(lines))]
            yield from prompted or [line for line in lines if not line.startswith(("#", " "))]


def with_prompt(block: str) -> Iterator[str]:
    for line in block.splitlines():
        if line.startswith("$ "):
            yield line.removeprefix("$ ")


NO_SHELL = re.compile(r"[-#]? ?[A-Za-z]+:(\s|$)|sum by |\S+ = ")
"""Beginnings of indented blocks of YAML, PromQL and formulas."""


def is_shell(line: str) -> bool:
    return not NO_SHELL.match(line)


def simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the commands of a line as words, without variables that are set before them.

    Of `NAME=$(command)` and `eval "$(command)"`, it is the inner command.
    """
    line = re.sub(r'^(?:\w+=|eval )"?\$\(([^)]*)\)"?', r"\1", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if re.fullmatch(r"&&|\|\|?|;", word):
            command = [*itertools.dropwhile(re.compile(r"\w+=").match, words)]
            if command:
                yield command
            words = []
        else:
            words.append(word)
