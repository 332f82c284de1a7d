"""A converted run, made small enough for its first step on a laptop or a small cluster."""

from __future__ import annotations

import copy
from typing import Any

ANSWER_TOKENS = 8
TURNS = 2
CPUS = "200m"
"""CPU request of each pod: the first step fits on a node with two CPUs, beside other pods."""
SIZES = {"hiddenSize": 32, "layers": 1, "heads": 2, "intermediateSize": 64}
WORDS = [chr(code) for code in range(32, 127)]
"""Every ASCII character, so that the tiny model reads any data set."""


def tiny(document: dict[str, Any]) -> dict[str, Any]:
    """Return the run with a tiny model, one step, small pods and few short episodes.

    Algorithm, environments, templates and batch rules stay as they are.
    """
    document = copy.deepcopy(document)
    document["metadata"]["name"] = f"tiny-{document['metadata']['name']}"[:45].rstrip("-")
    spec = document["spec"]
    spec["model"] = {"initialize": {**SIZES, "words": WORDS}}
    spec["roles"] = {
        role: {"cpus": CPUS, "memory": "3Gi"} for role in ("driver", "trainer", "inference", "env")
    }
    spec["checkpoint"] = {"none": True}
    spec["tracking"] = {"tensorboard": False, "console": False}
    spec.pop("placement", None)
    pipeline = spec["pipeline"]
    pipeline["maxSteps"] = 1
    # One group of each tag, or two if a group is a single episode.
    train, val = pipeline["trainEnvs"], pipeline.get("valEnvs")
    for part in filter(None, (train, val)):
        part["groups"] = len(part["tags"])
        part.pop("partition", None)
    size = train.get("groupSize", 1)
    train["groups"] *= 2 if size == 1 else 1
    pipeline["rolloutBatchSize"] = train["groups"] * size
    if val:
        pipeline["valBatchSize"] = val["groups"] * val.get("groupSize", 1)
    pipeline["actorTrain"].pop("strategy", None)
    pipeline["actorTrain"]["training"].pop("miniBatchSize", None)
    pipeline["actorInfer"].pop("strategy", None)
    for role in ("critic", "reference"):
        pipeline.get(role, {}).pop("path", None)
    if "to" in pipeline.get("record", {}):
        del pipeline["record"]
    for env in pipeline["envs"]:
        env["maxSteps"] = min(env["maxSteps"], TURNS)
        env["maxTokensPerStep"] = min(env["maxTokensPerStep"], ANSWER_TOKENS)
    return document
