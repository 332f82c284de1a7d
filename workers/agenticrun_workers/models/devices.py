"""Where models live. The only place that asks whether there is a GPU."""

from __future__ import annotations

import torch


def compute_device() -> torch.device:
    """This process's GPU (`claim_device` chose it), else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def claim_device(rank: int) -> torch.device:
    """Choose this rank's device. Ranks that see the same GPUs take them in turn; under Ray each sees just its own."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return compute_device()


def collective_backends(device: torch.device) -> str:
    """What `torch.distributed.init_process_group` calls them: NCCL for tensors on GPUs, gloo for those in host memory."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
