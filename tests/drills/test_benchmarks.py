"""Each benchmark runs with `--quick`, and writes its figures: a smoke test, not a result."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HELPERS = {"record", "trend"}
ELSEWHERE = {"peers"}
"""tests/integration/local/test_peers.py: its other half needs TRL."""
NAMES = sorted({file.stem for file in BENCHMARKS.glob("*.py")} - HELPERS - ELSEWHERE)

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_and_writes_its_figures(name: str, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--json", str(record)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(record.read_text())["figures"]
    assert figures
    assert all(math.isfinite(value) for value in figures.values()), figures
