"""The policy in Megatron-Core: tensor, pipeline, context and data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, UntypedStorage
from transformers import AutoModelForCausalLM, PreTrainedModel

from agenticrun_workers.models.devices import HostCopies, compute_device
from agenticrun_workers.models.lora import Adapters
from agenticrun_workers.models.pretrained import load_config
from agenticrun_workers.trainer.checkpoint import Snapshot
from agenticrun_workers.trainer.megatron.architecture import Architecture
from agenticrun_workers.trainer.megatron.checkpoint import Checkpoints
from agenticrun_workers.trainer.megatron.model import MegatronModel, even_rows, transformer_config
from agenticrun_workers.trainer.megatron.options import MegatronOptions
from agenticrun_workers.trainer.megatron.parallel import MegatronRanks, join, megatron_device
from agenticrun_workers.trainer.megatron.updater import MegatronOptimizer
from agenticrun_workers.trainer.megatron.weights import Weights
from agenticrun_workers.trainer.micro_batch import MicroBatch, MicroBatcher, filler, responses
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PartLoss, PolicyTrainer
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.types import FloatArray


class MegatronStrategy:
    """Implements `Strategy`. For the arguments see `megatron_policy`."""

    def __init__(
        self,
        path: str,
        dtype: torch.dtype,
        optimizer: OptimizerSpec,
        *,
        config: Mapping[str, Any],
        max_tokens: int,
        packing: bool,
        trust_remote_code: bool,
    ) -> None:
        options = MegatronOptions.parse(config)
        self._hugging_face = load_config(path, trust_remote_code=trust_remote_code)
        model = Architecture.of(self._hugging_face)
        model.check_divisible(options)
        if dtype == torch.float64 and options.data_parallel.get("use_distributed_optimizer"):
            raise ValueError(
                "strategy.config.use_distributed_optimizer needs spec.model.dtype "
                "float32 or bfloat16, not float64"
            )
        self._device = compute_device()
        with megatron_device():
            self._place = place = join(options)
            transformer = transformer_config(model, options, dtype)
            module = MegatronModel(transformer, model, place)
            self._weights = Weights(module, model, place)
            for parameter, values in self._weights.read_folder(path):
                parameter.tensor.data.copy_(values)
            reduced = {"grad_reduce_in_fp32": dtype == torch.bfloat16} | options.data_parallel
            parallel = DistributedDataParallel(
                transformer, DistributedDataParallelConfig(**reduced), module
            )
            self.ranks = MegatronRanks(place, self._device)
            self.steps = MegatronOptimizer(parallel, self._weights, optimizer, options, self.ranks)
            if dtype == torch.bfloat16:  # masters start with the folder's values, not rounded
                for parameter, values in self._weights.read_folder(path):
                    self.steps.set_master(parameter, values)
        self.batcher = MicroBatcher(self.ranks, self._device, max_tokens, packed=packing)
        self.adapters: Adapters | None = None
        self._passes = Passes(parallel, transformer, options.row_multiple)
        self._checkpoints = Checkpoints(model, self._weights, self.steps, place)
        self._parked = Parked()

    def score(self, samples: list[Sample], temperature: float) -> list[FloatArray]:
        result = [np.zeros(len(sample.tokens_T), np.float32) for sample in samples]
        # A schedule has at least one micro-batch.
        batches = self.batcher.split(samples, responses) or [filler(self._device)]
        with megatron_device():
            self._passes.forward(
                batches, temperature, lambda batch, logprobs_N: batch.put(logprobs_N, result)
            )
        if self._place.stages > 1 and samples:
            values = torch.from_numpy(np.concatenate(result)).to(self._device)
            dist.broadcast(values, group=self._place.groups.pp, group_src=self._place.stages - 1)
            return np.split(values.cpu().numpy(), np.cumsum([len(part) for part in result])[:-1])
        return result

    def forward_backward(
        self, batches: list[MicroBatch], temperature: float, loss: PartLoss
    ) -> None:
        with megatron_device():
            self._passes.backward(batches, temperature, loss)

    def router_metrics(self) -> dict[str, float]:
        """Megatron trains dense models only."""
        return {}

    def optimizer_step(self, rate: float, *, scheduled: bool = True) -> float:
        with megatron_device():
            return self.steps.step(rate, scheduled=scheduled)

    def reset_optimizer(self) -> None:
        self.steps.adam.state.clear()

    def gradients(self) -> dict[str, Tensor]:
        """Whole on rank 0 only."""
        with megatron_device():
            return self.steps.gradients()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._weights.whole(lambda parameter: parameter.tensor.detach())

    def hugging_face_model(self) -> PreTrainedModel:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(self._hugging_face)
        return model

    def snapshot(self, progress: dict[str, int]) -> Snapshot:
        return self._checkpoints.snapshot(progress)

    def reserve_snapshot(self) -> Callable[[], None]:
        return self._checkpoints.reserve()

    def load(self, folder: str, progress: dict[str, int]) -> dict[str, int]:
        with megatron_device():
            return self._checkpoints.load(folder, progress)

    def offload(self) -> None:
        """Move everything to host memory."""
        self._parked.park(self.steps.tensors())

    def onload(self) -> None:
        self._parked.restore()


def megatron_policy(
    path: str,
    dtype: torch.dtype,
    optimizer: OptimizerSpec,
    *,
    config: Mapping[str, Any] = {},
    max_tokens: int = 16_384,
    temperature: float = 1.0,
    packing: bool = False,
    trust_remote_code: bool = False,
) -> PolicyTrainer:
    """Return a policy that trains with Megatron-Core. Collective.

    Args:
        path: folder or hub name of the model; each rank reads its part of the weights
            (safetensors). Not read again later.
        dtype: of the computation and of exported weights. Masters and optimizer state are float32,
            or float64 for float64.
        optimizer: learning rate, schedule, clipping.
        config: Megatron's options, see `MegatronOptions`.
        max_tokens: tokens of one micro-batch, padding included.
        temperature: of the sampling, for `compute_log_probs` and `supervised_step`.
        packing: several sequences in a row.
        trust_remote_code: run code that the model's folder brings.

    Raises:
        ModelLoadError: no such model, or its weights do not fit its config.
        UnsupportedModel: Megatron would compute another model.
        ValueError: of an option; names it.
    """
    strategy = MegatronStrategy(
        path,
        dtype,
        optimizer,
        config=config,
        max_tokens=max_tokens,
        packing=packing,
        trust_remote_code=trust_remote_code,
    )
    return PolicyTrainer(strategy, temperature)


class Passes:
    """Forward and backward passes through all stages.

    Calls are collective over the ranks of a data rank; those with gradients over all ranks.

    Args:
        config: the module's; gets the functions that Megatron's schedules call back.
        row_multiple: divisor of the length of every row.
    """

    def __init__(
        self, module: DistributedDataParallel, config: TransformerConfig, row_multiple: int
    ) -> None:
        self._module = module
        self._row_multiple = row_multiple
        config.no_sync_func = module.no_sync
        config.finalize_model_grads_func = _finalize

    def backward(self, batches: list[MicroBatch], temperature: float, loss: PartLoss) -> None:
        """Add the gradient of the summed parts, over all data ranks, to that of the parameters."""

        def part(batch: MicroBatch, scores_2N: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total = loss(batch, *scores_2N)
            return total, torch.zeros((), dtype=torch.int, device=total.device), {}

        self._run(batches, temperature, part, forward_only=False)

    @torch.no_grad()
    def forward(
        self,
        batches: list[MicroBatch],
        temperature: float,
        read: Callable[[MicroBatch, Tensor], None],
    ) -> None:
        """Call `read` with the log-probs [N] of each micro-batch, on the last stage only."""

        def part(batch: MicroBatch, scores_2N: Tensor, **_: bool) -> None:
            read(batch, scores_2N[0])

        self._run(batches, temperature, part, forward_only=True, collect_non_loss_data=True)

    def _run(
        self,
        batches: list[MicroBatch],
        temperature: float,
        part: Callable[..., Any],
        **options: bool,
    ) -> None:
        even = [even_rows(batch, self._row_multiple) for batch in batches]

        def step(
            batches_left: Iterator[MicroBatch], module: DistributedDataParallel
        ) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(batches_left)
            return module(batch, temperature), lambda scores_2N, **named: part(
                batch, scores_2N, **named
            )

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(even),
            model=[self._module],
            num_microbatches=len(even),
            seq_length=self._row_multiple,  # unused: every micro-batch has its own
            micro_batch_size=1,
            **options,
        )


class Parked:
    """Contents of tensors in host memory, while their device memory is freed.

    Views of one storage remain views of it.
    """

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._parked: list[tuple[UntypedStorage, Tensor]] = []

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Copy the contents and free the device memory."""
        copy = self._copies.filling()
        storages = {
            storage.data_ptr(): storage
            for storage in (tensor.untyped_storage() for tensor in tensors)
            if storage.nbytes()
        }
        for storage in storages.values():
            self._parked.append((storage, copy(_bytes_of(storage))))
            storage.resize_(0)
        if compute_device().type == "cuda":
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Give every tensor its memory and contents back."""
        for storage, kept in self._parked:
            storage.resize_(kept.nbytes)
            _bytes_of(storage).copy_(kept)
        self._parked = []


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _finalize(module: list[DistributedDataParallel], _: Tensor | None, **options: Any) -> None:
    """Sum gradients over ranks as Megatron does, without its division by a number of tokens.

    Our loss contains that division.
    """
    finalize_model_grads(module, None, **options)
