"""Every example of an environment trains a step, with few and short episodes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from example_runs import shrunk, train_a_step

NAMES = ("sokoban", "webshop", "gymnasium", "python-tool", "mixed")
"""Examples with folders have tests of their own."""


@pytest.mark.parametrize("name", NAMES)
async def test_the_example_trains(name: str, tmp_path: Path) -> None:
    await train_a_step(shrunk(f"{name}.yaml"), tmp_path)


async def test_a_mixture_of_experts_trains_and_its_engine_computes_the_same(tmp_path: Path) -> None:
    """A run whose engine computes another model than its trainer fails before the first step."""
    step = await train_a_step(shrunk("frozen-lake-moe.yaml"), tmp_path)
    assert 1 <= step["router/load_max_over_mean"] <= 8 / 2
    assert 0 < step["router/entropy"] <= math.log(8)
