"""The workers' end of a trainer's broadcast: NCCL between GPUs, gloo without."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed
"""torch's type stubs lack the process groups."""

PREFIX = "agenticrun-weights"
TIMEOUT = timedelta(seconds=120)
"""For the rendezvous and for each tensor. As at the trainer's end, `weights.collective`."""


class WeightGroup:
    """A process group with the trainer, which is rank 0 and hosts the store.

    It is independent of torch.distributed's default group, which is vLLM's own.
    """

    def __init__(self, host: str, port: int, rank: int, world: int, device: torch.device) -> None:
        self._device = device
        self._store = dist.PrefixStore(PREFIX, dist.TCPStore(host, port, world, False, TIMEOUT))
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._group = dist.ProcessGroupNCCL(self._store, rank, world, options)
        else:
            self._group = dist.ProcessGroupGloo(self._store, rank, world, TIMEOUT)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the next tensor of the trainer. Raises RuntimeError if it is gone or late."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._group.broadcast([tensor], dist.BroadcastOptions()).wait()
        return tensor
