"""Stages `probe` and `samplers`: the machine's own speeds, and sampling without waits."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from agenticrun_workers.gpu_check.stages import Bench
from agenticrun_workers.inference.server_path.agenticrun_sampling import (
    sample,
    streams,
    truncate,
    uniforms,
    uniforms_on_device,
)

SHM = Path("/dev/shm")


def probe(bench: Bench) -> None:
    """Versions, and the ceilings against which the other stages' figures are read."""
    import transformers

    bench.notes |= {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "transformers": transformers.__version__,
        "CPUs": str(len(os.sched_getaffinity(0))),
        "varlen attention": _has_varlen(),
    }
    if bench.gpu:
        properties = torch.cuda.get_device_properties(bench.device)
        bench.notes["capability"] = f"{properties.major}.{properties.minor}"
        bench.measure("GPU memory", properties.total_memory / 2**30, "GiB")
    space = os.statvfs(SHM)
    bench.measure("/dev/shm", space.f_frsize * space.f_bavail / 2**30, "GiB")
    count = bench.size(2**30, 2**20)
    on_device = torch.zeros(count, dtype=torch.uint8, device=bench.device)
    for kind, on_host in (
        ("pinned", torch.zeros(count, dtype=torch.uint8, pin_memory=bench.gpu)),
        ("pageable", torch.zeros(count, dtype=torch.uint8)),
    ):
        least = 20 if kind == "pinned" else None
        taken = bench.seconds(lambda: on_device.copy_(on_host, non_blocking=True))
        bench.measure(f"host to device, {kind}", count / taken / 1e9, "GB/s", at_least=least)
        taken = bench.seconds(lambda: on_host.copy_(on_device, non_blocking=True))
        bench.measure(f"device to host, {kind}", count / taken / 1e9, "GB/s", at_least=least)
    other = torch.empty_like(on_device)
    taken = bench.seconds(lambda: other.copy_(on_device))
    bench.measure("device memory, copy", 2 * count / taken / 1e9, "GB/s")
    side = bench.size(8192, 256)
    a = torch.randn(side, side, dtype=torch.bfloat16, device=bench.device)
    taken = bench.seconds(lambda: a @ a)
    bench.measure("bfloat16 matrix product", 2 * side**3 / taken / 1e12, "TFLOP/s")


def _has_varlen() -> str:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        return f"no: {error}"
    return f"yes: {varlen_attn.__name__}"


def samplers(bench: Bench) -> None:
    """The sampling of all engines: it never waits for the GPU, and tokens equal a CPU's."""
    rows, vocabulary = bench.size(256, 4), bench.size(151_936, 3_000)
    generator = torch.Generator().manual_seed(0)
    # As the logits of a model in bfloat16, with many equal ones.
    logits = (4 * torch.randn(rows, vocabulary, generator=generator)).bfloat16().float()
    weights = logits.softmax(-1)
    streams_B = streams([7919 * row for row in range(rows)], [0] * rows)
    indices = range(rows)
    cuts = (torch.full((rows,), 50), torch.full((rows,), 0.9), torch.full((rows,), 0.01))
    weights_d, streams_d, indices_d = (
        each.to(bench.device)
        for each in (weights, torch.from_numpy(streams_B), torch.tensor(indices))
    )
    cuts_d = [each.to(bench.device) for each in cuts]

    def numbers_of_device() -> Tensor:
        """As for SGLang, which keeps positions on the GPU."""
        return uniforms(streams_d, indices_d)

    def numbers_of_host() -> Tensor:
        """As for vLLM and the embedded engine."""
        return uniforms_on_device(streams_B, indices, bench.device)

    bench.wait()
    if bench.gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        plain = sample(weights_d, numbers_of_host())
        cut = sample(truncate(weights_d, *cuts_d), numbers_of_device())
    finally:
        if bench.gpu:
            torch.cuda.set_sync_debug_mode("default")
    numbers = uniforms_on_device(streams_B, indices, torch.device("cpu"))
    bench.exact(
        "random numbers that differ from a CPU's",
        int((numbers_of_device().cpu() != numbers).sum()),
        at_most=0,
    )
    # Another order of a sum may move a boundary between two tokens by 1e-7.
    most = rows // 100
    bench.exact(
        "tokens that differ from a CPU's",
        int((plain.cpu() != sample(weights, numbers)).sum()),
        at_most=most,
    )
    bench.exact(
        "tokens that differ from a CPU's, of top_k, top_p and min_p",
        int((cut.cpu() != sample(truncate(weights, *cuts), numbers)).sum()),
        at_most=most,
    )

    def draw(numbers: Callable[[], Tensor]) -> Tensor:
        return sample(weights_d, numbers())

    for where, numbers_of in (("GPU", numbers_of_device), ("host", numbers_of_host)):
        taken = bench.seconds(partial(draw, numbers_of), 20)
        name = f"sample {rows} tokens of {vocabulary}, random numbers of the {where}"
        bench.measure(name, taken * 1e3, "ms", at_most=0.5)
    taken = bench.seconds(lambda: truncate(weights_d, *cuts_d), 5)
    bench.measure(f"top_k, top_p and min_p of {rows} rows", taken * 1e3, "ms")
