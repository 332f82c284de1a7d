"""The `megatron` strategy of the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor
from transformers import AutoModelForCausalLM

from agenticrun_workers.algorithms.aggregation import StepTotals
from agenticrun_workers.algorithms.segments import Floats
from agenticrun_workers.models.devices import compute_device
from agenticrun_workers.models.lora import Adapters
from agenticrun_workers.models.pretrained import load_config
from agenticrun_workers.trainer.actor_loss import ActorLoss, SupervisedLoss
from agenticrun_workers.trainer.actor_metrics import ActorMetrics, nothing_learned
from agenticrun_workers.trainer.export import write_folder
from agenticrun_workers.trainer.megatron.architecture import Architecture
from agenticrun_workers.trainer.megatron.checkpoint import Checkpoints
from agenticrun_workers.trainer.megatron.cpu_device import megatron_device
from agenticrun_workers.trainer.megatron.memory import Parked
from agenticrun_workers.trainer.megatron.model import MegatronModel, transformer_config
from agenticrun_workers.trainer.megatron.options import MegatronOptions
from agenticrun_workers.trainer.megatron.parallel import join
from agenticrun_workers.trainer.megatron.passes import Passes
from agenticrun_workers.trainer.megatron.updater import MegatronUpdater
from agenticrun_workers.trainer.megatron.weights import Weights
from agenticrun_workers.trainer.micro_batch import (
    MicroBatch,
    Positions,
    filler,
    responses,
    split,
    weighted,
)
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.over_ranks import balance, step_totals
from agenticrun_workers.trainer.ranks import Ranks
from agenticrun_workers.trainer.strategy import LossSpec, Sample
from agenticrun_workers.types import FloatArray


class MegatronPolicy:
    """A policy under training; the protocol is `TrainStrategy`. Making it and all its methods are collective.

    Args:
        path: folder or hub name of the model; each rank reads its part of the weights (safetensors). Not read again later.
        dtype: to compute in and of exported weights. Masters and optimizer state are float32, or float64 for float64.
        config: Megatron's options, see `options.py`.
        temperature: of the sampling that the log-probs are about, for `compute_log_probs` and `supervised_step`.
        packing: several sequences in a row.

    Raises:
        ModelLoadError: no such model, or its weights do not fit its config.
        UnsupportedModel: Megatron would compute another model.
        ValueError: of an option, naming it.
    """

    def __init__(
        self,
        path: str,
        dtype: torch.dtype,
        optimizer: OptimizerSpec,
        *,
        config: Mapping[str, Any] = {},
        max_tokens: int = 16_384,
        temperature: float = 1.0,
        packing: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        options = MegatronOptions.parse(config)
        self._hugging_face = load_config(path, trust_remote_code=trust_remote_code)
        model = Architecture.of(self._hugging_face)
        model.check_divisible(options)
        if dtype == torch.float64 and options.data_parallel.get("use_distributed_optimizer"):
            raise ValueError(
                "strategy.config.use_distributed_optimizer needs spec.model.dtype float32 or bfloat16, not float64"
            )
        self._device, self._dtype = compute_device(), dtype
        self._max_tokens, self._temperature, self._packing = max_tokens, temperature, packing
        with megatron_device():
            self._place = place = join(options)
            transformer = transformer_config(model, options, dtype)
            module = MegatronModel(transformer, model, place)
            self._weights = Weights(module, model, place)
            for parameter, values in self._weights.read_folder(path):
                parameter.tensor.data.copy_(values)
            reduced = {"grad_reduce_in_fp32": dtype == torch.bfloat16} | options.data_parallel
            self._module = DistributedDataParallel(
                transformer, DistributedDataParallelConfig(**reduced), module
            )
            self._ranks = Ranks(self._device)
            self._updater = MegatronUpdater(
                self._module, self._weights, optimizer, options, self._ranks
            )
            if (
                dtype == torch.bfloat16
            ):  # the masters begin with what is in the folder, not with its rounding
                for parameter, values in self._weights.read_folder(path):
                    self._updater.set_master(parameter, values)
        self._passes = Passes(self._module, transformer, options.row_multiple)
        self._checkpoints = Checkpoints(model, self._weights, self._updater, place)
        self._parked: Parked | None = None
        self.policy_version = 0
        self.rank, self.world_size = place.rank, place.world
        self.data_rank, self.data_size = place.data_rank, place.data_size
        self.adapters: Adapters | None = None

    def compute_log_probs(self, samples: list[Sample]) -> list[FloatArray]:
        """See `LogProbStrategy`."""
        result = [np.zeros(len(sample.tokens_T), np.float32) for sample in samples]
        with megatron_device():
            self._passes.forward(
                self._micro_batches(samples, responses),
                self._temperature,
                lambda batch, logprobs_N: batch.put(logprobs_N, result),
            )
        if self._place.stages > 1 and samples:
            values = torch.from_numpy(np.concatenate(result)).to(self._device)
            dist.broadcast(values, group=self._place.groups.pp, group_src=self._place.stages - 1)
            return np.split(values.cpu().numpy(), np.cumsum([len(part) for part in result])[:-1])
        return result

    def supervised_step(self, samples: list[Sample]) -> Mapping[str, float]:
        """See `TrainStrategy`."""
        totals = self._totals(samples)
        rate = self._updater.spec.supervised_learning_rate or self._updater.spec.learning_rate
        loss, norm = SupervisedLoss(samples, totals), 0.0
        if totals.weight == 0:
            self._updater.skip()
        else:
            with megatron_device():
                self._passes.backward(
                    self._micro_batches(samples, weighted), self._temperature, loss
                )
                norm = self._updater.step(rate, scheduled=False)
        return {
            "warmup/loss": self._ranks.sum([loss.total if self._place.scores else 0.0])[0],
            "warmup/grad_norm": norm,
            "warmup/lr": rate,
        }

    def train_step(self, samples: list[Sample], loss: LossSpec) -> Mapping[str, float]:
        """See `TrainStrategy`."""
        totals = self._totals(samples)
        rate, norm = self._updater.rate, 0.0
        if totals.weight == 0:
            self._updater.skip()
            metrics = {**nothing_learned(), **self._balance([])}
        else:
            with megatron_device():
                metrics = self._backward(samples, loss, totals)
                norm = self._updater.step(rate)
        return {
            **metrics,
            "actor/grad_norm": norm,
            "actor/lr": rate,
            "actor/skipped_steps": float(self._updater.skipped),
        }

    def gradients(self, samples: list[Sample], loss: LossSpec) -> dict[str, Tensor]:
        """The gradient that `train_step` would use, whole and unclipped, by Hugging Face's names, on rank 0; nothing changes."""
        with megatron_device():
            self._backward(samples, loss, self._totals(samples))
            return self._updater.gradients()

    def sum_over_data(self, values: Floats) -> Floats:
        """See `TrainStrategy`."""
        return np.array(self._sum(values.tolist()), np.float64)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainStrategy`."""
        return self._weights.whole(lambda parameter: parameter.tensor.detach())

    def export_folder(self, folder: Path, files: Mapping[str, bytes]) -> None:
        """See `TrainStrategy`."""
        weights = {name: weight.to("cpu", copy=True) for name, weight in self.export_weights()}
        if self.rank == 0:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(self._hugging_face)
            write_folder(folder, model, weights, files)

    def save(self, folder: str) -> None:
        """See `Checkpointed`. Any strategy and parallel layout can load it."""
        self._checkpoints.save(folder, self._progress())

    def load(self, folder: str) -> None:
        """See `Checkpointed`."""
        with megatron_device():
            progress = self._checkpoints.load(folder, self._progress())
        self._updater.restore(progress)
        self.policy_version = progress["policy_version"]

    def offload(self) -> None:
        """Leave the device's memory to an engine. Nothing can be computed until `onload`."""
        self._parked = Parked(self._updater.tensors())

    def onload(self) -> None:
        """Come back to the device."""
        if self._parked is not None:
            self._parked.restore()
            self._parked = None

    def _progress(self) -> dict[str, int]:
        return {**self._updater.counts(), "policy_version": self.policy_version}

    def _backward(
        self, samples: list[Sample], spec: LossSpec, totals: StepTotals
    ) -> dict[str, float]:
        """Sum the gradient over all micro-batches; returns the metrics of the loss and of the ranks' balance."""
        metrics = ActorMetrics(totals, self._device)
        # Ranks of one data rank compute the same loss: one of them tells its metrics.
        part = ActorLoss(
            samples,
            spec,
            totals,
            self._ranks.max,
            metrics if self._place.scores else ActorMetrics(totals, self._device),
        )
        batches = self._micro_batches(samples, weighted)
        self._passes.backward(batches, spec.temperature, part)
        return metrics.result(self._ranks) | self._balance(batches)

    def _micro_batches(
        self, samples: list[Sample], select: Callable[[Sample], Positions]
    ) -> list[MicroBatch]:
        """This rank's micro-batches, filled up to the number of the data rank that has most."""
        batches = split(samples, select, self._max_tokens, self._device, packed=self._packing)
        most = max(1, int(self._ranks.max([float(len(batches))])[0]))
        return batches + [filler(self._device)] * (most - len(batches))

    def _totals(self, samples: list[Sample]) -> StepTotals:
        """The denominators of an optimizer step on all ranks' samples."""
        return step_totals(samples, self._sum)

    def _balance(self, batches: list[MicroBatch]) -> dict[str, float]:
        """As `TorchBackend.balance`."""
        return balance(batches, self.data_size, self._sum, self._ranks.max)

    def _sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over one rank of each data rank."""
        return self._ranks.sum(values if self._place.leads else [0.0] * len(values))
