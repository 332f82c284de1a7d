"""The policy in DeepSpeed's ZeRO 1 to 3, with offload to host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from agenticrun_workers.models.lora import Adapters, whole_weights
from agenticrun_workers.trainer.checkpoint import load_state, save_state
from agenticrun_workers.trainer.deepspeed.engine import ZeroEngine, restore, state_of
from agenticrun_workers.trainer.deepspeed.options import DeepSpeedOptions
from agenticrun_workers.trainer.fsdp2 import FsdpOptions, ShardedModule, score
from agenticrun_workers.trainer.micro_batch import MicroBatch
from agenticrun_workers.trainer.modules import PolicyModule
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PartLoss, PolicyTrainer
from agenticrun_workers.trainer.ranks import join_alone
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.types import FloatArray


class DeepSpeedStrategy:
    """Implements `Strategy`. For the arguments see `deepspeed_policy`."""

    def __init__(
        self,
        model: ShardedModule[PolicyModule],
        optimizer: OptimizerSpec,
        options: DeepSpeedOptions,
    ) -> None:
        self.model = model
        self.ranks, self.batcher = model.ranks, model.batcher
        self.steps = ZeroEngine(model.module, optimizer, options.config(optimizer, model.dtype))
        self.adapters = Adapters.of(model.module.model, self.steps.whole, model.ranks.rank)
        self._on_host = options.offloads_optimizer

    def score(self, samples: list[Sample], temperature: float) -> list[FloatArray]:
        """See `Strategy`."""
        return score(self.model, samples, temperature)

    def forward_backward(
        self, batches: list[MicroBatch], temperature: float, loss: PartLoss
    ) -> None:
        """See `Strategy`."""
        for number, batch in enumerate(batches, 1):
            part = loss(batch, *self.steps.forward(batch, temperature))
            self.steps.backward(part, last=number == len(batches))

    def optimizer_step(self, rate: float, *, scheduled: bool = True) -> float:
        """See `Strategy`."""
        return self.steps.step(rate, scheduled=scheduled)

    def gradients(self) -> dict[str, Tensor]:
        """See `Strategy`."""
        return {
            name.removeprefix("model."): gradient
            for name, gradient in self.steps.gradients().items()
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Strategy`. Tied parameters have the name that `named_parameters` gives."""
        for name, weight in whole_weights(self.model.module.model, self.steps.whole):
            if self.ranks.rank == 0:
                yield name, weight.to(self.model.dtype)

    def hugging_face_model(self) -> PreTrainedModel:
        """See `Strategy`."""
        return self.model.module.model

    def save(self, folder: str, progress: dict[str, int]) -> None:
        """See `Strategy`."""
        save_state(folder, state_of(self.steps), progress)

    def load(self, folder: str, progress: dict[str, int]) -> dict[str, int]:
        """See `Strategy`."""
        state = state_of(self.steps)
        progress = load_state(folder, state, progress)
        restore(self.steps, state)
        return progress

    def offload(self) -> None:
        """Move the optimizer's state to host memory. The weights stay and can be exported."""
        if not self._on_host:
            self.steps.move(torch.device("cpu"))
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """See `Strategy`."""
        if not self._on_host:
            self.steps.move(self.model.device)


def deepspeed_policy(
    load: Callable[[], PreTrainedModel],
    optimizer: OptimizerSpec,
    *,
    config: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    max_tokens: int = 16_384,
    temperature: float = 1.0,
    packing: bool = False,
) -> PolicyTrainer:
    """Return a policy that trains with DeepSpeed.

    With more than one rank `torch.distributed` must be initialised before.

    Args:
        load: makes the model, the same on every rank.
        optimizer: learning rate, schedule, clipping.
        config: DeepSpeed's own options, see `DeepSpeedOptions`.
        dtype: of the computation and of exported weights: float32 or bfloat16. Optimizer state and
            master weights are float32.
        max_tokens: tokens of one micro-batch, padding included.
        temperature: of the sampling, for `compute_log_probs` and `supervised_step`.
        packing: several sequences in a row, if the model keeps them apart.

    Raises:
        ValueError: an option is wrong, or decided by another field; names it.
    """
    options = DeepSpeedOptions.parse(config or {}, dtype)
    module = PolicyModule(load(), options.logits_chunk_elements)
    if not dist.is_initialized():
        join_alone(next(module.parameters()).device)
    model = ShardedModule(
        module,
        max_tokens=max_tokens,
        packing=packing,
        dtype=dtype,
        options=FsdpOptions(gradient_checkpointing=options.gradient_checkpointing),
        sharded=False,
    )
    return PolicyTrainer(DeepSpeedStrategy(model, optimizer, options), temperature)
