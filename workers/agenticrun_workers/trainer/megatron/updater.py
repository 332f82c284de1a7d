"""Megatron's optimizer with our schedule, which skips steps that would break the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from agenticrun_workers.trainer.megatron.options import MegatronOptions
from agenticrun_workers.trainer.megatron.weights import Parameter, Weights
from agenticrun_workers.trainer.optimizer import OptimizerSpec, StepCounts
from agenticrun_workers.trainer.ranks import Ranks

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Shard:
    """Elements of a parameter that this rank's optimizer updates.

    All elements, or with the distributed optimizer a range of them.
    """

    master: Tensor
    """Values in the optimizer's precision."""
    start: int
    end: int


class MegatronOptimizer(StepCounts):
    """Optimizer of the model, which also counts its steps."""

    def __init__(
        self,
        module: DistributedDataParallel,
        weights: Weights,
        spec: OptimizerSpec,
        options: MegatronOptions,
        ranks: Ranks,
    ) -> None:
        super().__init__(spec)
        dtype = weights.parameters[0].tensor.dtype
        config = OptimizerConfig(
            optimizer="adam",
            lr=spec.learning_rate,
            weight_decay=spec.weight_decay,
            adam_beta1=spec.beta1,
            adam_beta2=spec.beta2,
            adam_eps=spec.epsilon,
            clip_grad=0.0,  # by `step`, which looks at the norm first
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            use_distributed_optimizer=bool(options.data_parallel.get("use_distributed_optimizer")),
        )
        # No overrides: weight decay on every parameter, as the other strategies have it.
        self._whole = get_megatron_optimizer(
            config, [module], config_overrides={}, use_gloo_process_groups=False
        )
        (self._optimizer,) = self._whole.chained_optimizers
        self._module, self._weights, self._ranks = module, weights, ranks
        self._device = weights.parameters[0].tensor.device

    @property
    def adam(self) -> torch.optim.Optimizer:
        """PyTorch's optimizer inside Megatron's; its parameters are the masters of `shard`."""
        adam: torch.optim.Optimizer = self._optimizer.optimizer
        return adam

    def step(self, rate: float, *, scheduled: bool = True) -> float:
        """Take an optimizer step and return the norm, as `Strategy.optimizer_step` does."""
        first_broken = self._first_broken() if self.skip_budget_exhausted else None
        self._whole.prepare_grads()
        # In float64: Megatron's own function would round the norm to float32.
        squares = [
            gradient.double().square().sum()
            for gradient in self._whole.get_main_grads_for_grad_norm()
        ]
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        total = torch.stack([zero, *squares]).sum()
        dist.all_reduce(total, group=self._whole.get_grad_stats_parallel_group())
        norm = math.sqrt(total.item())
        if math.isfinite(norm):
            shrink = self.spec.max_grad_norm / (norm + 1e-6)
            for group in self._whole.param_groups:
                group["lr"] = rate
                if shrink < 1:
                    for parameter in group["params"]:
                        parameter.grad.mul_(shrink)
            self._whole.step_with_ready_grads()
        self.clear()
        self.record_step(norm, scheduled=scheduled, first_broken=first_broken)
        return norm

    def clear(self) -> None:
        """Clear the gradients."""
        self._module.zero_grad_buffer()
        self._whole.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        """Return the whole gradients so far, by Hugging Face's names, and clear them. Collective.

        The result is on rank 0 only.
        """
        if self.distributed:
            self._gather_gradients()
        gradients = self._weights.whole(lambda p: p.tensor.main_grad)  # type: ignore[attr-defined]
        found = {name: gradient.clone() for name, gradient in gradients}
        self.clear()
        return found

    def shard(self, parameter: Parameter) -> Shard | None:
        """Return the part of a parameter that this rank's optimizer updates; None: no part."""
        tensor = parameter.tensor
        if not self.distributed:
            return Shard(getattr(tensor, "main_param", tensor), 0, tensor.numel())
        if tensor not in self._optimizer.model_param_group_index_map:
            return None
        group, number = self._optimizer.model_param_group_index_map[tensor]
        span = self._optimizer._get_model_param_range_map(tensor)["param"]
        return Shard(
            self._optimizer.optimizer.param_groups[group]["params"][number], span.start, span.end
        )

    @property
    def distributed(self) -> bool:
        """True if each data-parallel rank updates only a part of each parameter."""
        return isinstance(self._optimizer, DistributedOptimizer)

    def shards(self) -> Iterator[tuple[Parameter, Shard]]:
        """Yield everything that this rank's optimizer updates."""
        for parameter in self._weights.parameters:
            if (shard := self.shard(parameter)) is not None:
                yield parameter, shard

    @torch.no_grad()
    def set_master(self, parameter: Parameter, values: Tensor) -> None:
        """Set the master of this rank's parameter, as far as this rank updates it."""
        if (shard := self.shard(parameter)) is not None:
            shard.master.view(-1).copy_(values.reshape(-1)[shard.start : shard.end])

    def tensors(self) -> Iterator[Tensor]:
        """Yield everything that is in the device's memory between steps."""
        for buffer in self._module.buffers:
            yield from (
                (buffer.param_data, buffer.grad_data)
                if buffer.param_data is not None
                else (buffer.grad_data,)
            )
        for parameter in self._weights.parameters:
            yield parameter.tensor
        for _, shard in self.shards():
            yield shard.master
            yield from (
                value
                for value in self.adam.state[shard.master].values()
                if isinstance(value, Tensor)
            )

    def publish(self) -> None:
        """Copy the masters to the model's parameters. Collective.

        Call it after the masters were changed from outside.
        """
        for parameter, shard in self.shards():
            parameter.tensor.data.view(-1)[shard.start : shard.end].copy_(shard.master.view(-1))
        if self.distributed:
            self._module.start_param_sync(force_sync=True)

    def _gather_gradients(self) -> None:
        """Give every data-parallel rank the whole sums of the gradients.

        The distributed optimizer leaves each rank only its share of them.
        """
        for buffer in self._module.buffers:
            for bucket in buffer.buckets:
                share = bucket.grad_data.numel() // buffer.data_parallel_world_size
                parts = list(bucket.grad_data.split(share))
                dist.all_gather(
                    parts,
                    parts[buffer.data_parallel_group.rank()].clone(),
                    group=buffer.data_parallel_group,
                )

    def _first_broken(self) -> str:
        """Return the first parameter with a gradient that is not finite on any rank."""
        names = self._weights.names()
        broken = {
            piece.name
            for parameter in self._weights.parameters
            for piece in parameter.pieces
            if not piece.view(parameter.tensor.main_grad).isfinite().all()  # type: ignore[attr-defined]
        }
        flags = self._ranks.max([float(name in broken) for name in names])
        return next(
            (name for name, flag in zip(names, flags, strict=True) if flag), "their joint norm"
        )
