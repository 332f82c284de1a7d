"""A tensor on one GPU, seen by two processes: half of the stage `weights`.

The other process imports this module only, so it starts fast.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from agenticrun_workers.gpu_check.stages import Bench

SECONDS = 120.0
"""Longest wait for the other process."""


def between_processes(bench: Bench) -> None:
    """Hand a tensor on the device to another process, which compares it with its own copy."""
    count = bench.size(2**28, 2**10)
    context = torch.multiprocessing.get_context("spawn")
    sent, answers = context.SimpleQueue(), context.Queue()
    other = context.Process(target=_compare, args=(sent, answers), daemon=True)
    other.start()
    tensor = _pattern(count, bench.device)
    begun = time.perf_counter()
    sent.put(tensor)
    different = answers.get(timeout=SECONDS)
    bench.exact("values that differ in another process", different, at_most=0)
    bench.measure("tensor in another process, with its start", time.perf_counter() - begun, "s")
    other.join(SECONDS)


def _compare(sent: Any, answers: Any) -> None:
    tensor = sent.get()
    answers.put(int((tensor != _pattern(len(tensor), tensor.device)).sum()))


def _pattern(count: int, device: torch.device) -> Tensor:
    return (torch.arange(count, device=device) * 2_654_435_761).to(torch.int32)
