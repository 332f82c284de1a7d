"""Cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agenticrun_workers.placement import usable_cores

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, CORES),
        ({"cpu.max": "max 100000\n"}, CORES),
        ({"cpu.max": "150000 100000\n"}, 1),
        ({"cpu.max": "20000 100000\n"}, 1),
        ({"cpu.max": "99900000 100000\n"}, CORES),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, CORES),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
    ids=["machine", "no limit", "one and a half", "a fifth", "more than there are", "v1", "v1 one"],
)
def test_a_cpu_limit_bounds_the_cores(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == expected
