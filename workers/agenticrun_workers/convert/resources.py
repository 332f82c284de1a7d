"""CPU, memory and shared memory of pods, from the size of the model.

docs/gpus.md explains the numbers. ROLL takes whole nodes and has no such settings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from agenticrun_workers.models.shape import ModelShape
from agenticrun_workers.sizing.gpus import GIB
from agenticrun_workers.sizing.memory import (
    CHECKPOINT,
    PROCESS,
    in_host_memory,
    layout_of,
    model_memory,
    total,
)

CPUS_PER_GPU = 4

_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BbMm])(?![A-Za-z0-9])")


def parameters(path: str | None) -> float | None:
    """Return the number of parameters of a model, or None if neither name nor files tell it.

    The first size in a name counts: 30B in Qwen3-30B-A3B.
    """
    if not path:
        return None
    folder = Path(path)
    index = folder / "model.safetensors.index.json"
    stored = (
        int(json.loads(index.read_text())["metadata"]["total_size"])
        if index.is_file()
        else sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    )
    if stored:
        return stored / 2  # bfloat16, as models are published
    named = _SIZE.search(path.rstrip("/").rsplit("/", 1)[-1])
    return None if named is None else float(named[1]) * (1e9 if named[2] in "Bb" else 1e6)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Resources of the pods of one run.

    Args:
        count: parameters of the model.
        weight_bytes: bytes of one weight in the computation, and on its way to the engines.
        strategy: name and options of the training backend, as in `actorTrain.strategy`.
        colocated: engines share the trainers' pods and take turns with them.
    """

    count: float
    weight_bytes: int
    strategy: Mapping[str, Any]
    colocated: bool = False

    def trainer(self, gpus: int, pods: int) -> dict[str, str]:
        """Return the fields of trainer pods."""
        ranks = max(1, gpus)
        options = self.strategy.get("config") or {}
        name = self.strategy["name"]
        layout = layout_of(name, options, ranks * pods, self.weight_bytes, tokens=0)
        memory = model_memory(ModelShape.of_size(self.count), layout, "")
        held = in_host_memory(memory, on_gpus=bool(gpus), colocated=self.colocated, saves=True)
        processes = ranks * (2 if self.colocated else 1)
        return self._fields(gpus, processes * PROCESS + ranks * total(held))

    def inference(self, gpus: int) -> dict[str, str]:
        """Return the fields of inference pods."""
        engines = max(1, gpus)
        return self._fields(gpus, engines * PROCESS + self.weight_bytes * self.count)

    def _fields(self, gpus: int, memory: float) -> dict[str, str]:
        shared = self.shared_gib
        return {
            "cpus": str(CPUS_PER_GPU * max(1, gpus)),
            "memory": f"{ceil(memory / GIB) + shared}Gi",
            "shmSize": f"{shared}Gi",
        }

    @property
    def shared_gib(self) -> int:
        """Size of /dev/shm: twice the weights, and room for NCCL."""
        return ceil(2 * self.weight_bytes * self.count / GIB) + 1

    def claim_gib(self, checkpoints: int) -> int:
        """Return the size of a claim for that many checkpoints and one more in the making."""
        return ceil(CHECKPOINT * self.count * (checkpoints + 1) / GIB)


def sizes(spec: dict[str, Any], count: float, dtype: str) -> Sizes:
    """Return the sizes for a run.

    Args:
        spec: what is converted so far: `placement` and the trainer's strategy.
        count: parameters of the model.
        dtype: `spec.model.dtype`.
    """
    colocated = spec["placement"] == "Colocated"
    return Sizes(count, 4 if dtype == "float32" else 2, spec["strategy"], colocated)
