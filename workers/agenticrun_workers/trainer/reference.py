"""The frozen reference policy."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.checkpoint import CheckpointMismatch
from agenticrun_workers.trainer.fsdp2 import DEFAULTS, FsdpOptions, Load, ShardedModule, score
from agenticrun_workers.trainer.modules import PolicyModule
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.types import FloatArray


class ReferencePolicy:
    """One rank of a frozen policy, with FSDP2. All methods are collective.

    For ranks, the other arguments and errors see `ShardedModule`.

    Args:
        load: makes the model, in the dtype of the computation.
        temperature: of the sampling; log-probs are those of logits / temperature.
    """

    def __init__(
        self,
        load: Load,
        *,
        max_tokens: int = 16_384,
        temperature: float = 1.0,
        packing: bool = False,
        options: FsdpOptions = DEFAULTS,
    ) -> None:
        self._temperature = temperature

        def make(model: PreTrainedModel) -> PolicyModule:
            return PolicyModule(model, options.logits_chunk_elements).requires_grad_(False)

        self._model = ShardedModule(
            load, make, max_tokens=max_tokens, packing=packing, options=options
        )
        ranks = self._model.ranks
        self.rank, self.world_size = ranks.rank, ranks.size
        self.data_rank, self.data_size = ranks.data_rank, ranks.data_size

    def compute_log_probs(self, samples: list[Sample]) -> list[FloatArray]:
        return score(self._model, samples, self._temperature)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the parameters.

        Args:
            weights: all of them, whole, on every rank; as `PolicyTrainer.export_weights` yields.

        Raises:
            CheckpointMismatch: weights of another model.
        """
        parameters = dict(self._model.module.model.named_parameters())
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
        self._model.offload()

    def onload(self) -> None:
        self._model.onload()

    def save(self, folder: str) -> None:
        """Write this rank's shards of the weights. See `PolicyTrainer.save`."""
        checkpoint.save(folder, self._model.module, None, {})

    def load(self, folder: str) -> None:
        checkpoint.load(folder, self._model.module, None, {})
