"""The numbers of sizing.md and storage.md are those that `agenticrun convert` computes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from agenticrun_workers.convert.resources import STATE_BYTES, Sizes

ROOT = Path(__file__).parents[3]
SIZING = (ROOT / "docs/sizing.md").read_text()
STORAGE = (ROOT / "docs/storage.md").read_text()
GPU_BYTES = 80e9
KEEP = 2


@dataclass(frozen=True)
class Model:
    """What the arithmetic needs to know of a model, by its config.json."""

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head_size: int

    @property
    def kv_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * 2


MODELS = (
    Model("0.5B", 0.5e9, 24, 896, 2, 64),
    Model("8B", 8e9, 36, 4096, 8, 128),
    Model("32B", 32e9, 64, 5120, 8, 128),
    Model("30B-A3B (for planning)", 30e9, 48, 2048, 4, 128),
)


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """The table below a heading, by its first column."""
    section = re.split(
        r"^#+ ", page.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE
    )[0]
    lines = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
    cells = [re.sub("`", "", line).split(" | ") for line in lines[1:]]
    return {first: rest for first, *rest in cells}


def gpus(needed: float, room: float) -> int:
    """The smallest power of two on which so many bytes take less than the room of each GPU."""
    count = 1
    while needed / count >= room:
        count *= 2
    return count


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_gpus(model: Model) -> None:
    trained, weights = (STATE_BYTES + 2) * model.parameters, 2 * model.parameters
    room = 0.75 * GPU_BYTES
    assert rows(SIZING, "GPUs")[model.name] == [
        f"{trained / 1e9:.0f} GB",
        str(gpus(trained, room)),
        str(gpus(2 * model.parameters, room)),
        f"{weights / 1e9:.0f} GB",
        str(gpus(weights, GPU_BYTES / 2)),
    ]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_pods(model: Model) -> None:
    _, train, _, _, serve = rows(SIZING, "GPUs")[model.name]
    pods = max(1, int(train) // 8)
    each = int(train) // pods
    sizes = Sizes(model.parameters, weight_bytes=2, offloads=False, colocated=False)
    trainer, inference = sizes.trainer(each, pods), sizes.inference(int(serve))
    fields = ("cpus", "memory", "shmSize")
    assert rows(SIZING, "Trainer pods")[model.name] == [
        f"{pods} with {each} GPU{'s' * (each > 1)}",
        *(trainer[field] for field in fields),
    ]
    assert rows(SIZING, "Inference pods")[model.name] == [
        f"{serve} GPU{'s' * (serve != '1')}",
        *(inference[field] for field in fields),
    ]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_batches(model: Model) -> None:
    engine = int(rows(SIZING, "GPUs")[model.name][-1]) * GPU_BYTES
    cache = 0.8 * engine - 2 * model.parameters
    kept = model.layers * model.hidden * 2 * 16_384
    assert rows(SIZING, "Batches")[model.name] == [
        f"{model.kv_bytes // 1024} KiB",
        str(int(cache // (model.kv_bytes * 8192))),
        f"{kept / 2**30:.1f} GiB",
    ]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_storage(model: Model) -> None:
    sizes = Sizes(model.parameters, weight_bytes=2, offloads=False, colocated=False)
    assert rows(STORAGE, "Sizes")[model.name] == [
        f"{12 * model.parameters / 1e9:.0f} GB",
        f"{sizes.claim_gib(KEEP)}Gi",
        f"{2 * model.parameters / 1e9:.0f} GB",
    ]
