"""Every GPU example trains a step without GPUs; one keeps its real server."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from agenticrun_api import Outcome
from gpu_examples import FILES, read, without_gpus
from tiny_runs import InProcessAttempt, TinyAttempt

pytestmark = pytest.mark.usefixtures("ray_node")

WITH_SERVER = "colocated"
"""vLLM, which sleeps while the trainer computes. tests/integration/local trains with SGLang."""

ONE_RANK = ("vllm", "two-plus-two")
"""Need no Ray: an engine of their own and one rank. eight-plus-eight has two with that trainer."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
async def test_the_example_trains(file: Path, tmp_path: Path) -> None:
    make, ranks = (InProcessAttempt, 1) if file.stem in ONE_RANK else (TinyAttempt, 2)
    embedded = file.stem != WITH_SERVER
    run = without_gpus(read(file), embedded_engine=embedded, most_ranks=ranks)
    session = make(run, tmp_path)
    report = await asyncio.wait_for(session.execute(), 550)
    assert report.outcome is Outcome.SUCCEEDED, report.message
    (step,) = session.training_steps().values()
    assert math.isfinite(step["actor/pg_loss"])
    assert session.parity_gap() < 1e-3
    assert step["tokens/response"] > 0
    assert step["weight_sync/bytes"] > 0
