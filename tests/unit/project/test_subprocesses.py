"""Output of other programs may be any bytes, so no reader of it may insist on UTF-8."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHIPPED = [
    file.relative_to(ROOT).as_posix()
    for part in ("crds", "operator", "workers")
    for file in (ROOT / part).rglob("*.py")
    if "subprocess" in file.read_text()
]


@pytest.mark.parametrize("file", sorted(SHIPPED))
def test_output_that_is_not_utf_8_is_read(file: str) -> None:
    calls = [
        node
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.Call)
    ]
    words = [{keyword.arg for keyword in call.keywords} for call in calls]
    assert not [given for given in words if "text" in given and "errors" not in given], (
        "text=True needs errors='replace'"
    )
