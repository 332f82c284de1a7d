"""This process among the trainer's ranks, and reductions over them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor import DTensor, Replicate

from agenticrun_workers.models.devices import collective_backends, compute_device

T = TypeVar("T")


class Ranks:
    """All ranks of the default process group, or only this process if there is none.

    Args:
        device: of the tensors that collectives reduce.
        group_size: number of neighbouring ranks that work on the same samples.

    Attributes:
        rank: below `size`.
        data_rank: this rank's part of a batch, below `data_size`.
        group_rank: rank among those of the same `data_rank`.

    Raises:
        ValueError: `group_size` does not divide the ranks.
    """

    def __init__(self, device: torch.device, group_size: int = 1) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        if self.size % group_size:
            raise ValueError(
                f"ulysses_sequence_parallel_size {group_size} does not divide "
                f"the {self.size} trainer ranks"
            )
        self.data_rank, self.group_rank = divmod(self.rank, group_size)
        self.data_size = self.size // group_size
        self._device = device

    @property
    def leads(self) -> bool:
        """True on one rank of each `data_rank`: the one that counts in sums over samples."""
        return self.group_rank == 0

    @property
    def scores(self) -> bool:
        """True on one rank of each `data_rank`: the one that counts in sums over losses."""
        return self.leads

    def sum(self, values: list[float]) -> list[float]:
        """Return the element-wise sum over the parts of a batch. Collective."""
        return self._reduce(values if self.leads else [0.0] * len(values), dist.ReduceOp.SUM)

    def sum_scores(self, values: list[float]) -> list[float]:
        """Return the element-wise sum, over the parts of a batch, of losses. Collective."""
        return self._reduce(values if self.scores else [0.0] * len(values), dist.ReduceOp.SUM)

    def sum_all(self, values: list[float]) -> list[float]:
        """Return the element-wise sum over all ranks. Collective."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: list[float]) -> list[float]:
        """Return the element-wise maximum over all ranks. Collective."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, operation)
        return [float(value) for value in tensor.tolist()]


def join_ranks(
    rank: int, size: int, rendezvous: tuple[str, int], listener: socket.socket | None
) -> None:
    """Join the process group of all ranks, on this rank's device. A single rank gets a group too.

    Args:
        rank: of this process.
        size: number of ranks.
        rendezvous: host and port of the first rank.
        listener: on the first rank, the socket that listens there.
    """
    device = compute_device()
    if size == 1:
        if listener is not None:
            listener.close()
        join_alone(device)
        return
    descriptor = None if listener is None else listener.detach()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        *rendezvous, size, rank == 0, default_pg_timeout, master_listen_fd=descriptor
    )
    dist.init_process_group(collective_backends(device), store=store, rank=rank, world_size=size)


def join_alone(device: torch.device) -> None:
    """Make a process group of this process alone, without a port.

    Another model in this process may have made it.
    """
    if dist.is_initialized():
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(collective_backends(device), store=store, rank=0, world_size=1)


def leave_ranks() -> None:
    """Leave the process group, so that this process can join another one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def ranks_of_this_host() -> int:
    """Return the number of ranks on this machine or in this pod. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 1
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts.count(socket.gethostname())


def agreed(work: Callable[[], T]) -> T:
    """Run `work` on every rank; if it fails on one, all raise its error.

    Otherwise the other ranks would wait for the failed one in the next collective.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    errors = [error]
    if dist.is_initialized() and dist.get_world_size() > 1:
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    for error in filter(None, errors):
        raise error
    return result  # type: ignore[return-value]  # no error: there is one


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor from all ranks' shards. Collective if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Experts are sharded twice. One dimension of the mesh after the other: torch warns if it has to
    # do that itself.
    placements = list(tensor.placements)
    for dim in range(len(placements) - 1):
        placements[dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
