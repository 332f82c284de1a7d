"""This process among the trainer's ranks: its place, sums over all, and the sharding of a module."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from agenticrun_workers.models.devices import claim_device, collective_backends
from agenticrun_workers.trainer.options import FsdpOptions


class Ranks:
    """All ranks of the default process group, or just this process if there is none.

    Args:
        device: where collectives find their tensors.
        group_size: so many neighbouring ranks work on the same samples.

    Raises:
        ValueError: `group_size` does not divide the ranks.
    """

    def __init__(self, device: torch.device, group_size: int = 1) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        if self.size % group_size:
            raise ValueError(
                f"ulysses_sequence_parallel_size {group_size} does not divide the {self.size} trainer ranks"
            )
        self.data_rank, self.group_rank = divmod(self.rank, group_size)
        self.data_size = self.size // group_size
        self._device = device

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over the parts of a batch: over one rank of each group."""
        return self._reduce(
            values if self.group_rank == 0 else [0.0] * len(values), dist.ReduceOp.SUM
        )

    def max(self, values: list[float]) -> list[float]:
        """Element-wise maximum over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def shard(
        self,
        module: nn.Module,
        layers: Iterable[nn.Module],
        dtype: torch.dtype,
        options: FsdpOptions,
    ) -> None:
        """Fully shard a module over the ranks, layer by layer. Gradients are summed, not averaged.

        One rank has nothing to shard, but FSDP2 also computes in another dtype than the parameters' and offloads them: for
        these it is used on one rank too, so that there is one implementation of them.

        Args:
            dtype: to compute in. Parameters and gradients keep their own.
        """
        own = next(module.parameters()).dtype
        if self.size == 1 and dtype == own and not options.offload_policy:
            return
        if not dist.is_initialized():
            join_alone(self._device)
        mesh = init_device_mesh(self._device.type, (self.size,))
        precision = (
            MixedPrecisionPolicy()
            if dtype == own
            else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=own)
        )
        offload = (
            CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
            if options.offload_policy
            else OffloadPolicy()
        )
        for unit in [*layers, module]:
            reshard = (
                options.reshard_after_forward and unit is not module
            )  # the root's backward pass begins at once
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=reshard,
                mp_policy=precision,
                offload_policy=offload,
            )
            assert isinstance(unit, FSDPModule)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo knows no PREMUL_SUM

    def _reduce(self, values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, operation)
        return [float(value) for value in tensor.tolist()]


def join_ranks(
    rank: int, size: int, rendezvous: tuple[str, int], listener: socket.socket | None
) -> None:
    """Meet the other ranks at this host and port, and take a device. Also a rank that is alone has a process group then.

    Args:
        listener: on the first rank, what listens there.
    """
    device = claim_device(rank)
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
    """A process group of this process, which opens no port."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(collective_backends(device), store=store, rank=0, world_size=1)


def whole(tensor: Tensor) -> Tensor:
    """The tensor from all ranks' shards. Collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
