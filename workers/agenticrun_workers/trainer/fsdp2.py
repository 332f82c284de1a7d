"""The strategy `fsdp2`: plain torch on one rank, fully sharded data parallelism (FSDP2) on more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint as recompute
from transformers import PreTrainedModel

from agenticrun_workers.models.devices import device_span
from agenticrun_workers.models.lora import Adapters, whole_weights
from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.log_probs import CHUNK_ELEMENTS
from agenticrun_workers.trainer.micro_batch import MicroBatch, MicroBatcher, responses
from agenticrun_workers.trainer.modules import PolicyModule, ValueModule, can_pack
from agenticrun_workers.trainer.optimizer import Optimizer, OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PartLoss, PolicyTrainer
from agenticrun_workers.trainer.ranks import Ranks, join_alone, whole
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.trainer.ulysses import UlyssesSequences
from agenticrun_workers.types import FloatArray

log = logging.getLogger(__name__)

DECIDED_ELSEWHERE = {
    "param_dtype": "spec.model.dtype",
    "reduce_dtype": "spec.model.dtype (gradients are always summed in float32 at least)",
    "mp_policy": "spec.model.dtype",
    "mixed_precision": "spec.model.dtype",
    "attn_implementation": "spec.model.attnImplementation",
    "max_grad_norm": "spec.pipeline.actorTrain.training.maxGradNorm",
    "use_remove_padding": "spec.pipeline.actorTrain.training.sequencePacking",
    "fsdp_size": "the number of trainer ranks: the model is sharded over all of them",
}
"""Options of ROLL, verl or torch, and the field that decides each."""


@dataclass(frozen=True, slots=True)
class FsdpOptions:
    """Storage and computation of a model (`strategy.config`). No option changes what is learned."""

    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward pass and gather them again for the
    backward pass (ZeRO-3). False keeps them (ZeRO-2): less communication, more memory."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of each layer; compute the layer again in the backward pass."""
    offload_policy: bool = False
    """Parameters, gradients and optimizer state are in host memory; each layer moves to the GPU
    while it computes."""
    ulysses_sequence_parallel_size: int = 1
    """Number of neighbouring ranks that share each sequence (Ulysses, arXiv 2309.14509). Divides
    the ranks and the attention heads."""
    logits_chunk_elements: int = CHUNK_ELEMENTS
    """Logits (tokens times vocabulary) that exist at a time."""

    @staticmethod
    def parse(config: Mapping[str, Any]) -> FsdpOptions:
        """Read `strategy.config`.

        Raises:
            ValueError: an option is unknown, wrong, or decided by another field; names it.
        """
        types = get_type_hints(FsdpOptions)
        for name, value in config.items():
            if name in DECIDED_ELSEWHERE:
                field = DECIDED_ELSEWHERE[name]
                raise ValueError(f"the option {name} of fsdp2 is decided by {field}: leave it out")
            if name not in types:
                raise ValueError(f"fsdp2 has no option {name}; it has {', '.join(types)}")
            if type(value) is not types[name] or (types[name] is int and value < 1):
                kind = "true or false" if types[name] is bool else "a whole number of at least 1"
                raise ValueError(f"the option {name} of fsdp2 must be {kind}, not {value!r}")
        return FsdpOptions(**config)

    def without_sequence_parallelism(self) -> FsdpOptions:
        """Return the same options with whole sequences on every rank."""
        return replace(self, ulysses_sequence_parallel_size=1)


DEFAULTS = FsdpOptions()


def shard(
    module: nn.Module,
    layers: Iterable[nn.Module],
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype,
    options: FsdpOptions,
) -> None:
    """Fully shard a module over the ranks, layer by layer. Gradients are summed, not averaged.

    A single rank has nothing to shard, but still goes through FSDP2 when mixed precision or offload
    is on, so that there is only one code path.

    Args:
        module: the root.
        layers: parts that are gathered one at a time.
        ranks: all of the trainer.
        device: of the computation.
        dtype: of the computation. Parameters and gradients keep their own.
        options: of the run.
    """
    own = next(module.parameters()).dtype
    # Plain PyTorch: a single rank shards nothing, converts nothing and offloads nothing.
    if ranks.size == 1 and dtype == own and not options.offload_policy:
        return
    # FSDP2 needs a process group, also of one rank.
    if not torch.distributed.is_initialized():
        join_alone(device)
    mesh = init_device_mesh(device.type, (ranks.size,))
    precision = (
        MixedPrecisionPolicy()
        if dtype == own
        else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=own)
    )
    offload = (
        CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if options.offload_policy
        else OffloadPolicy()
    )
    for unit in [*layers, module]:
        # Not the root: its backward pass follows its forward pass at once, so freeing its weights
        # would only gather them twice.
        reshard = options.reshard_after_forward and unit is not module
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=precision,
            offload_policy=offload,
        )
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


Module = TypeVar("Module", PolicyModule, ValueModule)


class ShardedModule(Generic[Module]):
    """A module on one rank of several, and the micro-batches that it computes.

    With more than one rank `torch.distributed` must be initialised before. Every rank must bring
    the same weights.

    Args:
        module: gets evaluation mode: without dropout, log-probs are a function of the weights.
        max_tokens: tokens of one micro-batch, padding included.
        packing: put several sequences in a row if the model keeps them apart; otherwise warn and
            pad.
        dtype: of the computation; default: the parameters'.
        options: of the run.
        sharded: False leaves the module whole: the caller reduces the ranks' gradients.

    Raises:
        UnsupportedModel: the model does not support the options.
        ValueError: the options do not fit the number of ranks.
    """

    def __init__(
        self,
        module: Module,
        *,
        max_tokens: int,
        packing: bool,
        dtype: torch.dtype | None = None,
        options: FsdpOptions = DEFAULTS,
        sharded: bool = True,
    ) -> None:
        module.eval()
        parameter = next(module.parameters())
        self.module: Module = module
        self.device = parameter.device
        self.dtype = dtype or parameter.dtype
        self.ranks = Ranks(self.device, options.ulysses_sequence_parallel_size)
        packed = packing and can_pack(module.decoder)
        if packing and not packed:
            log.warning(
                "%s mixes packed sequences: training continues with padding",
                type(module.decoder).__name__,
            )
        self.batcher = MicroBatcher(self.ranks, self.device, max_tokens, packed=packed)
        self.home = torch.device("cpu") if options.offload_policy else self.device
        if options.ulysses_sequence_parallel_size > 1:
            module.sequences = UlyssesSequences(module.decoder, self.ranks, packed=packed)
        names = module.decoder._no_split_modules or ()
        layers = [part for part in module.modules() if type(part).__name__ in names]
        if options.gradient_checkpointing:
            for layer in layers:  # transformers' own does nothing in evaluation mode
                layer.forward = partial(
                    recompute, layer.forward, use_reentrant=False, preserve_rng_state=False
                )
        if sharded:
            shard(module, layers, self.ranks, self.device, self.dtype, options)

    def reshard(self) -> None:
        """Free parameters that a forward pass gathered and no backward pass will use.

        Until then they hide the master weights.
        """
        for unit in self.module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()

    def offload(self) -> None:
        """Move the module to host memory. Compute again only after `onload`."""
        self.reshard()
        self.module.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move the module back to the device."""
        self.module.to(self.home)


@torch.no_grad()
def score(
    model: ShardedModule[PolicyModule], samples: list[Sample], temperature: float
) -> list[FloatArray]:
    """Return the log-probs [T] of each sample's response tokens, 0 elsewhere. Collective."""
    result = [np.zeros(len(sample.tokens_T), np.float32) for sample in samples]
    for batch in model.batcher.split(samples, responses):
        batch.put(model.module(batch, temperature)[0], result)
    # No backward pass follows that would do it.
    model.reshard()
    return result


class Fsdp2Strategy:
    """Implements `Strategy`. For the arguments see `fsdp2_policy`."""

    def __init__(self, model: ShardedModule[PolicyModule], optimizer: OptimizerSpec) -> None:
        self.model = model
        self.ranks, self.batcher = model.ranks, model.batcher
        self.steps = Optimizer(model.module, optimizer, model.ranks)
        self.adapters = Adapters.of(model.module.model, _whole, model.ranks.rank)

    def score(self, samples: list[Sample], temperature: float) -> list[FloatArray]:
        return score(self.model, samples, temperature)

    def forward_backward(
        self, batches: list[MicroBatch], temperature: float, loss: PartLoss
    ) -> None:
        for batch in batches:
            with device_span("forward"):
                part = loss(batch, *self.model.module(batch, temperature))
            with device_span("backward"):
                part.backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self, rate: float, *, scheduled: bool = True) -> float:
        return self.steps.step(rate, scheduled=scheduled)

    def reset_optimizer(self) -> None:
        self.steps.adamw.state.clear()

    def gradients(self) -> dict[str, Tensor]:
        return {
            name.removeprefix("model."): gradient
            for name, gradient in self.steps.gradients().items()
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Tied parameters have the name that `named_parameters` gives."""
        for name, weight in whole_weights(self.model.module.model, _whole):
            if self.ranks.rank == 0:
                yield name, weight.to(self.model.dtype)

    def hugging_face_model(self) -> PreTrainedModel:
        return self.model.module.model

    def save(self, folder: str, progress: dict[str, int]) -> None:
        checkpoint.save(folder, self.model.module, self.steps.adamw, progress)

    def load(self, folder: str, progress: dict[str, int]) -> dict[str, int]:
        return checkpoint.load(folder, self.model.module, self.steps.adamw, progress)

    def offload(self) -> None:
        """Move everything to host memory."""
        self.steps.move(torch.device("cpu"))
        self.model.offload()

    def onload(self) -> None:
        self.model.onload()
        self.steps.move(self.model.home)


def fsdp2_policy(
    load: Callable[[], PreTrainedModel],
    optimizer: OptimizerSpec,
    *,
    max_tokens: int = 16_384,
    temperature: float = 1.0,
    packing: bool = False,
    dtype: torch.dtype | None = None,
    options: FsdpOptions = DEFAULTS,
) -> PolicyTrainer:
    """Return a policy that trains with FSDP2. For ranks and errors see `ShardedModule`.

    Args:
        load: makes the model, in the dtype of its parameters and of the optimizer's state.
        optimizer: learning rate, schedule, clipping.
        max_tokens: tokens of one micro-batch, padding included.
        temperature: of the sampling, for `compute_log_probs` and `supervised_step`.
        packing: several sequences in a row, if the model keeps them apart.
        dtype: of the computation and of exported weights; default: the parameters'.
        options: `strategy.config`.
    """
    model = ShardedModule(
        PolicyModule(load(), options.logits_chunk_elements),
        max_tokens=max_tokens,
        packing=packing,
        dtype=dtype,
        options=options,
    )
    return PolicyTrainer(Fsdp2Strategy(model, optimizer), temperature)


def _whole(parameter: nn.Parameter) -> Tensor:
    return whole(parameter.detach())
