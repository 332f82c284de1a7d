"""Lines that depend on several fields at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agenticrun_workers.convert.report import Fate, Line


@dataclass
class Notes:
    """Collects them."""

    lines: list[Line] = field(default_factory=list)

    def mapped(self, name: str, value: Any, note: str) -> None:
        self.lines.append(Line(Fate.MAPPED, name, value, note))

    def changed(self, name: str, value: Any, note: str) -> None:
        self.lines.append(Line(Fate.CHANGED, name, value, note))

    def dropped(self, name: str, value: Any, note: str) -> None:
        self.lines.append(Line(Fate.DROPPED, name, value, note))

    def cannot(self, name: str, value: Any, note: str) -> None:
        self.lines.append(Line(Fate.CANNOT, name, value, note))
