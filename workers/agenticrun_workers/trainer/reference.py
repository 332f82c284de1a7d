"""The frozen reference policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from agenticrun_workers.models.stored_names import ParameterAssembly, stored_buffers
from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.checkpoint import CheckpointMismatch, HostBuffers, Snapshot
from agenticrun_workers.trainer.modules import PolicyModule
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.trainer.sharded_module import DEFAULTS, FsdpOptions, Load, ShardedModule
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
        self._buffers = HostBuffers()
        ranks = self._model.ranks
        self.rank, self.world_size = ranks.rank, ranks.size
        self.data_rank, self.data_size = ranks.data_rank, ranks.data_size

    def compute_log_probs(self, samples: list[Sample]) -> list[FloatArray]:
        return self._model.score(samples, self._temperature)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights.

        Args:
            weights: all of them, whole, on every rank; as `PolicyTrainer.export_weights` yields.

        Raises:
            CheckpointMismatch: weights of another model.
        """
        model = self._model.module.model
        tensors = {**dict(model.named_parameters()), **stored_buffers(model)}
        assembly = ParameterAssembly(model, {name: held.shape for name, held in tensors.items()})
        for weight, value in weights:
            if (shape := assembly.shape(weight)) != value.shape:
                raise CheckpointMismatch(
                    f"{weight}: the reference needs shape {None if shape is None else list(shape)},"
                    f" the policy has {list(value.shape)}"
                )
            if (complete := assembly.add(weight, value)) is None:
                continue
            name, whole = complete
            held = tensors[name]
            whole = whole.to(held.device, held.dtype)
            held.copy_(
                distribute_tensor(whole, held.device_mesh, held.placements)
                if isinstance(held, DTensor)
                else whole
            )
        if (missing := next(assembly.missing, None)) is not None:
            raise CheckpointMismatch(f"{missing}: the reference needs it, the policy has none")

    def offload(self) -> None:
        self._model.offload()

    def onload(self) -> None:
        self._model.onload()

    def snapshot(self) -> Snapshot:
        """Copy this rank's shards of the weights. See `PolicyTrainer.snapshot`."""
        return checkpoint.snapshot(self._model.module, None, {}, self._buffers)

    def reserve_snapshot(self) -> Callable[[], None]:
        return checkpoint.reserve(self._model.module, None, self._buffers)

    def load(self, folder: str) -> None:
        checkpoint.load(folder, self._model.module, None, {})
