"""The `fsdp2` strategy of the frozen reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.fsdp2 import TorchBackend
from agenticrun_workers.trainer.modules import PolicyModule
from agenticrun_workers.trainer.options import DEFAULTS, FsdpOptions
from agenticrun_workers.trainer.policy_trainer import log_probs
from agenticrun_workers.trainer.strategy import CheckpointMismatch, Sample
from agenticrun_workers.types import FloatArray


class TorchReference:
    """A frozen policy; the protocol is `ReferenceStrategy`. For ranks and arguments see `TorchBackend`.

    Args:
        load: makes the model, in the dtype to compute in.
        temperature: of the sampling that the log-probs are about.
    """

    def __init__(
        self,
        load: Callable[[], PreTrainedModel],
        *,
        max_tokens: int = 16_384,
        temperature: float = 1.0,
        packing: bool = False,
        options: FsdpOptions = DEFAULTS,
    ) -> None:
        self._temperature = temperature
        module = PolicyModule(load(), options.logits_chunk_elements).requires_grad_(False)
        self._backend = TorchBackend(
            module, max_tokens=max_tokens, packing=packing, options=options
        )
        ranks = self._backend.ranks
        self.rank, self.world_size = ranks.rank, ranks.size
        self.data_rank, self.data_size = ranks.data_rank, ranks.data_size

    def compute_log_probs(self, samples: list[Sample]) -> list[FloatArray]:
        """See `LogProbStrategy`."""
        return log_probs(self._backend, samples, self._temperature)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `ReferenceStrategy`."""
        parameters = dict(self._backend.module.model.named_parameters())
        for name, value in weights:
            parameter = parameters.pop(name, None)
            if parameter is None or parameter.shape != value.shape:
                shape = None if parameter is None else list(parameter.shape)
                raise CheckpointMismatch(
                    f"{name}: the reference needs shape {shape}, the policy has {list(value.shape)}"
                )
            whole = value.to(parameter.device, parameter.dtype)
            sharded = isinstance(parameter, DTensor)
            parameter.copy_(
                distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                if sharded
                else whole
            )
        if parameters:
            raise CheckpointMismatch(
                f"{next(iter(parameters))}: the reference needs it, the policy has none"
            )

    def offload(self) -> None:
        """See `TorchPolicy.offload`."""
        self._backend.offload()

    def onload(self) -> None:
        """See `TorchPolicy.onload`."""
        self._backend.onload()

    def save(self, folder: str) -> None:
        """See `Checkpointed`. The weights only."""
        checkpoint.save(folder, self._backend.module, None, {})

    def load(self, folder: str) -> None:
        """See `Checkpointed`."""
        checkpoint.load(folder, self._backend.module, None, {})
