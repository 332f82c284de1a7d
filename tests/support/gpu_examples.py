"""examples/gpu without GPUs: the same YAML with a tiny model and one small step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from agenticrun_api import AgenticRun, parse_run

FILES = sorted((Path(__file__).parents[2] / "examples/gpu").glob("*.yaml"))

TINY = {"architecture": "llama", "hiddenSize": 64, "layers": 2, "heads": 2, "intermediateSize": 64}
"""Heads of 32: vLLM's attention for CPUs takes no smaller ones."""
ABOUT_GPUS = frozenset(
    {"tp_size", "tensor_parallel_size", "mem_fraction_static", "gpu_memory_utilization"}
)
"""Options of engines; without GPUs the fractions would be of the machine's memory."""


def read(file: Path) -> dict[str, Any]:
    """The document of an example, as people see it."""
    document: dict[str, Any] = yaml.safe_load(file.read_text())
    return document


def without_gpus(
    document: dict[str, Any], *, embedded_engine: bool = False, most_ranks: int = 2
) -> AgenticRun:
    """The same strategies, placement and algorithm, small enough for two cores.

    Args:
        embedded_engine: the transformers engine replaces a server, which needs half a minute to
            start. A pod of several GPUs becomes pods with one rank each, so that model parallelism
            stays.
        most_ranks: number of those pods.
    """
    small = copy.deepcopy(document)
    spec = small["spec"]
    spec.pop("checkpoint", None)
    spec["model"] = {"initialize": TINY}
    spec["tracking"] = {"tensorboard": False}
    ranks = min(most_ranks, spec["roles"]["trainer"]["gpus"]) if embedded_engine else 1
    spec["roles"] = {"trainer": {"replicas": ranks}}
    pipeline = spec["pipeline"]
    pipeline |= {
        "maxSteps": 1,
        "rolloutBatchSize": 4,
        "evalSteps": 0,
        "saveSteps": 0,
        "sequenceLength": 256,
    }
    pipeline["trainEnvs"] |= {"groups": 2, "groupSize": 2}
    del pipeline["valEnvs"], pipeline["valBatchSize"]
    for env in pipeline["envs"]:
        env |= {"maxSteps": 2, "maxTokensPerStep": 4}
    trainer, training = pipeline["actorTrain"]["strategy"], pipeline["actorTrain"]["training"]
    trainer.get("config", {}).get("zero_optimization", {}).pop("offload_optimizer", None)
    training["maxTokensPerMicroBatch"] = 512
    del training["miniBatchSize"]
    engine = pipeline["actorInfer"]["strategy"]
    if embedded_engine:
        pipeline["actorInfer"]["strategy"] = {"name": "transformers"}
    else:
        engine["config"] = {
            name: value for name, value in engine["config"].items() if name not in ABOUT_GPUS
        }
    return parse_run(small)
