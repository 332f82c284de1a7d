"""The metrics of a run without those of the machine: equal runs have equal curves."""

from __future__ import annotations

import json
from pathlib import Path

WALL_CLOCK = (
    "time",
    "system/tps",
    "checkpoint/seconds",
    "weight_sync/seconds",
    "weight_sync/pause_seconds",
    "train/tokens_per_second",
    "engine/engine-",
    "rollout/utilization",
    "rollout/engine_busy",
    "rollout/idle/",
    "rollout/kv_usage",
    "train/idle/",
)
"""Metrics that are about the machine and not about the run."""

Curve = dict[tuple[int, bool], dict[str, float]]
"""Metrics by step and whether they are a validation's."""


def read_curve(folder: Path) -> Curve:
    """Return the metrics that a run has written to its output folder."""
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        (line["step"], "system/tps" not in line): {
            name: value for name, value in line.items() if not name.startswith(WALL_CLOCK)
        }
        for line in lines
        if "engine/parity_gap" not in line  # once per attempt
    }
