"""The report of a conversion: one screen, or every field on request. And its exit codes."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agenticrun_workers.convert.converter import Conversion
from agenticrun_workers.convert.fields import TO_READ, Fate, Line, meant

WIDTH = 100
MOST_TYPOS = 4


class ConvertExit(IntEnum):
    """Exit codes of `agenticrun convert`."""

    READY = 0
    """The run can be applied as it is."""
    REFUSED = 2
    """The output file exists with other content, and nothing is written."""
    UNDECIDED = 3
    """The run is written, and some lines of it need a decision."""
    UNREADABLE = 64
    """The file is no configuration of ROLL, or parts of it are missing."""


def exit_code(conversion: Conversion) -> ConvertExit:
    """Return the exit code of a conversion."""
    return ConvertExit.UNDECIDED if conversion.undecided else ConvertExit.READY


def summary(conversion: Conversion, name: str) -> Iterator[str]:
    """Yield the lines of a short report: what needs a decision, and what means something else.

    Args:
        name: of the file, for the first line.
    """
    entries = list(_merged(conversion.undecided))
    count = len(entries)
    yield f"{name}: " + (
        f"{count} {'line needs' if count == 1 else 'lines need'} a decision" if count else "ready"
    )
    yield from _entries(entries)
    changed = list(_merged(_of(conversion, Fate.CHANGED)))
    if changed:
        yield f"{Fate.CHANGED} ({len(changed)}):"
        yield from _entries(changed)
    typos = [
        f"{line.field} ({meant(line)}?)" for line in _of(conversion, Fate.UNKNOWN) if meant(line)
    ]
    if typos:
        more = f" and {len(typos) - MOST_TYPOS} more" if len(typos) > MOST_TYPOS else ""
        yield f"probably mistyped, ignored by ROLL: {', '.join(typos[:MOST_TYPOS])}{more}"
    counts = Counter(line.fate for line in conversion.lines)
    rest = [f"{counts[fate]} {fate.short}" for fate in Fate if fate not in TO_READ]
    yield f"all other settings: {', '.join(rest)} (--details lists them)"


def undecided_lines(conversion: Conversion) -> Iterator[str]:
    """Yield one line for each field that needs a decision."""
    for field, value, note in _merged(conversion.undecided):
        yield f"{field}{f' ({value})' if value else ''}: {note}"


def _of(conversion: Conversion, fate: Fate) -> list[Line]:
    return [line for line in conversion.lines if line.fate is fate]


def _merged(lines: Sequence[Line]) -> Iterator[tuple[str, str, str]]:
    """Yield field, value and note of each note, with all fields that it is about in one."""
    fields: dict[str, list[Line]] = {}
    for line in lines:
        fields.setdefault(line.note, []).append(line)
    for note, same in fields.items():
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        yield f"{same[0].field}{more}", _short(same[0].value, 40), note


def _entries(entries: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    for field, value, note in entries:
        yield f"  {field}" + (f": {value}" if value else "")
        yield from textwrap.wrap(
            note, WIDTH, initial_indent="      ", subsequent_indent="      ", break_long_words=False
        )


def show_details(lines: Sequence[Line], console: Console) -> None:
    """Print one table per fate, with every field."""
    for fate in Fate:
        chosen = [line for line in lines if line.fate is fate]
        if not chosen:
            continue
        table = Table(title=f"{fate} ({len(chosen)})", title_justify="left", expand=True)
        table.add_column("ROLL field", overflow="fold", ratio=3)
        table.add_column("value", overflow="fold", ratio=2)
        table.add_column(
            "AgenticRun field" if fate is Fate.MAPPED else "what happens", overflow="fold", ratio=5
        )
        for line in chosen:
            table.add_row(Text(line.field), Text(_short(line.value)), Text(line.note))
        console.print(table)


def _short(value: Any, limit: int = 60) -> str:
    text = "" if value is None else " ".join(str(value).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
