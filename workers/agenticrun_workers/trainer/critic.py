"""The value model under training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agenticrun_workers.algorithms.losses import (
    Aggregation,
    StepTotals,
    token_coefficients,
    value_loss,
)
from agenticrun_workers.models.devices import device_span
from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.checkpoint import HostBuffers, Snapshot
from agenticrun_workers.trainer.micro_batch import MicroBatch, responses_and_end, weighted
from agenticrun_workers.trainer.modules import ValueModule
from agenticrun_workers.trainer.optimizer import Optimizer, OptimizerSpec
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.trainer.sharded_module import DEFAULTS, FsdpOptions, Load, ShardedModule
from agenticrun_workers.types import FloatArray

SUMS = ("loss", "value", "vpred", "clipfrac", "error")


@dataclass(frozen=True, slots=True)
class ValueLossSpec:
    """The loss of `CriticTrainer.train_step`."""

    clip: float | None = None
    """Furthest that a value may move from `old_values_T` in one step's loss; None: no limit."""
    aggregation: Aggregation = "token-mean"
    aggregation_norm: float = 1.0


class CriticTrainer:
    """One rank of a value model under training, with FSDP2. All methods are collective.

    For ranks, the other arguments and errors see `ShardedModule`.

    Args:
        load: makes a causal language model; the critic starts with its decoder, in the dtype of its
            parameters and of the optimizer's state.
        optimizer: learning rate, schedule, clipping.
        dtype: of the computation; default: the parameters'.
    """

    def __init__(
        self,
        load: Load,
        optimizer: OptimizerSpec,
        *,
        max_tokens: int = 16_384,
        packing: bool = False,
        dtype: torch.dtype | None = None,
        options: FsdpOptions = DEFAULTS,
    ) -> None:
        self._model = ShardedModule(
            load,
            ValueModule,
            max_tokens=max_tokens,
            packing=packing,
            dtype=dtype,
            options=options,
        )
        self._optimizer = Optimizer(self._model.module, optimizer, self._model.ranks)
        self._buffers = HostBuffers()
        ranks = self._model.ranks
        self.rank, self.world_size = ranks.rank, ranks.size
        self.data_rank, self.data_size = ranks.data_rank, ranks.data_size

    @torch.no_grad()
    def compute_values(self, samples: list[Sample]) -> list[FloatArray]:
        """Return the values of each of this rank's samples, float32 [T + 1].

        Each is that of the text before a response token, 0 before other tokens; the last one is
        that of the whole text.
        """
        found = [np.zeros(len(sample.tokens_T) + 1, np.float32) for sample in samples]
        for batch in self._model.batcher.split(samples, responses_and_end):
            batch.put(self._model.module(batch), found)
        self._model.reshard()
        return found

    def train_step(self, samples: list[Sample], loss: ValueLossSpec) -> Mapping[str, float]:
        """Take one optimizer step towards `returns_T`; skip it as `PolicyTrainer.train_step` does.

        Returns:
            metrics, equal on every rank; without a weighted token only critic/skipped_steps. Over
            weighted tokens critic/value is the mean return, critic/vpred the mean value,
            critic/error the mean (V - G)^2.

        Raises:
            NonFiniteGradient: too many in a row.
            ValueError: samples lack an array that the loss reads.
        """
        totals = self._model.batcher.totals(samples)
        rate = self._optimizer.rate
        metrics: dict[str, float] = {}
        if totals.weight == 0:
            self._optimizer.pass_over()
        else:
            sums = self._backward(samples, loss, totals)
            metrics = {f"critic/{name}": value for name, value in zip(SUMS, sums, strict=True)}
            with device_span("optimizer_step"):
                metrics["critic/grad_norm"] = self._optimizer.step(rate)
            metrics["critic/lr"] = rate
        return metrics | {"critic/skipped_steps": float(self._optimizer.skipped)}

    def gradients(self, samples: list[Sample], loss: ValueLossSpec) -> dict[str, Tensor]:
        """Return the gradient that `train_step` would use, whole and unclipped, by name."""
        self._backward(samples, loss, self._model.batcher.totals(samples))
        return self._optimizer.gradients()

    @property
    def rate_falls_from(self) -> float:
        return self._optimizer.falls_from

    def stretch_schedule(self, steps_left: int) -> None:
        self._optimizer.stretch(steps_left)

    def offload(self) -> None:
        self._optimizer.offload()
        self._model.offload()

    def onload(self) -> None:
        self._model.onload()
        self._optimizer.onload(self._model.home)

    def snapshot(self) -> Snapshot:
        optimizer = self._optimizer
        return checkpoint.snapshot(
            self._model.module, optimizer.adamw, optimizer.counts(), self._buffers
        )

    def reserve_snapshot(self) -> Callable[[], None]:
        return checkpoint.reserve(self._model.module, self._optimizer.adamw, self._buffers)

    def load(self, folder: str) -> None:
        self._optimizer.restore(
            checkpoint.load(
                folder, self._model.module, self._optimizer.adamw, self._optimizer.counts()
            )
        )

    def _backward(
        self, samples: list[Sample], spec: ValueLossSpec, totals: StepTotals
    ) -> list[float]:
        """Sum the gradient over all micro-batches; return the metrics of `SUMS` over all ranks."""
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self._model.device)
        for batch in self._model.batcher.split(samples, weighted):
            with device_span("forward"):
                loss, metrics = self._loss(batch, samples, spec, totals)
            with device_span("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            sums += metrics
        return self._model.ranks.sum(sums.tolist())

    def _loss(
        self, batch: MicroBatch, samples: list[Sample], spec: ValueLossSpec, totals: StepTotals
    ) -> tuple[Tensor, Tensor]:
        values_N = self._model.module(batch)
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
