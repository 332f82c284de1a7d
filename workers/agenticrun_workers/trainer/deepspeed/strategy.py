"""The `deepspeed` strategy of the policy: ZeRO 1 to 3, with offload to host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from agenticrun_workers.algorithms.aggregation import StepTotals
from agenticrun_workers.algorithms.segments import Floats
from agenticrun_workers.models.lora import Adapters, whole_weights
from agenticrun_workers.trainer.actor_loss import ActorLoss, SupervisedLoss
from agenticrun_workers.trainer.actor_metrics import ActorMetrics, nothing_learned
from agenticrun_workers.trainer.checkpoint import load_state, save_state
from agenticrun_workers.trainer.deepspeed.engine import ZeroEngine
from agenticrun_workers.trainer.deepspeed.options import DeepSpeedOptions
from agenticrun_workers.trainer.deepspeed_state import restore, state_of
from agenticrun_workers.trainer.export import write_folder
from agenticrun_workers.trainer.fsdp2 import TorchBackend
from agenticrun_workers.trainer.micro_batch import MicroBatch, weighted
from agenticrun_workers.trainer.modules import PolicyModule
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.options import FsdpOptions
from agenticrun_workers.trainer.policy_trainer import log_probs
from agenticrun_workers.trainer.ranks import join_alone
from agenticrun_workers.trainer.strategy import LossSpec, Sample
from agenticrun_workers.types import FloatArray


class DeepSpeedPolicy:
    """A policy under training; the protocol is `TrainStrategy`. With more than one rank `torch.distributed` must be initialised before.

    Args:
        load: makes the model, the same on every rank.
        optimizer: learning rate, schedule, clipping.
        config: DeepSpeed's own options, see `DeepSpeedOptions`.
        dtype: to compute in and of exported weights: float32 or bfloat16. Optimizer and masters are float32.
        max_tokens: tokens of one micro-batch, padding included.
        temperature: of the sampling that the log-probs are about, for `compute_log_probs` and `supervised_step`.
        packing: several sequences in a row, if the model proves to keep them apart.

    Raises:
        ValueError: naming the option that is wrong, or decided by another field.
    """

    def __init__(
        self,
        load: Callable[[], PreTrainedModel],
        optimizer: OptimizerSpec,
        *,
        config: Mapping[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
        max_tokens: int = 16_384,
        temperature: float = 1.0,
        packing: bool = False,
    ) -> None:
        options = DeepSpeedOptions.parse(config or {}, dtype)
        self.policy_version = 0
        self._temperature = temperature
        self._dtype = dtype
        self._on_host = options.offloads_optimizer
        module = PolicyModule(load(), options.logits_chunk_elements)
        if not dist.is_initialized():
            join_alone(next(module.parameters()).device)
        layers = FsdpOptions(gradient_checkpointing=options.gradient_checkpointing)
        self._backend = TorchBackend(
            module, max_tokens=max_tokens, packing=packing, dtype=dtype, options=layers, shard=False
        )
        self._engine = ZeroEngine(module, optimizer, options.config(optimizer, dtype))
        ranks = self._backend.ranks
        self.rank, self.world_size = ranks.rank, ranks.size
        self.data_rank, self.data_size = ranks.rank, ranks.size
        self.adapters = Adapters.of(module.model, self._engine.whole, self.rank)

    def compute_log_probs(self, samples: list[Sample]) -> list[FloatArray]:
        """See `LogProbStrategy`."""
        return log_probs(self._backend, samples, self._temperature)

    def supervised_step(self, samples: list[Sample]) -> Mapping[str, float]:
        """See `TrainStrategy`."""
        totals = self._backend.totals(samples)
        rate = self._engine.spec.supervised_learning_rate or self._engine.spec.learning_rate
        loss, norm = SupervisedLoss(samples, totals), 0.0
        if totals.weight == 0:
            self._engine.skip()
        else:
            self._add_gradients(
                self._backend.micro_batches(samples, weighted), loss, self._temperature
            )
            norm = self._engine.step(rate, scheduled=False)
        return {
            "warmup/loss": self._backend.ranks.sum([loss.total])[0],
            "warmup/grad_norm": norm,
            "warmup/lr": rate,
        }

    def train_step(self, samples: list[Sample], loss: LossSpec) -> Mapping[str, float]:
        """See `TrainStrategy`."""
        totals = self._backend.totals(samples)
        rate, norm = self._engine.rate, 0.0
        if totals.weight == 0:
            self._engine.skip()
            metrics = {**nothing_learned(), **self._backend.balance([])}
        else:
            metrics = self._backward(samples, loss, totals)
            norm = self._engine.step(rate)
        return {
            **metrics,
            "actor/grad_norm": norm,
            "actor/lr": rate,
            "actor/skipped_steps": float(self._engine.skipped),
        }

    def gradients(self, samples: list[Sample], loss: LossSpec) -> dict[str, Tensor]:
        """The gradient that `train_step` would use, whole and unclipped, by parameter name; nothing changes. Collective."""
        self._backward(samples, loss, self._backend.totals(samples))
        return {
            name.removeprefix("model."): gradient
            for name, gradient in self._engine.gradients().items()
        }

    def sum_over_data(self, values: Floats) -> Floats:
        """See `TrainStrategy`."""
        return np.array(self._backend.ranks.sum(values.tolist()), np.float64)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainStrategy`. Tied parameters come once, under the name that `named_parameters` of the model gives."""
        for name, weight in whole_weights(self._backend.module.model, self._engine.whole):
            if self.rank == 0:
                yield name, weight.to(self._dtype)

    def export_folder(self, folder: Path, files: Mapping[str, bytes]) -> None:
        """See `TrainStrategy`."""
        weights = {name: weight.to("cpu", copy=True) for name, weight in self.export_weights()}
        if self.rank == 0:
            write_folder(folder, self._backend.module.model, weights, files)

    def save(self, folder: str) -> None:
        """See `Checkpointed`."""
        save_state(folder, state_of(self._engine), self._progress())

    def load(self, folder: str) -> None:
        """See `Checkpointed`."""
        state = state_of(self._engine)
        progress = load_state(folder, state, self._progress())
        restore(self._engine, state)
        self._engine.restore(progress)
        self.policy_version = progress["policy_version"]

    def offload(self) -> None:
        """Leave memory of the device to an engine that shares it: the optimizer's state moves to host memory, until `onload`.

        The weights that are computed with stay, and can be exported.
        """
        if not self._on_host:
            self._engine.move(torch.device("cpu"))
        if self._backend.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Everything comes back to the device."""
        if not self._on_host:
            self._engine.move(self._backend.device)

    def _progress(self) -> dict[str, int]:
        return {**self._engine.counts(), "policy_version": self.policy_version}

    def _backward(
        self, samples: list[Sample], spec: LossSpec, totals: StepTotals
    ) -> dict[str, float]:
        """Sum the gradient over all micro-batches; returns metrics."""
        metrics = ActorMetrics(totals, self._backend.device)
        part = ActorLoss(samples, spec, totals, self._backend.ranks.max, metrics)
        batches = self._backend.micro_batches(samples, weighted)
        self._add_gradients(batches, part, spec.temperature)
        return {**metrics.result(self._backend.ranks), **self._backend.balance(batches)}

    def _add_gradients(
        self,
        batches: list[MicroBatch],
        part: Callable[[MicroBatch, Tensor, Tensor], Tensor],
        temperature: float,
    ) -> None:
        for number, batch in enumerate(batches, 1):
            loss = part(batch, *self._engine.forward(batch, temperature))
            self._engine.backward(loss, last=number == len(batches))
