"""Every algorithm's example trains; separate reference and critic pods do on a real Ray."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from agenticrun_api import Outcome, parse_run
from tiny_runs import InProcessAttempt, TinyAttempt, tiny_document

EXAMPLES = sorted((Path(__file__).parents[3] / "examples/algorithms").glob("*.yaml"))
OWN = Path(__file__).parents[3] / "examples/own-algorithm/agenticrun.yaml"
SMALL_MODEL = {"hiddenSize": 16, "layers": 1, "heads": 2, "intermediateSize": 32}
WALL_CLOCK = (
    "time",
    "system/",
    "checkpoint/seconds",
    "weight_sync/",
    "engine/",
    "rollout/utilization",
    "rollout/engine_busy",
    "rollout/idle/",
    "rollout/kv_usage",
    "rollout/idle",
    "train/tokens_per_second",
)
"""Metrics that are about the machine."""


async def train(session: TinyAttempt) -> dict[int, dict[str, float]]:
    report = await asyncio.wait_for(session.execute(), 300)
    assert report.outcome is Outcome.SUCCEEDED, report.message
    return session.training_steps()


@pytest.mark.parametrize(
    "file", [*EXAMPLES, OWN], ids=lambda file: f"{file.parent.name}-{file.stem}"
)
async def test_the_example_trains(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(file.parent))
    document = yaml.safe_load(file.read_text())
    document["spec"] |= {"model": {"initialize": SMALL_MODEL}, "roles": {}}
    pipeline = document["spec"]["pipeline"]
    pipeline |= {"maxSteps": 2, "rolloutBatchSize": 16, "valBatchSize": 8, "evalSteps": 2}
    pipeline["warmup"]["steps"] = 2
    pipeline["trainEnvs"] |= {"groups": 2}
    pipeline["valEnvs"] |= {"groups": 8}
    if "criticWarmup" in pipeline:
        pipeline["criticWarmup"] = 1
    steps = await train(InProcessAttempt(parse_run(document), tmp_path))
    assert sorted(steps) == [1, 2]
    assert all(math.isfinite(value) for value in steps[2].values() if isinstance(value, float))
    assert {"actor/pg_loss", "actor/grad_norm", "critic/advantages/mean"} <= steps[2].keys()
    assert ("actor/pg_loss" in steps[1]) is ("criticWarmup" not in pipeline)


def penalised(roles: dict[str, Any]) -> dict[str, Any]:
    """PPO with every model there is, and a KL penalty in the reward and in the loss."""
    algorithm = {
        "name": "gae",
        "whitenAdvantages": True,
        "ppoEpochs": 2,
        "rewardKl": {"kind": "k3", "coef": 0.1, "targetKl": 0.01, "horizon": 64},
        "lossKl": {"coef": 0.01},
    }
    correction = {
        "isWeight": {},
        "filters": [{"level": "geometric", "ratioLow": 0.5, "ratioHigh": 2}],
    }
    document = tiny_document(
        algorithm=algorithm,
        critic={"training": {"learningRate": 0.01}, "valueClip": 0.5},
        trainInferCorrection=correction,
    )
    document["spec"]["roles"] = roles
    return document


@pytest.mark.usefixtures("ray_node")
async def test_reference_and_critic_on_pods_of_their_own_train_as_they_do_beside_the_trainer(
    tmp_path: Path,
) -> None:
    separate = penalised({"reference": {}, "critic": {"replicas": 2}})
    shared = await train(InProcessAttempt(parse_run(penalised({})), tmp_path / "shared"))
    apart = await train(TinyAttempt(parse_run(separate), tmp_path / "apart"))
    for step, expected in shared.items():
        names = [name for name in expected if not name.startswith((*WALL_CLOCK, "train/"))]
        assert {n: apart[step][n] for n in names} == pytest.approx(
            {n: expected[n] for n in names}, rel=1e-3, abs=1e-5
        ), step
    assert shared[3]["critic/kl_coef"] != shared[1]["critic/kl_coef"]
