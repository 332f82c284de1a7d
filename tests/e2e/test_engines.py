"""Engines that are separate servers, with trainers that split the model or its states, in pods.

A drill: see `ENGINES`.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import yaml

from installation import ENGINES
from testcluster import ROOT, Cluster
from watching import Watch

EXAMPLE = ROOT / "examples" / "engines-and-trainers.yaml"
TRAINERS: dict[str, dict[str, Any]] = {
    "sglang": {"name": "megatron", "config": {"tensor_model_parallel_size": 2}},
    "vllm": {"name": "deepspeed", "config": {"zero_optimization": {"stage": 3}}},
}
LARGEST_GAP = 1e-3
"""Mean |trainer's - engine's log-prob| in float32."""


@pytest.mark.skipif(
    not ENGINES, reason="a drill that builds large images: AGENTICRUN_E2E_ENGINES=sglang,vllm"
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(3600, func_only=True)
def test_a_run_trains_with_the_image_of_its_engine(engine: str, runs: Cluster) -> None:
    document = next(
        doc for doc in yaml.safe_load_all(EXAMPLE.read_text()) if doc["kind"] == "AgenticRun"
    )
    document["metadata"]["name"] = name = f"with-{engine}"
    pipeline = document["spec"]["pipeline"]
    pipeline["actorInfer"]["strategy"] = {"name": engine}
    pipeline["actorTrain"]["strategy"] = TRAINERS[engine]
    began = time.monotonic()
    with Watch(runs, name) as watch:
        runs.apply(document)
        watch.wait(lambda seen: seen.step >= 1, 1200, "the run trains")
        images = {pod["spec"]["containers"][0]["image"] for pod in runs.list("pods")}
        end = watch.wait(lambda seen: seen.phase in ("Succeeded", "Failed"), 1200, "the run ends")
    assert end.phase == "Succeeded", end
    run = runs.get("agenticrun", name)
    assert run is not None
    found = {metric["name"]: float(metric["value"]) for metric in run["status"]["metrics"]}
    shown = ("rollout/score/mean", "engine/logprob_gap", "system/tps", "weight_sync/seconds")
    print(
        engine,
        TRAINERS[engine]["name"],
        f"{time.monotonic() - began:.0f} s",
        {key: found[key] for key in shown},
        sorted(images),
    )
    assert found["engine/logprob_gap"] < LARGEST_GAP
    assert any(f"worker-{engine}" in image for image in images), images
