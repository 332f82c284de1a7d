"""docs/troubleshooting.md explains every reason of a condition or an event."""

from __future__ import annotations

import re
from pathlib import Path

from agenticrun_api import Reason

PAGE = Path(__file__).parents[3] / "docs/troubleshooting.md"


def test_every_reason_is_in_troubleshooting() -> None:
    page = PAGE.read_text()
    missing = [reason for reason in Reason if not re.search(rf"\b{reason}\b", page)]
    assert missing == []
