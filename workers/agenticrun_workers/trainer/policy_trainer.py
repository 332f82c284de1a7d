"""The trainer of a policy.

One optimizer step is a `forward_backward` and an `optimizer_step` of a strategy. A strategy (fsdp2,
megatron, deepspeed) supplies the model, the reduction of gradients over ranks, and the state.
Everything else about a step is in this module. There is one instance per rank; all ranks make the
same calls in the same order.

Denominators are global over the optimizer step: splitting samples into ranks, micro-batches and
packs in another way does not change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from agenticrun_workers.algorithms.losses import StepTotals
from agenticrun_workers.algorithms.segments import Floats
from agenticrun_workers.models.devices import device_span
from agenticrun_workers.models.lora import Adapters
from agenticrun_workers.models.pretrained import write_model
from agenticrun_workers.trainer.actor_loss import (
    ActorLoss,
    ActorMetrics,
    LossSpec,
    SupervisedLoss,
)
from agenticrun_workers.trainer.checkpoint import Snapshot
from agenticrun_workers.trainer.micro_batch import MicroBatch, MicroBatcher, weighted
from agenticrun_workers.trainer.optimizer import StepCounts
from agenticrun_workers.trainer.ranks import Ranks
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.types import FloatArray

PartLoss = Callable[[MicroBatch, Tensor, Tensor], Tensor]
"""Loss of a micro-batch (a scalar) from its log-probs [N] and entropies [N]. Parts add up."""


class Strategy(Protocol):
    """A policy's model in one parallel layout. All methods are collective.

    Ranks of one `Ranks.data_rank` share a model (by tensor, pipeline, context or sequence
    parallelism): they get the same samples in the same order, and all return the same.
    """

    @property
    def ranks(self) -> Ranks:
        """Return this process's position among the trainer's ranks."""
        ...

    @property
    def batcher(self) -> MicroBatcher:
        """Return the splitter of samples into micro-batches."""
        ...

    @property
    def steps(self) -> StepCounts:
        """Return the count of optimizer steps so far, with the specification of the optimizer."""
        ...

    @property
    def adapters(self) -> Adapters | None:
        """Return the adapters, if nothing else trains."""
        ...

    def score(self, samples: list[Sample], temperature: float) -> list[FloatArray]:
        """Return the log-probs of each sample's selected tokens, of logits / temperature."""
        ...

    def forward_backward(
        self, batches: list[MicroBatch], temperature: float, loss: PartLoss
    ) -> None:
        """Add the gradient of the summed parts, over all ranks, to the parameters' gradients.

        Args:
            batches: all of the optimizer step, the same number on every rank.
            temperature: log-probs and entropies are those of logits / temperature.
            loss: called only on ranks that have the model's output.
        """
        ...

    def router_metrics(self) -> dict[str, float]:
        """Return `router/...` of the last `forward_backward`, equal on every rank.

        Empty for a dense model.
        """
        ...

    def optimizer_step(self, rate: float, *, scheduled: bool = True) -> float:
        """Clip the gradients, take a step at this learning rate, and clear them.

        A gradient that is not finite changes only the count of steps.

        Args:
            rate: learning rate.
            scheduled: the step moves the learning-rate schedule on.

        Returns:
            the norm of the gradient before clipping.

        Raises:
            NonFiniteGradient: more than `max_skipped_steps` times in a row.
        """
        ...

    def reset_optimizer(self) -> None:
        """Forget AdamW's moments and its number of steps."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients so far, whole, by Hugging Face's names, and clear them."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters by Hugging Face's names, on rank 0 only."""
        ...

    def hugging_face_model(self) -> PreTrainedModel:
        """Return a model with the config of an exported folder, on any device. Rank 0 only."""
        ...

    def snapshot(self, progress: dict[str, int]) -> Snapshot:
        """Copy this rank's shards, and `progress`, into memory that the next snapshot reuses."""
        ...

    def reserve_snapshot(self) -> Callable[[], None]:
        """Return a function that allocates that memory, for any thread."""
        ...

    def load(self, folder: str, progress: dict[str, int]) -> dict[str, int]:
        """Restore a saved snapshot; return its progress over the given defaults."""
        ...

    def offload(self) -> None:
        """Move parameters and optimizer to the host."""
        ...

    def onload(self) -> None:
        """Move them back to the device."""
        ...


class PolicyTrainer:
    """One rank of a policy under training. All methods are collective.

    Args:
        strategy: the model and its parallel layout.
        temperature: of the sampling, for `compute_log_probs` and `supervised_step`.

    Attributes:
        policy_version: number of batches that the policy was trained on.
        data_rank: this rank's part of a batch, below `data_size`.
        adapters: the adapters, if nothing else trains.
    """

    def __init__(self, strategy: Strategy, temperature: float = 1.0) -> None:
        self.strategy = strategy
        self.policy_version = 0
        self.adapters = strategy.adapters
        self._temperature = temperature
        ranks = strategy.ranks
        self.rank, self.world_size = ranks.rank, ranks.size
        self.data_rank, self.data_size = ranks.data_rank, ranks.data_size

    def compute_log_probs(self, samples: list[Sample]) -> list[FloatArray]:
        """Return the log-probs [T] of each sample's response tokens, 0 elsewhere.

        They are those of logits / temperature. `samples` are this rank's only.
        """
        return self.strategy.score(samples, self._temperature)

    def train_step(self, samples: list[Sample], loss: LossSpec) -> Mapping[str, float]:
        """Take one optimizer step on this rank's share of a mini-batch.

        A non-finite gradient changes nothing and is counted in `actor/skipped_steps`. A mini-batch
        without a weighted token on any rank is no step: it only moves the schedule on.

        Returns:
            metrics `actor/...`, `train/...` and `router/...`, equal on every rank; without a
            weighted token only `actor/skipped_steps`.

        Raises:
            NonFiniteGradient: too many in a row.
            ValueError: samples lack an array that the loss reads.
        """
        totals = self.strategy.batcher.totals(samples)
        rate = self.strategy.steps.rate
        metrics: dict[str, float] = {}
        if totals.weight == 0:
            self.strategy.steps.pass_over()
        else:
            metrics = self._forward_backward(samples, loss, totals)
            with device_span("optimizer_step"):
                metrics["actor/grad_norm"] = self.strategy.optimizer_step(rate)
            metrics["actor/lr"] = rate
        return metrics | {"actor/skipped_steps": float(self.strategy.steps.skipped)}

    def supervised_step(self, samples: list[Sample]) -> Mapping[str, float]:
        """Take one optimizer step of weighted next-token cross-entropy (warm-up).

        Returns:
            metrics `warmup/...`, equal on every rank.
        """
        totals = self.strategy.batcher.totals(samples)
        spec = self.strategy.steps.spec
        rate = spec.supervised_learning_rate or spec.learning_rate
        loss, norm = SupervisedLoss(samples, totals), 0.0
        if totals.weight:
            batches = self.strategy.batcher.split(samples, weighted)
            self.strategy.forward_backward(batches, self._temperature, loss)
            norm = self.strategy.optimizer_step(rate, scheduled=False)
        return {
            "warmup/loss": self.strategy.ranks.sum_scores([loss.total])[0],
            "warmup/grad_norm": norm,
            "warmup/lr": rate,
        }

    def end_warm_up(self) -> None:
        """Forget the optimizer's state: it is about the cross-entropy of other texts.

        AdamW's second moments would shrink or enlarge the first RL steps, its first moments would
        continue the warm-up.
        """
        self.strategy.reset_optimizer()

    def gradients(self, samples: list[Sample], loss: LossSpec) -> dict[str, Tensor]:
        """Return the gradient that `train_step` would use, whole and unclipped, by name.

        Nothing changes. Names are Hugging Face's; with Megatron the result is on rank 0 only.
        """
        self._forward_backward(samples, loss, self.strategy.batcher.totals(samples))
        return self.strategy.gradients()

    def sum_over_data(self, values: Floats) -> Floats:
        """Return the element-wise sum over the parts of a batch: one rank of each `data_rank`."""
        return np.array(self.strategy.ranks.sum(values.tolist()), np.float64)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all parameters, whole, under their Hugging Face names, on rank 0 only.

        They have the dtype that engines serve (`spec.model.dtype`), are on any device, and may be
        views of the parameters: read each before taking the next. Tied parameters come once. With
        LoRA, adapters are merged.
        """
        return self.strategy.weights()

    def export_folder(self, folder: Path, files: Mapping[str, bytes]) -> None:
        """Write a Hugging Face model folder: weights, config and `files` (the tokenizer's)."""
        weights = {name: weight.to("cpu", copy=True) for name, weight in self.export_weights()}
        if self.rank == 0:
            write_model(folder, self.strategy.hugging_face_model(), weights)
            for name, content in files.items():
                (folder / name).write_bytes(content)

    def snapshot(self) -> Snapshot:
        """Copy this rank's shards of weights, optimizer, schedule and random state.

        Any strategy can load them once `checkpoint.save` has written them, on any number of ranks.
        The next snapshot overwrites the copy.
        """
        return self.strategy.snapshot(self._progress())

    def reserve_snapshot(self) -> Callable[[], None]:
        """Return a function that allocates the memory of the snapshots, for any thread."""
        return self.strategy.reserve_snapshot()

    def load(self, folder: str) -> None:
        """Restore a saved snapshot.

        Args:
            folder: a path or an fsspec URI.

        Raises:
            CheckpointMismatch: a checkpoint of another model; names the first parameter.
        """
        progress = self.strategy.load(folder, self._progress())
        self.strategy.steps.restore(progress)
        self.policy_version = progress["policy_version"]

    @property
    def rate_falls_from(self) -> float:
        return self.strategy.steps.falls_from

    def stretch_schedule(self, steps_left: int) -> None:
        self.strategy.steps.stretch(steps_left)

    def offload(self) -> None:
        """Free the device for an engine that shares it. Train again only after `onload`."""
        self.strategy.offload()

    def onload(self) -> None:
        """Move everything back to the device."""
        self.strategy.onload()

    def _forward_backward(
        self, samples: list[Sample], spec: LossSpec, totals: StepTotals
    ) -> dict[str, float]:
        """Sum the gradient over all micro-batches; return metrics of loss and balance."""
        ranks, batcher = self.strategy.ranks, self.strategy.batcher
        metrics = ActorMetrics(totals, batcher.device)
        loss = ActorLoss(samples, spec, totals, ranks.max, metrics)
        batches = batcher.split(samples, weighted)
        with device_span("forward_backward", micro_batches=len(batches)):
            self.strategy.forward_backward(batches, spec.temperature, loss)
        balance = batcher.balance(batches)
        return metrics.result(ranks) | balance | self.strategy.router_metrics()

    def _progress(self) -> dict[str, int]:
        return {**self.strategy.steps.counts(), "policy_version": self.policy_version}
