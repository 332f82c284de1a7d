"""Write docs/sizing.md: memory of published models by the functions of `agenticrun plan`.

python tools/docs/sizing.py > docs/sizing.md
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from agenticrun_api import AgenticRun, Role, parse_run
from agenticrun_workers.convert.resources import Sizes
from agenticrun_workers.models.shape import ModelShape
from agenticrun_workers.sizing.gpus import GIB, GPUS
from agenticrun_workers.sizing.memory import billions, trainer_memory
from agenticrun_workers.sizing.models import run_shapes
from agenticrun_workers.sizing.plan import Fit, Kind, Place, plan_run

NAMES = {
    "Qwen/Qwen2.5-0.5B-Instruct": "Qwen2.5-0.5B",
    "meta-llama/Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "Qwen/Qwen3-8B": "Qwen3-8B",
    "Qwen/Qwen3-30B-A3B": "Qwen3-30B-A3B",
    "Qwen/Qwen3-32B": "Qwen3-32B",
}
COUNTS = (1, 2, 4, 8, 16, 32)
SHOWN = (1, 4, 8, 16)
LENGTH = 8192
TOKENS = 16_384
KEEP = 2
H100 = GPUS["h100"]
DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "sizing.md", DOCS / "storage.md")


def run_of(model: str, gpus: int, *, lora: bool = False, engine: int = 1) -> AgenticRun:
    """Return a run that trains a model on so many GPUs, in pods of at most 8."""
    config = {"gradient_checkpointing": True}
    train: dict[str, Any] = {
        "strategy": {"name": "fsdp2", "config": config},
        "training": {"maxTokensPerMicroBatch": TOKENS, "sequencePacking": True},
    }
    if lora:
        train["lora"] = {"rank": 16}
    each = {"memory": "4000Gi", "shmSize": "1000Gi"}
    return parse_run(
        {
            "apiVersion": "agenticrun.dev/v1alpha1",
            "kind": "AgenticRun",
            "metadata": {"name": "sizing"},
            "spec": {
                "model": {"path": model, "dtype": "bfloat16"},
                "roles": {
                    "trainer": {"gpus": min(gpus, 8), "replicas": -(-gpus // 8), **each},
                    "inference": {"gpus": engine, **each},
                },
                "pipeline": {
                    "maxSteps": 1,
                    "rolloutBatchSize": 256,
                    "evalSteps": 0,
                    "sequenceLength": LENGTH,
                    "algorithm": {"name": "grpo"},
                    "trainEnvs": {"groups": 32, "groupSize": 8, "tags": ["FrozenLake"]},
                    "envs": [{"tag": "FrozenLake", "type": "frozen_lake"}],
                    "actorTrain": train,
                    "actorInfer": {"strategy": {"name": "sglang", "config": {"tp_size": engine}}},
                },
            },
        },
        local=True,
    )


def trainer(model: str, shapes: dict[Role, ModelShape], gpus: int, *, lora: bool = False) -> Place:
    """Return the GPU of a trainer rank."""
    places = plan_run(run_of(model, gpus, lora=lora), shapes, H100).places
    return next(place for place in places if place.kind is Kind.GPU)


def fewest(model: str, shapes: dict[Role, ModelShape], *, lora: bool = False) -> int:
    """Return the smallest number of GPUs on which a model trains."""
    return next(
        count for count in COUNTS if trainer(model, shapes, count, lora=lora).fit is Fit.FITS
    )


def table(*rows: Iterable[str]) -> Iterator[str]:
    """Return the lines of a table, of which the first row is the heading."""
    for number, row in enumerate(rows):
        cells = [*row]
        yield f"| {' | '.join(cells)} |"
        if number == 0:
            yield f"|{'---|' * len(cells)}"


def gpus(model: str, shapes: dict[Role, ModelShape]) -> list[str]:
    """Return the row of a model in the table of GPUs."""
    peaks = []
    for count in SHOWN:
        place = trainer(model, shapes, count)
        size = f"{place.needed / GIB:,.0f}"
        peaks.append(f"**{size}**" if place.fit is Fit.FITS else size)
    numbers = fewest(model, shapes), fewest(model, shapes, lora=True), engine_gpus(shapes)
    return [billions(shapes[Role.TRAINER].parameters), *peaks, *map(str, numbers)]


def engine_gpus(shapes: dict[Role, ModelShape]) -> int:
    """Return the GPUs on which the weights of an engine leave half of the memory to its cache."""
    weights = 2 * shapes[Role.TRAINER].parameters
    return next(count for count in COUNTS if weights / count < H100.memory / 2)


def pods(model: str, shapes: dict[Role, ModelShape]) -> list[str]:
    """Return the row of a model in the table of pods."""
    least, engine = fewest(model, shapes), engine_gpus(shapes)
    each, replicas = min(least, 8), -(-least // 8)
    sizes = Sizes(shapes[Role.TRAINER].parameters, 2, {"name": "fsdp2"})
    ranks, engines = sizes.trainer(each, replicas), sizes.inference(engine)
    return [
        f"{replicas} with {each} GPU{'s' * (each > 1)}",
        ranks["memory"],
        f"{engine} GPU{'s' * (engine > 1)}",
        engines["memory"],
        ranks["shmSize"],
    ]


def batches(model: str, shapes: dict[Role, ModelShape]) -> list[str]:
    """Return the row of a model in the table of batches."""
    shape, engine = shapes[Role.TRAINER], engine_gpus(shapes)
    token = 2 * shape.kv_elements
    cache = 0.85 * engine * H100.memory - 2 * shape.parameters
    phases = trainer_memory(run_of(model, 1).spec, shapes).phases
    kept = {item.name: item.bytes for item in phases["backward pass of a layer"]}
    activations = kept["activations"] + kept["one layer's recomputation and gradients"]
    return [
        f"{token // 1024} KiB",
        f"{int(cache // (token * LENGTH))}",
        f"{activations / GIB:.1f} GiB",
    ]


def storage(_model: str, shapes: dict[Role, ModelShape]) -> list[str]:
    """Return the row of a model in the table of checkpoints."""
    count = shapes[Role.TRAINER].parameters
    claim = Sizes(count, 2, {"name": "fsdp2"}).claim_gib(KEEP)
    return [f"{12 * count / 1e9:.0f} GB", f"{claim}Gi", f"{2 * count / 1e9:.0f} GB"]


TABLES: dict[str, tuple[list[str], Callable[[str, dict[Role, ModelShape]], list[str]]]] = {
    "gpus": (["parameters", *map(str, SHOWN), "to train", "with LoRA", "of an engine"], gpus),
    "pods": (["trainer pods", "`memory`", "engine", "`memory`", "`shmSize` of both"], pods),
    "batches": (["KV cache of a token", "episodes at once", "activations"], batches),
    "storage": (["a checkpoint", f"claim with `keep: {KEEP}`", "in the model cache"], storage),
}


def written(page: str) -> str:
    """Return a page with new tables."""

    def made(found: re.Match[str]) -> str:
        heading, row = TABLES[found[1]]
        rows = (
            [name, *row(model, run_shapes(run_of(model, 1).spec))] for model, name in NAMES.items()
        )
        lines = "\n".join(table(["model", *heading], *rows))
        return f"<!-- table: {found[1]} -->\n{lines}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", made, page, flags=re.DOTALL)


if __name__ == "__main__":
    for file in PAGES:
        file.write_text(written(file.read_text()))
