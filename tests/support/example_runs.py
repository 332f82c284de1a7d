"""Examples of environments, made so short that they train a step in seconds."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import yaml

from agenticrun_api import Outcome, parse_run
from tiny_runs import InProcessAttempt

EXAMPLES = Path(__file__).parents[2] / "examples"


def shrunk(name: str) -> dict[str, Any]:
    """Return an example with one group of two per tag, and a warm-up of one step.

    Args:
        name: the file below examples/.
    """
    document: dict[str, Any] = next(
        doc
        for doc in yaml.safe_load_all((EXAMPLES / name).read_text())
        if doc["kind"] == "AgenticRun"
    )
    spec = document["spec"]
    spec.pop("checkpoint", None)
    spec["roles"] = {}
    spec["tracking"] = {"tensorboard": False}
    pipeline = spec["pipeline"]
    tags = [env["tag"] for env in pipeline["envs"]]
    pipeline |= {"maxSteps": 1, "rolloutBatchSize": 2 * len(tags), "evalSteps": 0, "saveSteps": 0}
    pipeline["trainEnvs"] = {"groups": len(tags), "groupSize": 2, "tags": tags}
    if "warmup" in pipeline:
        pipeline["warmup"] |= {"steps": 1, "batchSize": 4}
    for field in ("valEnvs", "valBatchSize"):
        pipeline.pop(field, None)
    pipeline["actorTrain"]["training"].pop("miniBatchSize", None)
    for env in pipeline["envs"]:
        env["maxSteps"] = min(env.get("maxSteps", 10), 3)
    return document


async def train_a_step(document: dict[str, Any], folder: Path) -> dict[str, float]:
    """Train a run of one step. Return the step's metrics: no episode may have a fault."""
    session = InProcessAttempt(parse_run(document), folder)
    report = await asyncio.wait_for(session.execute(), 200)
    assert report.outcome is Outcome.SUCCEEDED, report.message
    (step,) = session.training_steps().values()
    assert math.isfinite(step["actor/pg_loss"])
    assert step["tokens/response"] > 0
    faults = {
        name: value for name, value in step.items() if name in ("stop/env_error", "stop/timeout")
    }
    assert not any(faults.values()), faults
    return step
