"""The report of a conversion: the fate of each field of a ROLL configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


class Fate(StrEnum):
    """Outcome of a field, in the order of the report."""

    UNKNOWN = "unknown"
    """Not a field of ROLL, which silently ignores typos."""
    CANNOT = "cannot do yet"
    CHANGED = "means something else here"
    DROPPED = "dropped: without effect in ROLL, or not needed here"

    MAPPED = "mapped"


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the report."""

    fate: Fate
    field: str
    """Path in the ROLL file."""
    value: Any
    """Value in the file, or ROLL's default."""
    note: str
    """Our field, or the reason why there is none."""


def show(lines: Sequence[Line], console: Console) -> None:
    """Print one table per fate."""
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
    text = " ".join(str(value).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


@dataclass
class Notes:
    """Collector of the report lines that depend on several fields at once."""

    lines: list[Line] = field(default_factory=list)

    def mapped(self, name: str, value: Any, note: str) -> None:
        self.lines.append(Line(Fate.MAPPED, name, value, note))

    def changed(self, name: str, value: Any, note: str) -> None:
        self.lines.append(Line(Fate.CHANGED, name, value, note))

    def dropped(self, name: str, value: Any, note: str) -> None:
        self.lines.append(Line(Fate.DROPPED, name, value, note))

    def cannot(self, name: str, value: Any, note: str) -> None:
        self.lines.append(Line(Fate.CANNOT, name, value, note))
