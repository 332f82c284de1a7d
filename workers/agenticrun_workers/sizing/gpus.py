"""GPUs that a plan can be made for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """The memory and rates of a GPU: peaks for dense bfloat16, from the maker's data sheets."""

    name: str
    memory: float
    """Bytes that a process can allocate: slightly less than on the data sheet."""
    flops: float = 0.0
    """bfloat16 operations in a second, without sparsity; 0: unknown, so there are no times."""
    bandwidth: float = 0.0
    """Bytes in a second, of its memory."""
    link: float = 0.0
    """Bytes in a second and direction to other GPUs of the node: NVLink, else PCIe."""
    network: float = 0.0
    """Bytes in a second and direction to other nodes, for each GPU."""
    pcie: float = 0.0
    """Bytes in a second and direction to host memory."""


def _gpu(
    name: str,
    gib: float,
    teraflops: float,
    terabytes: float,
    link: float,
    network: float,
    pcie: float,
) -> Gpu:
    rates = (gigabytes * 1e9 for gigabytes in (link, network, pcie))
    return Gpu(name, gib * GIB, teraflops * 1e12, terabytes * 1e12, *rates)


# Memory: total_memory of CUDA. FLOP/s, memory and NVLink: NVIDIA's data sheets of each product
# (sparse figures halved, both directions of a link halved). Network: NVIDIA's DGX systems, with 400
# Gbit/s for each H100, H200 and B200 and 200 for each A100; 100 Gbit/s where there is no DGX.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("b200", 178, 2250, 8.0, 900, 50, 64),
        _gpu("h200", 139.8, 989, 4.8, 450, 50, 64),
        _gpu("h100", 79.1, 989, 3.35, 450, 50, 64),
        _gpu("a100", 79.2, 312, 2.039, 300, 25, 32),
        _gpu("a100-40gb", 39.4, 312, 1.555, 300, 25, 32),
        _gpu("l40s", 44.4, 362, 0.864, 32, 12.5, 32),
        _gpu("a10g", 22.1, 70, 0.6, 32, 12.5, 32),
        _gpu("l4", 22.0, 121, 0.3, 32, 12.5, 32),
        _gpu("rtx4090", 23.5, 165, 1.008, 32, 12.5, 32),
    )
}
DEFAULT = "h100"


def recognize(name: str, memory: float) -> Gpu:
    """Return the GPU that a driver describes, with the memory that it reports.

    Args:
        name: as in nvidia-smi: NVIDIA H100 80GB HBM3.
        memory: in bytes.
    """
    words = re.sub(r"[^a-z0-9]", "", name.lower())
    known = [gpu for key, gpu in GPUS.items() if key.partition("-")[0] in words]
    if not known:
        return Gpu(name, memory)
    nearest = min(known, key=lambda gpu: abs(gpu.memory - memory))
    rates = (nearest.flops, nearest.bandwidth, nearest.link, nearest.network, nearest.pcie)
    return Gpu(nearest.name, memory, *rates)


def of_machine(cards: Sequence[str]) -> Gpu | None:
    """Return the smallest GPU of a machine from lines of nvidia-smi: name, memory, driver."""
    found = []
    for card in cards:
        name, _, rest = card.partition(", ")
        size = re.match(r"(\d+) MiB", rest)
        if size:
            found.append(recognize(name, float(size[1]) * 2**20))
    return min(found, key=lambda gpu: gpu.memory, default=None)
