"""The strategy `fsdp2`: FSDP2 on several ranks, plain torch on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agenticrun_workers.models.devices import device_span
from agenticrun_workers.models.lora import Adapters, whole_weights
from agenticrun_workers.models.stored_names import stored_weights
from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.checkpoint import HostBuffers, Snapshot
from agenticrun_workers.trainer.micro_batch import MicroBatch
from agenticrun_workers.trainer.modules import PolicyModule
from agenticrun_workers.trainer.optimizer import Optimizer, OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PartLoss, PolicyTrainer
from agenticrun_workers.trainer.ranks import whole
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.trainer.sharded_module import DEFAULTS, FsdpOptions, Load, ShardedModule
from agenticrun_workers.types import FloatArray


class Fsdp2Strategy:
    """Implements `Strategy`. For the arguments see `fsdp2_policy`."""

    def __init__(self, model: ShardedModule[PolicyModule], optimizer: OptimizerSpec) -> None:
        self.model = model
        self.ranks, self.batcher = model.ranks, model.batcher
        self.steps = Optimizer(model.module, optimizer, model.ranks)
        self.adapters = Adapters.of(model.module.model, self._whole, model.ranks.rank)
        self._buffers = HostBuffers()

    def score(self, samples: list[Sample], temperature: float) -> list[FloatArray]:
        return self.model.score(samples, temperature)

    def forward_backward(
        self, batches: list[MicroBatch], temperature: float, loss: PartLoss
    ) -> None:
        self.model.module.router_load.reset()
        for batch in batches:
            with device_span("forward"):
                part = loss(batch, *self.model.module(batch, temperature))
            with device_span("backward"):
                part.backward()  # type: ignore[no-untyped-call]

    def router_metrics(self) -> dict[str, float]:
        return self.model.module.router_load.metrics(self.ranks)

    def optimizer_step(self, rate: float, *, scheduled: bool = True) -> float:
        return self.steps.step(rate, scheduled=scheduled)

    def reset_optimizer(self) -> None:
        self.steps.adamw.state.clear()

    def gradients(self) -> dict[str, Tensor]:
        return {
            name.removeprefix("model."): gradient
            for name, gradient in self.steps.gradients().items()
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Tied parameters have the name that `named_parameters` gives."""
        model, dtype = self.model.module.model, self.model.dtype
        wide = {id(parameter) for part in self.model.wide for parameter in part.parameters()}
        kept = {name for name, parameter in model.named_parameters() if id(parameter) in wide}

        def rounded(parameter: nn.Parameter) -> Tensor:
            value = parameter.detach()
            return whole(value if id(parameter) in wide else value.to(dtype))

        gathered = whole_weights(model, self._whole, rounded)
        rounds = ((name, value if name in kept else value.to(dtype)) for name, value in gathered)
        weights = stored_weights(model, rounds)
        for named in weights:
            if self.ranks.rank == 0:
                yield named

    def hugging_face_model(self) -> PreTrainedModel:
        return self.model.module.model

    def snapshot(self, progress: dict[str, int]) -> Snapshot:
        module, adamw = self.model.module, self.steps.adamw
        return checkpoint.snapshot(module, adamw, progress, self._buffers)

    def reserve_snapshot(self) -> Callable[[], None]:
        return checkpoint.reserve(self.model.module, self.steps.adamw, self._buffers)

    def load(self, folder: str, progress: dict[str, int]) -> dict[str, int]:
        return checkpoint.load(folder, self.model.module, self.steps.adamw, progress)

    def offload(self) -> None:
        """Move everything to host memory."""
        self.steps.offload()
        self.model.offload()

    def onload(self) -> None:
        self.model.onload()
        self.steps.onload(self.model.home)

    @staticmethod
    def _whole(parameter: nn.Parameter) -> Tensor:
        return whole(parameter.detach())


def fsdp2_policy(
    load: Load,
    optimizer: OptimizerSpec,
    *,
    max_tokens: int = 16_384,
    temperature: float = 1.0,
    packing: bool = False,
    dtype: torch.dtype | None = None,
    options: FsdpOptions = DEFAULTS,
) -> PolicyTrainer:
    """Return a policy that trains with FSDP2. For ranks and errors see `ShardedModule`.

    Args:
        load: makes the model, in the dtype of its parameters and of the optimizer's state.
        optimizer: learning rate, schedule, clipping.
        max_tokens: tokens of one micro-batch, padding included.
        temperature: of the sampling, for `compute_log_probs` and `supervised_step`.
        packing: several sequences in a row, if the model keeps them apart.
        dtype: of the computation and of exported weights; default: the parameters'.
        options: `strategy.config`.
    """
    model = ShardedModule(
        load,
        lambda model: PolicyModule(model, options.logits_chunk_elements),
        max_tokens=max_tokens,
        packing=packing,
        dtype=dtype,
        options=options,
    )
    return PolicyTrainer(Fsdp2Strategy(model, optimizer), temperature)
