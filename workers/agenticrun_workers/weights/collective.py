"""Weights by a collective, from the trainer's process into those that compute with them: NCCL between GPUs, gloo without."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed
"""torch's type stubs lack what is used of it here."""

PREFIX = "agenticrun-weights"
TIMEOUT = timedelta(seconds=120)
"""For the meeting, and for each tensor."""


class WeightGroup:
    """A process group beside torch.distributed's default one. Rank 0 is the trainer, and hosts the store that the others meet at.

    Its connections close when it is garbage: the others then fail at once. A group in which a member was lost is of no more use: `close`
    it, because the traceback of an error keeps it alive.

    Args:
        device: of the tensors; the same kind everywhere.
        listener: of rank 0, which listens at that port before the others are told of it.
    """

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        world: int,
        device: torch.device,
        listener: socket.socket | None = None,
    ) -> None:
        self._device = device
        descriptor = None if listener is None else listener.detach()
        store = dist.TCPStore(host, port, world, rank == 0, TIMEOUT, master_listen_fd=descriptor)
        self._store = dist.PrefixStore(PREFIX, store)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._group = dist.ProcessGroupNCCL(self._store, rank, world, options)
        else:
            self._group = dist.ProcessGroupGloo(self._store, rank, world, TIMEOUT)

    def send(self, tensor: Tensor) -> None:
        """To all. Raises RuntimeError when one is gone, or late."""
        self._broadcast(tensor.detach().to(self._device).contiguous())

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What the trainer sends next. Raises RuntimeError when it is gone, or late."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._broadcast(tensor)
        return tensor

    def close(self) -> None:
        """Leave: others who wait for this member fail at once. Nothing is sent or received any more."""
        del self._group, self._store

    def _broadcast(self, tensor: Tensor) -> None:
        self._group.broadcast([tensor], dist.BroadcastOptions()).wait()
