"""The `fsdp2` strategy: plain torch on one rank, fully sharded data parallelism (`fully_shard`) on more.

Denominators are summed over all ranks before the first backward pass, and gradients are summed, not averaged; how samples
are split into ranks and micro-batches therefore never changes the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agenticrun_workers.algorithms.losses import StepTotals, kl_loss, ppo_loss, token_coefficients
from agenticrun_workers.training import checkpoint
from agenticrun_workers.training.microbatch import MicroBatch, filler, split
from agenticrun_workers.training.optimizer import OptimizerSpec, build_optimizer
from agenticrun_workers.training.policy import Policy
from agenticrun_workers.training.strategy import LossSpec, Sample
from agenticrun_workers.types import FloatArray


class TorchStrategy:
    """See the module's docstring; the protocol is `TrainStrategy`.

    With more than one rank `torch.distributed` must be initialised before.

    Args:
        load: makes the model, in the dtype to train in; every rank must get the same weights.
        optimizer: learning rate, schedule, clipping.
        max_tokens: padded tokens of one micro-batch.
        temperature: of the sampling that the log-probs are about, for `compute_log_probs` and `supervised_step`.
    """

    def __init__(
        self,
        load: Callable[[], PreTrainedModel],
        optimizer: OptimizerSpec,
        *,
        max_tokens: int = 16_384,
        temperature: float = 1.0,
    ) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.policy_version = 0
        self._spec = optimizer
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._policy = Policy(load()).train()
        self._device = next(self._policy.parameters()).device
        if self.world_size > 1:
            _shard(self._policy, self._device.type, self.world_size)
        self._optimizer = build_optimizer(self._policy.parameters(), optimizer)
        self._steps = 0
        self._skipped = 0

    @torch.no_grad()
    def compute_log_probs(self, samples: list[Sample]) -> list[FloatArray]:
        """See `TrainStrategy`. Only weighted tokens are computed; the others are 0."""
        result = [np.zeros(len(sample.tokens_T), np.float32) for sample in samples]
        for batch in self._split(samples):
            logprobs_N, _ = self._policy(batch.ids_BT, batch.rows_N, batch.columns_N, self._temperature)
            table = torch.zeros(batch.ids_BT.shape, device=self._device)
            table[batch.rows_N, batch.columns_N] = logprobs_N.float()
            for row, sample in enumerate(batch.samples):
                length = min(len(samples[sample].tokens_T), table.shape[1])
                result[sample][:length] = table[row, :length].cpu().numpy()
        return result

    def supervised_step(self, samples: list[Sample]) -> Mapping[str, float]:
        """See `TrainStrategy`."""
        totals = self._totals(samples)
        weights = [sample.weight_T for sample in samples]
        loss_sum = torch.zeros((), dtype=torch.float64)
        for batch in self._split(samples):
            logprobs_N, _ = self._policy(batch.ids_BT, batch.rows_N, batch.columns_N, self._temperature)
            weight_N = batch.pick(weights, logprobs_N.dtype)
            loss = -(token_coefficients(weight_N, batch.rows_N, totals, "token-mean") * logprobs_N).sum()
            loss.backward()
            loss_sum += loss.detach().double().cpu()
        rate = self._spec.supervised_learning_rate or self._spec.learning_rate
        norm = self._update(rate)
        loss_value = self._all_sum([loss_sum.item()])[0]
        return {"warmup/loss": loss_value, "warmup/grad_norm": norm, "warmup/lr": rate}

    def train_step(self, samples: list[Sample], loss: LossSpec, old: list[FloatArray] | None = None) -> Mapping[str, float]:
        """See `TrainStrategy`."""
        totals = self._totals(samples)
        sums = _Sums()
        for batch in self._split(samples):
            self._backward(batch, samples, loss, old, totals, sums)
        rate = self._spec.rate(self._steps)
        norm = self._update(rate)
        if math.isfinite(norm):
            self._steps += 1
        shared = self._all_sum([sums.pg, sums.kl, sums.entropy, sums.clipped, sums.approx_kl])
        return {
            "actor/pg_loss": shared[0],
            "actor/kl_loss": shared[1],
            "actor/entropy": shared[2],
            "actor/clipfrac": shared[3],
            "actor/approxkl": shared[4],
            "actor/ratio_max": self._all_max(sums.ratio_max),
            "actor/grad_norm": norm,
            "actor/lr": rate,
            "actor/skipped_steps": float(self._skipped),
        }

    def export_weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """See `TrainStrategy`. Tied parameters come once, under the name that `named_parameters` of the model gives."""
        for name, parameter in self._policy.model.named_parameters():
            value = parameter.detach()
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if self.rank == 0:
                yield name, full.to("cpu", torch.float32, copy=True).numpy()

    def save(self, folder: Path) -> None:
        """See `TrainStrategy`."""
        checkpoint.save(folder, self._policy, self._optimizer, self._progress())

    def load(self, folder: Path) -> None:
        """See `TrainStrategy`."""
        progress = checkpoint.load(folder, self._policy, self._optimizer, self._progress())
        self._steps, self._skipped = progress["steps"], progress["skipped"]
        self.policy_version = progress["policy_version"]

    def _progress(self) -> dict[str, int]:
        return {"steps": self._steps, "skipped": self._skipped, "policy_version": self.policy_version}

    def _backward(
        self,
        batch: MicroBatch,
        samples: list[Sample],
        spec: LossSpec,
        old: list[FloatArray] | None,
        totals: StepTotals,
        sums: _Sums,
    ) -> None:
        """Add one micro-batch's part of the gradient and of the metrics."""
        logprobs_N, entropies_N = self._policy(batch.ids_BT, batch.rows_N, batch.columns_N, spec.temperature)
        dtype = logprobs_N.dtype
        weight_N = batch.pick([s.weight_T for s in samples], dtype)
        advantages_N = batch.pick([s.advantages_T for s in samples], dtype)
        old_N = logprobs_N.detach() if old is None else batch.pick(list(old), dtype)
        coefficients_N = token_coefficients(weight_N, batch.rows_N, totals, spec.aggregation, spec.aggregation_norm)
        policy = ppo_loss(logprobs_N, old_N, advantages_N, spec.clip_low, spec.clip_high, spec.dual_clip)
        pg = (coefficients_N * policy.loss_N).sum()
        entropy = (coefficients_N * entropies_N).sum()
        kl = logprobs_N.new_zeros(())
        if spec.kl_coef:
            references = [s.ref_logprobs_T for s in samples]
            ref_N = batch.pick([r for r in references if r is not None], dtype)
            kl = (coefficients_N * kl_loss(logprobs_N, ref_N, spec.kl_kind)).sum()
        (pg + spec.kl_coef * kl - spec.entropy_coef * entropy).backward()
        sums.pg += pg.item()
        sums.kl += kl.item()
        share_N = weight_N / totals.weight
        sums.entropy += (share_N * entropies_N).sum().item()
        sums.clipped += (share_N * policy.clipped_N).sum().item()
        sums.approx_kl += (share_N * (logprobs_N.detach() - old_N).square() / 2).sum().item()
        sums.ratio_max = max([sums.ratio_max, *policy.ratio_N.max().reshape(-1).tolist()] if len(weight_N) else [sums.ratio_max])

    def _update(self, rate: float) -> float:
        """Clip, step and clear; returns the gradient's norm. A non-finite gradient changes nothing but the count."""
        total = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._spec.max_grad_norm)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        else:
            self._skipped += 1
        self._optimizer.zero_grad()
        return norm

    def _split(self, samples: list[Sample]) -> list[MicroBatch]:
        """This rank's micro-batches, filled up to the number of the rank that has most."""
        batches = split(samples, self._max_tokens, self._device)
        most = int(self._all_max(float(len(batches))))
        return batches + [filler(self._device)] * (most - len(batches))

    def _totals(self, samples: list[Sample]) -> StepTotals:
        weights = [float(sample.weight_T[1:].sum(dtype=np.float64)) for sample in samples]
        weight, sequences = self._all_sum([sum(weights), float(sum(w > 0 for w in weights))])
        return StepTotals(weight or 1.0, sequences or 1.0)

    def _all_sum(self, values: list[float]) -> list[float]:
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def _all_max(self, value: float) -> float:
        return self._all_reduce([value], dist.ReduceOp.MAX)[0]

    def _all_reduce(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op)
        return [float(value) for value in tensor.tolist()]


class _Sums:
    """Metrics summed over micro-batches."""

    def __init__(self) -> None:
        self.pg = self.kl = self.entropy = self.clipped = self.approx_kl = self.ratio_max = 0.0


def _shard(policy: Policy, device: str, world_size: int) -> None:
    mesh = init_device_mesh(device, (world_size,))
    layers: list[torch.nn.Module] = list(policy.model.get_decoder().layers)
    for module in [*layers, policy]:
        fully_shard(module, mesh=mesh)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no PREMUL_SUM
