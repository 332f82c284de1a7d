"""This process in Megatron's parallel groups, and Megatron-Core on the CPU.

Megatron's own code names the device "cuda". Inside `megatron_device()` such tensors are made on the
CPU, and the few calls of `torch.cuda` that training reaches do nothing. On a GPU the context
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from agenticrun_workers.models.devices import compute_device
from agenticrun_workers.trainer.megatron.options import MegatronOptions
from agenticrun_workers.trainer.ranks import Ranks, join_alone


@dataclass(frozen=True)
class Place:
    """Rank and size in each kind of group; ranks count from 0."""

    rank: int
    world: int
    tensor_rank: int
    tensor_size: int
    stage: int
    """Rank in the pipeline."""
    stages: int
    context_rank: int
    context_size: int
    data_rank: int
    data_size: int
    groups: ProcessGroupCollection

    @property
    def first_stage(self) -> bool:
        return self.stage == 0

    @property
    def last_stage(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def leads(self) -> bool:
        """True on the one rank of each data rank that counts in sums over samples."""
        return self.tensor_rank == self.context_rank == self.stage == 0

    @property
    def scores(self) -> bool:
        """True on the one rank of each data rank that counts in sums over losses.

        It is one of the ranks that have the last hidden state.
        """
        return self.tensor_rank == self.context_rank == 0 and self.last_stage

    def rank_of(self, tensor_rank: int, stage: int) -> int:
        """Return the global rank of a tensor rank and stage in data rank 0 and context rank 0.

        Megatron numbers ranks in the order tensor, context, data, pipeline.
        """
        return tensor_rank + stage * (self.world // self.stages)


def join(options: MegatronOptions) -> Place:
    """Make the groups, or reuse those of an earlier model with the same layout. Collective.

    Raises:
        ValueError: the options do not divide the ranks, or the process has another layout.
    """
    if not dist.is_initialized():
        join_alone(compute_device())
    world, sizes = dist.get_world_size(), (options.tensor, options.pipeline, options.context)
    if world % options.model_ranks:
        raise ValueError(
            f"{world} trainer ranks are not a multiple of {options.model_ranks} = "
            f"tensor_model_parallel_size {options.tensor} x "
            f"pipeline_model_parallel_size {options.pipeline} x context_parallel_size "
            f"{options.context}: change strategy.config or the "
            "trainer's replicas and GPUs"
        )
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            *sizes[:2], context_parallel_size=sizes[2], create_gloo_process_groups=False
        )
        if compute_device().type == "cuda":
            model_parallel_cuda_manual_seed(0)
    place = _look()
    if (place.tensor_size, place.stages, place.context_size) != sizes:
        raise ValueError(
            f"this process already has the layout tensor {place.tensor_size}, pipeline "
            f"{place.stages}, context {place.context_size}"
        )
    return place


def _look() -> Place:
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return Place(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        tensor_rank=groups.tp.rank(),
        tensor_size=groups.tp.size(),
        stage=groups.pp.rank(),
        stages=groups.pp.size(),
        context_rank=groups.cp.rank(),
        context_size=groups.cp.size(),
        data_rank=groups.dp.rank(),
        data_size=groups.dp.size(),
        groups=groups,
    )


class MegatronRanks(Ranks):
    """Reductions over Megatron's ranks.

    Of the ranks that share a model, one counts in sums: on the first pipeline stage for samples, on
    the last for losses.
    """

    def __init__(self, place: Place, device: torch.device) -> None:
        super().__init__(device)
        self.data_rank, self.data_size = place.data_rank, place.data_size
        self._place = place

    @property
    @override
    def leads(self) -> bool:
        return self._place.leads

    @property
    @override
    def scores(self) -> bool:
        return self._place.scores


CPU = torch.device("cpu")


@contextmanager
def megatron_device() -> Iterator[None]:
    """Enter the context in which Megatron may be called. It applies to the current thread."""
    if compute_device().type == "cuda":
        yield
        return
    replaced: list[tuple[Any, str, object]] = [
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", lambda *_: None),
        (random, "_CUDA_RNG_STATE_TRACKER", _NoTracker()),
        (random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.zeros(0)),
        (random, "_set_cuda_rng_state", lambda *_, **__: None),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        with _CudaIsCpu():
            yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if (
            func is Tensor.type and len(args) == 1 and not kwargs
        ):  # Megatron compares names of types: torch.cuda.FloatTensor
            return str(func(*args)).replace("torch.", "torch.cuda.")
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is Tensor.to:
            args = tuple(CPU if _is_cuda(value) else value for value in args)
        return func(*args, **kwargs)


class _NoTracker(random.CudaRNGStatesTracker):  # type: ignore[misc]  # Megatron's functions have no types
    """Tracker of random states that does nothing: dropout is off."""

    def fork(self, _: str = "") -> nullcontext[None]:
        return nullcontext()


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")
