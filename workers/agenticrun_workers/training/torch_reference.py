"""The `fsdp2` strategy of the frozen reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from agenticrun_workers.training import checkpoint
from agenticrun_workers.training.modules import PolicyModule
from agenticrun_workers.training.strategy import Sample, TrainStrategy
from agenticrun_workers.training.torch_backend import TorchBackend
from agenticrun_workers.training.torch_policy import TorchPolicy, log_probs
from agenticrun_workers.types import FloatArray


class TorchReference:
    """A frozen policy; the protocol is `ReferenceStrategy`. For ranks and arguments see `TorchBackend`.

    Args:
        load: makes the model, in the dtype to compute in.
        temperature: of the sampling that the log-probs are about.
    """

    def __init__(
        self, load: Callable[[], PreTrainedModel], *, max_tokens: int = 16_384, temperature: float = 1.0, packing: bool = False
    ) -> None:
        self._temperature = temperature
        self._backend = TorchBackend(PolicyModule(load()).requires_grad_(False), max_tokens=max_tokens, packing=packing)
        self.rank, self.world_size = self._backend.ranks.rank, self._backend.ranks.size

    def compute_log_probs(self, samples: list[Sample]) -> list[FloatArray]:
        """See `LogProbStrategy`."""
        return log_probs(self._backend, samples, self._temperature)

    @torch.no_grad()
    def copy_from(self, policy: TrainStrategy) -> None:
        """See `ReferenceStrategy`. Shard by shard, so the policy must be a `TorchPolicy` of the same model."""
        if not isinstance(policy, TorchPolicy):
            raise TypeError(f"a TorchReference copies from a TorchPolicy, not from {type(policy).__name__}")
        for mine, current in zip(self._backend.module.parameters(), policy.parameters(), strict=True):
            mine.copy_(current)

    def save(self, folder: str) -> None:
        """See `Checkpointed`. The weights only."""
        checkpoint.save(folder, self._backend.module, None, {})

    def load(self, folder: str) -> None:
        """See `Checkpointed`."""
        checkpoint.load(folder, self._backend.module, None, {})
