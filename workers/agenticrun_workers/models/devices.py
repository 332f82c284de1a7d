"""Devices of models. No other module asks whether there is a GPU."""

from __future__ import annotations

import torch


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
