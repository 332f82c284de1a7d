"""A model over the ranks: plain torch on one, fully sharded data parallelism (FSDP2) on more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
import torch.nn.attention.varlen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from agenticrun_workers.models.devices import HostCopies, compute_device
from agenticrun_workers.models.pretrained import ModelLoader
from agenticrun_workers.models.shape import (
    EXPERTS,
    FsdpUnits,
    check_experts,
    float32_parts,
    fsdp_units,
)
from agenticrun_workers.trainer.log_probs import CHUNK_ELEMENTS
from agenticrun_workers.trainer.micro_batch import MicroBatcher, responses
from agenticrun_workers.trainer.modules import (
    FullSequences,
    PolicyModule,
    ValueModule,
    can_pack,
    try_varlen,
)
from agenticrun_workers.trainer.ranks import Ranks, agreed, join_alone
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
}
"""Options of ROLL, verl or torch, and the field that decides each."""
EXPENSIVE = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
]
"""Operators that selective recomputation does not repeat: matrix products and attention."""

EXPERT_PARALLELISM = ("expert_model_parallel_size", "ep_size")
"""Names that other trainers give to `expert_parallel_size`."""


@dataclass(frozen=True, slots=True)
class FsdpOptions:
    """Storage and computation of a model (`strategy.config`). No option changes what is learned."""

    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward pass and gather them again for the
    backward pass (ZeRO-3). False keeps them (ZeRO-2): less communication, more memory."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of each layer; compute the layer again in the backward pass."""
    recompute_granularity: Literal["full", "selective"] = "full"
    """full: `gradient_checkpointing` computes whole layers again. selective: all but their matrix
    products and attention, whose results are kept."""
    fsdp_size: int = -1
    """Number of neighbouring ranks that share one copy of the model; every other group of as many
    ranks holds another copy (HSDP). Gathers then stay inside a group, such as a node; only summed
    gradients travel between groups. Divides the ranks. -1: all ranks share one copy."""
    expert_parallel_size: int = 1
    """Number of neighbouring ranks that divide the experts of each layer and exchange tokens, so
    that only the parts of a rank are gathered there. Divides the ranks that share a copy of the
    model, and the experts."""
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
            if name in EXPERT_PARALLELISM:
                raise ValueError(f"{name}: fsdp2 calls it expert_parallel_size")
            if name not in types:
                raise ValueError(f"fsdp2 has no option {name}; it has {', '.join(types)}")
            if name == "fsdp_size" and value == -1:
                continue
            if get_origin(types[name]) is Literal:
                right, kind = value in get_args(types[name]), " or ".join(get_args(types[name]))
            elif types[name] is bool:
                right, kind = type(value) is bool, "true or false"
            else:
                right, kind = type(value) is int and value >= 1, "a whole number of at least 1"
            if not right:
                raise ValueError(f"the option {name} of fsdp2 must be {kind}, not {value!r}")
        return FsdpOptions(**config)

    def on_other_ranks(self) -> FsdpOptions:
        """Return the options for any number of ranks: those without a number of ranks in them."""
        return replace(self, ulysses_sequence_parallel_size=1, fsdp_size=-1, expert_parallel_size=1)

    def copies(self, ranks: int) -> int:
        """Return the number of copies of the model.

        Raises:
            ValueError: `fsdp_size` does not divide the ranks.
        """
        if self.fsdp_size == -1:
            return 1
        if ranks % self.fsdp_size:
            raise ValueError(
                f"fsdp_size {self.fsdp_size} does not divide the {ranks} trainer ranks"
            )
        return ranks // self.fsdp_size


DEFAULTS = FsdpOptions()


def shard(
    module: nn.Module,
    layers: Iterable[nn.Module],
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype,
    options: FsdpOptions,
    kept: nn.Module | None = None,
    wide: Iterable[nn.Module] = (),
) -> None:
    """Fully shard a module over the ranks, layer by layer. Gradients are summed, not averaged.

    Args:
        module: the root. Its parameters may be on the meta device.
        layers: parts that are gathered one at a time.
        ranks: all of the trainer.
        device: of the computation.
        dtype: of the computation. Parameters and gradients keep their own.
        options: of the run.
        kept: the layer that computes last.
        wide: parts that compute in the dtype of their parameters.
    """
    own = kept_dtype(module)
    # Plain PyTorch: a single rank shards nothing, converts nothing and offloads nothing. With mixed
    # precision or offload it goes through FSDP2, so that there is only one code path.
    if ranks.size == 1 and dtype == own and not options.offload_policy:
        return
    # FSDP2 needs a process group, also of one rank.
    if not torch.distributed.is_initialized():
        join_alone(device)
    copies = options.copies(ranks.size)
    mesh = (
        init_device_mesh(device.type, (ranks.size,))
        if copies == 1
        else init_device_mesh(
            device.type, (copies, ranks.size // copies), mesh_dim_names=("copies", "shards")
        )
    )
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
    size = options.expert_parallel_size
    experts = expert_layers(module) if size > 1 else {}
    meshes: dict[nn.Module, DeviceMesh] = {}
    if experts:
        grid = init_device_mesh(
            device.type,
            (copies, ranks.size // copies // size, size, 1),
            mesh_dim_names=("copies", "shards", "experts", "alone"),
        )
        divide_experts(module, experts, grid)
        over = grid["shards"] if copies == 1 else grid["copies", "shards"]
        meshes = dict.fromkeys(experts.values(), over)
    alone = dict.fromkeys(wide)
    for unit in [*alone, *meshes, *layers, module]:
        # The backward pass of the last layer follows its forward pass at once: to free its weights
        # would only gather them twice.
        reshard = options.reshard_after_forward and unit is not module and unit is not kept
        fully_shard(
            unit,
            mesh=meshes.get(unit, mesh),
            reshard_after_forward=reshard,
            # The weights of routers may be wider than the computation.
            mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False)
            if unit in alone
            else replace(precision, cast_forward_inputs=unit not in meshes),
            offload_policy=offload,
        )
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


def expert_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the parts that compute with all experts of a layer, by name.

    transformers gives all their classes this attribute.
    """
    return {name: part for name, part in module.named_modules() if hasattr(part, "is_concatenated")}


def divide_experts(module: nn.Module, layers: Mapping[str, nn.Module], grid: DeviceMesh) -> None:
    """Divide the experts of a module over the ranks, which exchange tokens in each layer.

    Args:
        module: whole; may be on the meta device.
        layers: its `expert_layers`.
        grid: its dimension `experts` is that of the division. `alone` has one rank: each has its
            own tokens.
    """
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    plan = {
        f"{name}.{parameter}": "grouped_gemm"
        for name, layer in layers.items()
        for parameter, _ in layer.named_parameters(recurse=False)
    }
    plan |= dict.fromkeys(layers, "ep_dispatch_experts")
    apply_expert_parallelism(module, grid["experts"], grid["alone"], plan, "all_to_all")


def kept_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of the master weights: of what trains, or of all if nothing does."""
    parameters = list(module.parameters())
    return next((p.dtype for p in parameters if p.requires_grad), parameters[0].dtype)


Module = TypeVar("Module", PolicyModule, ValueModule)


Load = Callable[[], PreTrainedModel]
"""Makes a model, the same on every rank. Of a `ModelLoader` each rank loads only its shards."""


class ShardedModule(Generic[Module]):
    """A module on one rank of several, and the micro-batches that it computes. Collective.

    With more than one rank `torch.distributed` must be initialised before.

    Args:
        load: the model.
        make: the module of a model, which may have no data yet. It gets evaluation mode: without
            dropout, log-probs are a function of the weights.
        max_tokens: tokens of one micro-batch, padding included.
        packing: put several sequences in a row if the model keeps them apart; otherwise warn and
            pad.
        dtype: of the computation; default: the parameters'.
        options: of the run.
        sharded: False leaves the module whole: the caller reduces the ranks' gradients.

    Raises:
        ModelLoadError: the model cannot be loaded on some rank.
        UnsupportedModel: the model does not support the options.
        ValueError: the options do not fit the number of ranks.
    """

    def __init__(
        self,
        load: Load,
        make: Callable[[PreTrainedModel], Module],
        *,
        max_tokens: int,
        packing: bool,
        dtype: torch.dtype | None = None,
        options: FsdpOptions = DEFAULTS,
        sharded: bool = True,
    ) -> None:
        self._options = options
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if sharded and several and isinstance(load, ModelLoader):
            self.device = compute_device()
            self.ranks = Ranks(self.device, options.ulysses_sequence_parallel_size)
            options.copies(self.ranks.size)
            agreed(lambda: load.load_shards(lambda model: self._shard(model, make(model), dtype)))
        else:
            model = load()
            self.device = next(model.parameters()).device
            self.ranks = Ranks(self.device, options.ulysses_sequence_parallel_size)
            self._arrange(make(model), dtype, sharded=sharded)
        self.home = torch.device("cpu") if options.offload_policy else self.device
        self._host_copies = HostCopies()
        self._place(self.home)
        packed, varlen = self._probe(packing)
        # Kernels of GPUs take the keys of a sequence in one piece.
        shared = varlen and self.device.type == "cpu"
        self.batcher = MicroBatcher(
            self.ranks, self.device, max_tokens, packed=packed, shared=shared
        )

    def _shard(self, model: PreTrainedModel, module: Module, dtype: torch.dtype | None) -> None:
        """Shard a module and everything of its model, which is on the meta device."""
        self._arrange(module, dtype, sharded=True)
        head = model.get_output_embeddings()
        # A critic does not use it, but the loader reads it.
        if head is not None and all(part is not head for part in module.modules()):
            shard(head, (), self.ranks, self.device, self.dtype, self._options)

    def _check_experts(self, module: Module) -> None:
        """Raise `ValueError` if the ranks cannot divide or spread the experts of each layer."""
        size, parts = self.ranks.size, self._options.expert_parallel_size
        weights = {name: weight for name, weight in module.named_parameters() if EXPERTS in name}
        for experts in set(map(len, weights.values())) or {0}:
            check_experts(experts, size, copies=self._options.copies(size), expert_parallel=parts)
        divisible = {
            f"{layer}.{name}"
            for layer, part in expert_layers(module).items()
            for name, _ in part.named_parameters(recurse=False)
        }
        if parts > 1 and (other := next((name for name in weights if name not in divisible), None)):
            raise ValueError(
                f"expert_parallel_size is {parts}, but {other} is no weight of all experts in the "
                "form that can be divided: leave it out"
            )

    def _arrange(self, module: Module, dtype: torch.dtype | None, *, sharded: bool) -> None:
        module.eval()
        self.module: Module = module
        self.dtype: torch.dtype = dtype or kept_dtype(module)
        self.wide: list[nn.Module] = []
        output: nn.Module | None = (
            module.model.get_output_embeddings() if isinstance(module, PolicyModule) else None
        )
        units: FsdpUnits = fsdp_units(module.decoder, output)
        head: nn.Module | None = output if output in units.ends else None
        if self._options.gradient_checkpointing:
            selective = self._options.recompute_granularity == "selective"
            kept = (
                {"context_fn": partial(create_selective_checkpoint_contexts, EXPENSIVE)}
                if selective
                else {}
            )
            for layer in units.layers:  # transformers' own does nothing in evaluation mode
                layer.forward = partial(
                    recompute, layer.forward, use_reentrant=False, preserve_rng_state=False, **kept
                )
        if sharded:
            self._check_experts(module)
            parts = [*units.layers, *units.ends]
            narrow = self.dtype != kept_dtype(module)
            self.wide = float32_parts(module.decoder)[0] if narrow else []
            shard(
                module,
                parts,
                self.ranks,
                self.device,
                self.dtype,
                self._options,
                kept=head,
                wide=self.wide,
            )
            register_fsdp_forward_method(module, "run")
            if head is not None:
                register_fsdp_forward_method(head, "score")

    def _probe(self, packing: bool) -> tuple[bool, bool]:
        """Check the model and arrange its sequences.

        Return if rows are packed, and if the attention is that of `varlen`.
        """
        module = self.module
        module.run(lambda: module.check(self.device))
        pieces = self._options.ulysses_sequence_parallel_size > 1
        varlen = not pieces and module.run(lambda: try_varlen(module.decoder, self.device))
        packed = packing and (varlen or module.run(lambda: can_pack(module.decoder, self.device)))
        if packing and not packed:
            log.info(
                "%s mixes packed sequences: its rows are padded",
                type(module.decoder).__name__,
            )
        if varlen:
            module.sequences = FullSequences(varlen=True)
        if pieces:
            module.sequences = module.run(
                lambda: UlyssesSequences(module.decoder, self.ranks, self.device, packed=packed)
            )
        self.reshard()
        return packed, varlen

    @torch.no_grad()
    def score(
        self: ShardedModule[PolicyModule], samples: list[Sample], temperature: float
    ) -> list[FloatArray]:
        """Return the log-probs [T] of each sample's response tokens, 0 elsewhere. Collective."""
        result = [np.zeros(len(sample.tokens_T), np.float32) for sample in samples]
        for batch in self.batcher.split(samples, responses):
            batch.put(self.module(batch, temperature)[0], result)
        # No backward pass follows that would do it.
        self.reshard()
        return result

    def _place(self, device: torch.device) -> None:
        """Move parameters; buffers stay where the computation is."""
        self.module.to(device)
        for buffer in self.module.buffers():
            buffer.data = buffer.data.to(self.device)

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
        with torch.no_grad():
            self.module._apply(self._host_copies.filling())  # type: ignore[no-untyped-call]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move the module back to the device."""
        self._place(self.home)
