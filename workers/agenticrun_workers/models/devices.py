"""Devices of models. No other module asks whether there is a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from agenticrun_workers.tracing import recording, span


def compute_device() -> torch.device:
    """Return this process's GPU, which `claim_device` chose, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def claim_device(rank: int) -> torch.device:
    """Choose the device of a rank.

    Ranks that see the same GPUs take them in turn. Under Ray, each rank sees only its own.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return compute_device()


def collective_backends(device: torch.device) -> str:
    """Return the `backend` of `torch.distributed.init_process_group` for tensors on `device`.

    NCCL carries tensors on GPUs, gloo those in host memory.
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


@contextmanager
def device_span(name: str, **args: Any) -> Iterator[None]:
    """Record the `with` block, until the GPU has done its work, as `tracing.span` does.

    Without a trace nothing waits for the GPU.
    """
    with span(name, **args):
        yield
        if recording() and torch.cuda.is_available():
            torch.cuda.synchronize()
