"""The `fsdp2` strategy of the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agenticrun_workers.algorithms.aggregation import StepTotals
from agenticrun_workers.algorithms.segments import Floats
from agenticrun_workers.models.lora import Adapters, whole_weights
from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.actor_loss import ActorLoss, SupervisedLoss
from agenticrun_workers.trainer.actor_metrics import ActorMetrics, nothing_learned
from agenticrun_workers.trainer.export import write_folder
from agenticrun_workers.trainer.fsdp2 import TorchBackend
from agenticrun_workers.trainer.micro_batch import responses, weighted
from agenticrun_workers.trainer.modules import PolicyModule
from agenticrun_workers.trainer.optimizer import OptimizerSpec, Updater
from agenticrun_workers.trainer.options import DEFAULTS, FsdpOptions
from agenticrun_workers.trainer.ranks import whole
from agenticrun_workers.trainer.strategy import LossSpec, Sample
from agenticrun_workers.types import FloatArray


class TorchPolicy:
    """A policy under training; the protocol is `TrainStrategy`. For ranks and arguments see `TorchBackend`.

    Args:
        load: makes the model, in the dtype of its parameters and of the optimizer's state.
        optimizer: learning rate, schedule, clipping.
        temperature: of the sampling that the log-probs are about, for `compute_log_probs` and `supervised_step`.
        dtype: to compute in, and of exported weights; default: the parameters'.
    """

    def __init__(
        self,
        load: Callable[[], PreTrainedModel],
        optimizer: OptimizerSpec,
        *,
        max_tokens: int = 16_384,
        temperature: float = 1.0,
        packing: bool = False,
        dtype: torch.dtype | None = None,
        options: FsdpOptions = DEFAULTS,
    ) -> None:
        self.policy_version = 0
        self._temperature = temperature
        module = PolicyModule(load(), options.logits_chunk_elements)
        self._backend = TorchBackend(
            module, max_tokens=max_tokens, packing=packing, dtype=dtype, options=options
        )
        self._updater = Updater(self._backend.module, optimizer, self._backend.ranks)
        ranks = self._backend.ranks
        self.rank, self.world_size = ranks.rank, ranks.size
        self.data_rank, self.data_size = ranks.data_rank, ranks.data_size
        self.adapters = Adapters.of(module.model, _whole, self.rank)

    def compute_log_probs(self, samples: list[Sample]) -> list[FloatArray]:
        """See `LogProbStrategy`."""
        return log_probs(self._backend, samples, self._temperature)

    def supervised_step(self, samples: list[Sample]) -> Mapping[str, float]:
        """See `TrainStrategy`."""
        totals = self._backend.totals(samples)
        rate = self._updater.spec.supervised_learning_rate or self._updater.spec.learning_rate
        loss, norm = SupervisedLoss(samples, totals), 0.0
        if totals.weight == 0:
            self._updater.skip()
        else:
            for batch in self._backend.micro_batches(samples, weighted):
                loss(batch, *self._backend.module(batch, self._temperature)).backward()  # type: ignore[no-untyped-call]
            norm = self._updater.step(rate, scheduled=False)
        return {
            "warmup/loss": self._backend.ranks.sum([loss.total])[0],
            "warmup/grad_norm": norm,
            "warmup/lr": rate,
        }

    def train_step(self, samples: list[Sample], loss: LossSpec) -> Mapping[str, float]:
        """See `TrainStrategy`."""
        totals = self._backend.totals(samples)
        rate, norm = self._updater.rate, 0.0
        if totals.weight == 0:
            self._updater.skip()
            metrics = {**nothing_learned(), **self._backend.balance([])}
        else:
            metrics = self._backward(samples, loss, totals)
            norm = self._updater.step(rate)
        return {
            **metrics,
            "actor/grad_norm": norm,
            "actor/lr": rate,
            "actor/skipped_steps": float(self._updater.skipped),
        }

    def gradients(self, samples: list[Sample], loss: LossSpec) -> dict[str, Tensor]:
        """The gradient that `train_step` would use, whole and unclipped, by parameter name; nothing changes. Collective."""
        self._backward(samples, loss, self._backend.totals(samples))
        return {
            name.removeprefix("model."): gradient
            for name, gradient in self._updater.gradients().items()
        }

    def sum_over_data(self, values: Floats) -> Floats:
        """See `TrainStrategy`."""
        return np.array(self._backend.ranks.sum(values.tolist()), np.float64)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainStrategy`. Tied parameters come once, under the name that `named_parameters` of the model gives."""
        for name, full in self._whole_parameters():
            if self.rank == 0:
                yield name, full

    def export_folder(self, folder: Path, files: Mapping[str, bytes]) -> None:
        """See `TrainStrategy`."""
        weights = {
            name: full.to("cpu", copy=True)
            for name, full in self._whole_parameters()
            if self.rank == 0
        }
        if self.rank == 0:
            write_folder(folder, self._backend.module.model, weights, files)

    def save(self, folder: str) -> None:
        """See `Checkpointed`."""
        checkpoint.save(folder, self._backend.module, self._updater.optimizer, self._progress())

    def load(self, folder: str) -> None:
        """See `Checkpointed`."""
        progress = checkpoint.load(
            folder, self._backend.module, self._updater.optimizer, self._progress()
        )
        self._updater.restore(progress)
        self.policy_version = progress["policy_version"]

    def offload(self) -> None:
        """Free the device for an engine that shares it: everything moves to host memory, until `onload`."""
        self._updater.move(torch.device("cpu"))
        self._backend.offload()

    def onload(self) -> None:
        """Everything comes back to the device."""
        self._backend.onload()
        self._updater.move(self._backend.home)

    def _progress(self) -> dict[str, int]:
        return {**self._updater.counts(), "policy_version": self.policy_version}

    def _whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in whole_weights(self._backend.module.model, _whole):
            yield name, weight.to(self._backend.dtype)

    def _backward(
        self, samples: list[Sample], spec: LossSpec, totals: StepTotals
    ) -> dict[str, float]:
        """Sum the gradient over all micro-batches; returns the metrics of the loss and of the ranks' balance."""
        metrics = ActorMetrics(totals, self._backend.device)
        part = ActorLoss(samples, spec, totals, self._backend.ranks.max, metrics)
        batches = self._backend.micro_batches(samples, weighted)
        for batch in batches:
            part(batch, *self._backend.module(batch, spec.temperature)).backward()  # type: ignore[no-untyped-call]
        return metrics.result(self._backend.ranks) | self._backend.balance(batches)


def _whole(parameter: nn.Parameter) -> Tensor:
    return whole(parameter.detach())


@torch.no_grad()
def log_probs(
    backend: TorchBackend[PolicyModule], samples: list[Sample], temperature: float
) -> list[FloatArray]:
    """Log-probs of the response tokens of each sample, 0 elsewhere. Collective."""
    result = [np.zeros(len(sample.tokens_T), np.float32) for sample in samples]
    for batch in backend.micro_batches(samples, responses):
        batch.put(backend.module(batch, temperature)[0], result)
    backend.reshard()
    return result
