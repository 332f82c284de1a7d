"""Same seed, same episode: on any machine, in any process and in every release.

Hashes of levels and whole episodes are committed.

A change here changes what a seed means, so runs cannot be compared with older ones. If that is
wanted, run the command in `REWRITE`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agenticrun_workers.envs import StepResult, make_env
from agenticrun_workers.types import Stream

REWRITE = (
    "if this change is wanted: "
    "python tests/unit/envs/test_golden.py > tests/data/golden/grid_worlds.json"
)
GOLDEN = Path(__file__).parents[2] / "data/golden/grid_worlds.json"

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "frozen_lake": ("frozen_lake", {}),
    "frozen_lake slippery": ("frozen_lake", {"isSlippery": True}),
    "frozen_lake 8x8": (
        "frozen_lake",
        {"size": 8, "isSlippery": True, "frozenProbability": 0.7, "holdoutShare": 0.5},
    ),
    "frozen_lake other words": (
        "frozen_lake",
        {"size": 3, "symbols": "@.#$x!", "actions": ["w", "s", "e", "n"]},
    ),
    "sokoban": ("sokoban", {}),
    "sokoban 7x8, 2 boxes": ("sokoban", {"rows": 7, "columns": 8, "boxes": 2, "holdoutShare": 0.5}),
    "sokoban 9x9, 2 boxes, shallow": (
        "sokoban",
        {"rows": 9, "columns": 9, "boxes": 2, "searchDepth": 20, "walkSteps": 15},
    ),
    "sokoban other words": (
        "sokoban",
        {"rows": 5, "columns": 6, "symbols": "W.t*b@+", "actions": ["n", "s", "w", "e"]},
    ),
}


def fingerprint(type: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Hash 40 levels of each split, and on each an episode of 30 steps, 4 of 5 of them valid."""
    env: Any = make_env(type, config)
    levels, episodes = hashlib.sha256(), hashlib.sha256()
    for split in (Stream.TRAIN, Stream.VALIDATION):
        for seed in [*range(20), *(2**63 - 1 - 7919 * number for number in range(20))]:
            board = env.reset(seed, split)
            levels.update(f"{split} {seed}\n{board}\n".encode())
            for step in range(30):
                choice = (seed + step * (step + 1) // 2) % 5
                episodes.update(_line(env.step((*env.actions, "jump")[choice])))
    return {"levels": levels.hexdigest(), "episodes": episodes.hexdigest()}


def _line(result: StepResult) -> bytes:
    metrics = sorted(result.metrics.items())
    return f"{result.observation} {result.reward!r} {result.terminated} {metrics}\n".encode()


@pytest.mark.parametrize("name", CONFIGS)
def test_levels_and_episodes_are_those_of_every_other_machine(name: str) -> None:
    assert fingerprint(*CONFIGS[name]) == json.loads(GOLDEN.read_text())[name], REWRITE


def test_a_process_with_other_string_hashes_plays_the_same_episodes() -> None:
    """ROLL draws levels from Python's hash of a string, which differs between processes."""
    command = [sys.executable, __file__]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONHASHSEED": "4321"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(GOLDEN.read_text()), REWRITE


if __name__ == "__main__":
    print(json.dumps({name: fingerprint(*choice) for name, choice in CONFIGS.items()}, indent=2))
