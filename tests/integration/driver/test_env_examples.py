"""Every example of an environment trains a step, with few and short episodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from example_runs import shrunk, train_a_step

NAMES = ("sokoban", "webshop", "gymnasium", "python-tool", "mixed")
"""Examples with folders have tests of their own."""


@pytest.mark.parametrize("name", NAMES)
async def test_the_example_trains(name: str, tmp_path: Path) -> None:
    await train_a_step(shrunk(f"{name}.yaml"), tmp_path)
