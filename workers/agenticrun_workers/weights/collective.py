"""The process group of the first trainer rank and all engines, which weights are broadcast in.

NCCL connects GPUs, gloo CPUs. `broadcast.BroadcastSync` makes both ends; engine servers have an end
of their own in their plug-ins.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed
"""torch's type stubs lack the parts that are used here."""

PREFIX = "agenticrun-weights"
TIMEOUT = timedelta(seconds=120)
"""For joining, and for each tensor."""


class WeightGroup:
    """A process group next to torch.distributed's default one.

    Rank 0 is the trainer, and hosts the store at which the others join. The connections close when
    this object is collected, and the other members then fail at once. After the loss of a member
    the group is useless: `close` it, because the traceback of an error keeps it alive.

    Args:
        device: of the tensors; the same kind on all ranks.
        listener: of rank 0, which listens at `port` before the others learn of it.
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
        # The port is bound before the engines learn of it, so no other program can take it.
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
        """Send a tensor to all other ranks.

        Raises:
            RuntimeError: a member has died, or is late.
        """
        self._broadcast(tensor.detach().to(self._device).contiguous())

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the trainer's next tensor.

        Raises:
            RuntimeError: the trainer has died, or is late.
        """
        # No zeros: the broadcast overwrites all of it.
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._broadcast(tensor)
        return tensor

    def close(self) -> None:
        """Leave the group. Members that wait for this one fail at once."""
        del self._group, self._store

    def _broadcast(self, tensor: Tensor) -> None:
        self._group.broadcast([tensor], dist.BroadcastOptions()).wait()
