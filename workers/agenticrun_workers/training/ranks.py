"""This process among the trainer's ranks: sums over all, and the sharding of a module."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


class Ranks:
    """All ranks of the default process group, or just this process if there is none."""

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self._device = device

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: list[float]) -> list[float]:
        """Element-wise maximum over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def shard(self, module: nn.Module, layers: list[nn.Module]) -> None:
        """Fully shard a module over the ranks, layer by layer. Gradients are summed, not averaged."""
        if self.size == 1:
            return
        mesh = init_device_mesh(self._device.type, (self.size,))
        for unit in [*layers, module]:
            fully_shard(unit, mesh=mesh)
            assert isinstance(unit, FSDPModule)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo knows no PREMUL_SUM

    def _reduce(self, values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, operation)
        return [float(value) for value in tensor.tolist()]


def whole(tensor: Tensor) -> Tensor:
    """The tensor from all ranks' shards. Collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
