"""The `fsdp2` strategy of the critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agenticrun_workers.algorithms.aggregation import StepTotals, token_coefficients
from agenticrun_workers.algorithms.losses import value_loss
from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.fsdp2 import TorchBackend
from agenticrun_workers.trainer.micro_batch import MicroBatch, responses_and_end, weighted
from agenticrun_workers.trainer.modules import ValueModule
from agenticrun_workers.trainer.optimizer import OptimizerSpec, Updater
from agenticrun_workers.trainer.options import DEFAULTS, FsdpOptions
from agenticrun_workers.trainer.strategy import Sample, ValueLossSpec, Values

SUMS = ("loss", "value", "vpred", "clipfrac", "error")


class TorchCritic:
    """A value function under training; the protocol is `CriticStrategy`. For ranks and arguments see `TorchBackend`.

    Args:
        load: makes the causal language model whose decoder the critic begins with, in the dtype of its parameters and of the
            optimizer's state.
        optimizer: learning rate, schedule, clipping.
        dtype: to compute in; default: the parameters'.
    """

    def __init__(
        self,
        load: Callable[[], PreTrainedModel],
        optimizer: OptimizerSpec,
        *,
        max_tokens: int = 16_384,
        packing: bool = False,
        dtype: torch.dtype | None = None,
        options: FsdpOptions = DEFAULTS,
    ) -> None:
        self._backend = TorchBackend(
            ValueModule(load()),
            max_tokens=max_tokens,
            packing=packing,
            dtype=dtype,
            options=options,
        )
        self._updater = Updater(self._backend.module, optimizer, self._backend.ranks)
        ranks = self._backend.ranks
        self.rank, self.world_size = ranks.rank, ranks.size
        self.data_rank, self.data_size = ranks.data_rank, ranks.data_size

    @torch.no_grad()
    def compute_values(self, samples: list[Sample]) -> list[Values]:
        """See `CriticStrategy`."""
        found = [np.zeros(len(sample.tokens_T) + 1, np.float32) for sample in samples]
        for batch in self._backend.micro_batches(samples, responses_and_end):
            batch.put(self._backend.module(batch), found)
        self._backend.reshard()
        return [Values(values_T1[:-1], float(values_T1[-1])) for values_T1 in found]

    def train_step(self, samples: list[Sample], loss: ValueLossSpec) -> Mapping[str, float]:
        """See `CriticStrategy`.

        critic/value is the mean return, critic/vpred the mean value, critic/error the mean (V - G)^2, over weighted tokens.
        """
        totals = self._backend.totals(samples)
        rate, norm, sums = self._updater.rate, 0.0, [0.0] * len(SUMS)
        if totals.weight == 0:
            self._updater.skip()
        else:
            sums = self._backward(samples, loss, totals)
            norm = self._updater.step(rate)
        return {
            **{f"critic/{name}": value for name, value in zip(SUMS, sums, strict=True)},
            "critic/grad_norm": norm,
            "critic/lr": rate,
            "critic/skipped_steps": float(self._updater.skipped),
        }

    def gradients(self, samples: list[Sample], loss: ValueLossSpec) -> dict[str, Tensor]:
        """The gradient that `train_step` would use, whole and unclipped, by parameter name; nothing changes. Collective."""
        self._backward(samples, loss, self._backend.totals(samples))
        return self._updater.gradients()

    def offload(self) -> None:
        """See `TorchPolicy.offload`."""
        self._updater.move(torch.device("cpu"))
        self._backend.offload()

    def onload(self) -> None:
        """See `TorchPolicy.onload`."""
        self._backend.onload()
        self._updater.move(self._backend.home)

    def save(self, folder: str) -> None:
        """See `Checkpointed`."""
        checkpoint.save(
            folder, self._backend.module, self._updater.optimizer, self._updater.counts()
        )

    def load(self, folder: str) -> None:
        """See `Checkpointed`."""
        self._updater.restore(
            checkpoint.load(
                folder, self._backend.module, self._updater.optimizer, self._updater.counts()
            )
        )

    def _backward(
        self, samples: list[Sample], spec: ValueLossSpec, totals: StepTotals
    ) -> list[float]:
        """Sum the gradient over all micro-batches; returns the metrics in the order of `SUMS`, over all ranks."""
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self._backend.device)
        for batch in self._backend.micro_batches(samples, weighted):
            loss, metrics = self._loss(batch, samples, spec, totals)
            loss.backward()  # type: ignore[no-untyped-call]
            sums += metrics
        return self._backend.ranks.sum(sums.tolist())

    def _loss(
        self, batch: MicroBatch, samples: list[Sample], spec: ValueLossSpec, totals: StepTotals
    ) -> tuple[Tensor, Tensor]:
        values_N = self._backend.module(batch)
        dtype = values_N.dtype
        weight_N = batch.pick(samples, "weight_T", dtype)
        returns_N = batch.pick(samples, "returns_T", dtype)
        old_N = None if spec.clip is None else batch.pick(samples, "old_values_T", dtype)
        token = value_loss(values_N, returns_N, old_N, spec.clip)
        coefficients_N = token_coefficients(
            weight_N, batch.sequence_N, totals, spec.aggregation, spec.aggregation_norm
        )
        loss = (coefficients_N * token.loss_N).sum()
        fixed_N, share_N = values_N.detach(), weight_N / totals.weight
        per_token = (returns_N, fixed_N, token.clipped_N, (fixed_N - returns_N).square())
        return loss, torch.stack(
            [loss.detach().double(), *((share_N * values).sum().double() for values in per_token)]
        )
