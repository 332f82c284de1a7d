"""Writes a benchmark's figures, and the machine and versions they were measured with."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def write_record(
    path: Path,
    figures: Mapping[str, float],
    machine: str = "",
    samples: Mapping[str, Any] | None = None,
) -> None:
    """Write `figures` as JSON, with the command, the machine and the date.

    Args:
        machine: what beside processor, threads, torch and load tells the machine apart.
        samples: what the figures were computed from, to plot.
    """
    threads = f"{torch.get_num_threads()} threads of torch {torch.__version__}"
    parts = [
        platform.machine(),
        f"{os.cpu_count()} cores",
        threads,
        f"load average {os.getloadavg()[0]:.1f}",
        *([machine] if machine else []),
    ]
    record = {
        "figures": dict(figures),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": ", ".join(parts),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    text = json.dumps(record, indent=2)
    if samples is not None:  # many short rows: one line
        text = f'{text[:-2]},\n  "samples": {json.dumps(samples)}\n}}'
    path.write_text(text + "\n")
