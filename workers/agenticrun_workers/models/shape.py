"""The shape of a model: its parameters and their FSDP units, from its config alone.

The model is made on the meta device, so that a shape of any size costs a second and no memory.
torch is imported inside functions, because the driver imports this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from agenticrun_api import Role
from agenticrun_workers.models.folder import ModelLoadError
from agenticrun_workers.models.source import ModelSource, ModelSources

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

EXPERTS = ".experts."
"""Part of the names of parameters of which a token uses only those of its own experts. Their first
dimension is the expert."""


def check_experts(experts: int, ranks: int, *, copies: int = 1, expert_parallel: int = 1) -> None:
    """Check that each rank gets experts of a layer, as the load of its shard needs.

    Args:
        experts: of the layer; 0 for a dense model.
        ranks: of the trainer.
        copies: of the model, each on as many ranks (`fsdp_size`).
        expert_parallel: ranks that divide the experts, and exchange tokens
            (`expert_parallel_size`). FSDP spreads the part of each over the other ranks of a copy.

    Raises:
        ValueError: an option does not divide what it must, or a rank gets no expert; with the
            arithmetic and the remedy.
    """
    shards = ranks // copies

    def has_rows(rows: int, parts: int) -> bool:
        # FSDP2 gives each rank as many rows as the first one, until none is left.
        return -(-rows // parts) * (parts - 1) < rows

    def fits(shards: int, size: int) -> bool:
        return (
            not shards % size and not experts % size and has_rows(experts // size, shards // size)
        )

    if experts == 0:
        if expert_parallel > 1:
            raise ValueError(
                f"expert_parallel_size is {expert_parallel}, but the model has no experts: leave "
                "it out"
            )
        return
    if fits(shards, expert_parallel):
        return
    sizes = [size for size in range(1, shards + 1) if fits(shards, size)]
    take = f"set expert_parallel_size to {' or '.join(map(str, sizes))}"
    if not sizes:
        best = max(n for n in range(1, ranks + 1) if ranks % n == 0 and fits(n, 1))
        also = ", and leave expert_parallel_size out" if expert_parallel > 1 else ""
        take = f"set fsdp_size to {best}{also}"
    if shards % expert_parallel:
        raise ValueError(
            f"expert_parallel_size {expert_parallel} does not divide the {shards} ranks that share "
            f"a copy of the model: {take}"
        )
    if experts % expert_parallel:
        raise ValueError(
            f"expert_parallel_size {expert_parallel} does not divide the {experts} experts of a "
            f"layer: {take}"
        )
    part, over = experts // expert_parallel, shards // expert_parallel
    of = f" ({experts} / expert_parallel_size {expert_parallel})" if expert_parallel > 1 else ""
    raise ValueError(
        f"the {part} experts{of} of a layer cannot be spread over {over} ranks, because one would "
        f"hold none: {take}"
    )


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of a model."""

    name: str
    shape: tuple[int, ...]
    unit: int
    """Index of its FSDP unit."""
    linear: bool = False
    """The weight of a linear layer that may have an adapter."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def of_experts(self) -> bool:
        return EXPERTS in self.name

    def local(self, ranks: int, rank: int = 0, *, expert_parallel: int = 1) -> int:
        """Return how many of its elements are on a rank.

        FSDP2 gives each rank as many rows as the first one, which has the most, until none is left.

        Args:
            ranks: of one copy of the model.
            rank: one of them.
            expert_parallel: neighbouring ones of them that divide the experts first.
        """
        if self.of_experts and expert_parallel > 1:
            return self.divided(expert_parallel).local(
                ranks // expert_parallel, rank // expert_parallel
            )
        rows, *rest = self.shape
        most = -(-rows // ranks)
        return max(0, min(most, rows - rank * most)) * prod(rest)

    def divided(self, expert_parallel: int) -> Weight:
        """Return the part of one of so many ranks that divide the experts."""
        if not self.of_experts:
            return self
        return replace(self, shape=(self.shape[0] // expert_parallel, *self.shape[1:]))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers from which memory and time of a model follow."""

    name: str
    weights: tuple[Weight, ...]
    """Tied weights are listed once."""
    units: tuple[str, ...]
    """Names of the FSDP units: layers, embedding and output layer unless they are tied, root."""
    layers: int
    hidden: int
    query: int
    """Attention heads times size of a head."""
    key_value: int
    """Key-value heads times size of a head."""
    kv_heads: int
    mlp: int
    """Hidden size of the MLP; of a mixture, of all experts that a token uses."""
    vocabulary: int
    tied: bool
    """The output layer is the embedding."""
    experts: int = 1
    """Experts of a layer."""
    experts_used: int = 1
    """Experts of a layer that a token uses."""
    qk_norm: bool = False

    @classmethod
    def of_size(cls, parameters: float) -> ModelShape:
        """Return the shape of a model of which only the number of parameters is known."""
        weights = (Weight("all", (int(parameters),), 0),)
        return cls("", weights, ("root",), 0, 0, 0, 0, 0, 0, 0, tied=True)

    @property
    def parameters(self) -> int:
        return sum(weight.numel for weight in self.weights)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token uses: of a mixture, without the other experts."""
        experts = sum(weight.numel for weight in self.weights if weight.of_experts)
        return self.parameters - experts + experts * self.experts_used // self.experts

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer."""
        ends = 1 if self.tied else 3
        return max(map(self.unit_parameters, range(len(self.units) - ends)), default=0)

    @property
    def embedding_unit(self) -> int:
        """Parameters of the embedding's own unit; 0 if the root has it."""
        return 0 if self.tied else self.unit_parameters(len(self.units) - 3)

    @property
    def head_units(self) -> int:
        """Parameters of the output layer and the root, which are gathered together."""
        first = len(self.units) - (1 if self.tied else 2)
        return sum(map(self.unit_parameters, range(first, len(self.units))))

    @property
    def multiplied(self) -> int:
        """Parameters that each token is multiplied with: all but a separate embedding."""
        return self.active_parameters - (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def kv_elements(self) -> int:
        """Elements of one token in the KV cache."""
        return 2 * self.layers * self.key_value

    def unit_parameters(self, unit: int) -> int:
        return sum(weight.numel for weight in self.weights if weight.unit == unit)

    def local(self, ranks: int) -> int:
        """Return the elements of all parameters on the first rank, which has the most."""
        return sum(weight.local(ranks) for weight in self.weights)

    def divided(self, expert_parallel: int) -> ModelShape:
        """Return what FSDP sees of the model on one of so many ranks that divide the experts."""
        weights = tuple(weight.divided(expert_parallel) for weight in self.weights)
        return replace(self, weights=weights)

    def adapters(self, rank: int, targets: Sequence[str] = ()) -> Iterator[Weight]:
        """Return the two weights of each LoRA adapter (`LoraSpec`)."""
        for weight in self.weights:
            layer = weight.name.removesuffix(".weight")
            if weight.linear and (
                not targets or any(f".{layer}".endswith(f".{name}") for name in targets)
            ):
                outputs, inputs = weight.shape
                yield Weight(f"{layer}.lora_A", (rank, inputs), weight.unit)
                yield Weight(f"{layer}.lora_B", (outputs, rank), weight.unit)


@dataclass(frozen=True, slots=True)
class FsdpUnits:
    """Parts of a model that FSDP gathers one at a time, apart from its root."""

    layers: list[nn.Module]
    ends: list[nn.Module]
    """Embedding and output layer. The root is gathered during the whole pass, so it should hold no
    more than norms. Ends that share a weight stay in it, because the weight is needed at both ends
    of the pass."""


def fsdp_units(decoder: PreTrainedModel, head: nn.Module | None) -> FsdpUnits:
    """Return the units of a model. Trainers shard by them, and plans compute with them.

    Args:
        decoder: the part that computes hidden states.
        head: the output layer; None for a model that has none or does not use it.
    """
    names = decoder._no_split_modules or ()
    layers = [part for part in decoder.modules() if type(part).__name__ in names]
    embedding = decoder.get_input_embeddings()
    if head is not None and head.weight is embedding.weight:
        return FsdpUnits(layers, [])
    return FsdpUnits(layers, [part for part in (embedding, head) if part is not None])


def float32_parts(model: PreTrainedModel) -> tuple[list[nn.Module], list[str]]:
    """Return what of a model in bfloat16 must compute in float32, such as some routers.

    Returns:
        modules all of whose parameters must, and the names of such parameters in other modules.
    """
    import torch

    words = "|".join(map(re.escape, model._get_dtype_plan(torch.bfloat16)))
    names = [name for name, _ in model.named_parameters()] if words else []
    left = {name for name in names if re.search(rf"(^|\.)({words})(\.|$)", name)}
    parts = []
    for path, part in model.named_modules():  # a module comes before its parts
        inner = {f"{path}.{name}" for name, _ in part.named_parameters()}
        if inner and inner <= left:
            parts.append(part)
            left -= inner
    return parts, sorted(left)


def source_shape(source: ModelSource) -> ModelShape:
    """Return the shape of a run's model. Only its config is read.

    Raises:
        ModelLoadError: there is no such model here or on the Hub, or it is of a kind that is not
            trained.
    """
    from agenticrun_workers.models.pretrained import load_config

    trust = source.trust_remote_code
    with source.folder() as folder:
        config = load_config(folder, trust_remote_code=trust)
        return read_shape(config, source.path or "the run's own model", trust_remote_code=trust)


Description = tuple[str, int, dict[Role, ModelShape]]
"""Name and bytes of a GPU, and the shapes of a run's models."""


def describe(device: torch.device, sources: ModelSources) -> Description | None:
    """Return a GPU and the shapes of a run's models.

    Returns:
        None for another device, and for models that cannot be loaded.
    """
    import torch

    if device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(device)
    try:
        shapes = {
            Role.TRAINER: source_shape(sources.policy),
            Role.REFERENCE: source_shape(sources.reference),
            Role.CRITIC: source_shape(sources.critic),
        }
    except ModelLoadError:
        return None
    return gpu.name, gpu.total_memory, shapes


def read_shape(
    config: PretrainedConfig, name: str = "", *, trust_remote_code: bool = False
) -> ModelShape:
    """Return the shape of the model that a config describes.

    Raises:
        ModelLoadError: transformers cannot make such a model.
    """
    from torch import nn

    from agenticrun_workers.models.heads import decoder_of
    from agenticrun_workers.models.pretrained import make_without_data

    try:
        model = make_without_data(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # configs may be wrong in any way, and bring code of their own
        raise ModelLoadError(f"{name} describes no causal language model: {error}") from error
    head = model.get_output_embeddings()
    found = fsdp_units(decoder_of(model), head)
    units = [*found.layers, *found.ends, model]
    names = {module: path for path, module in model.named_modules()}
    unit_of = {
        id(parameter): number
        for number, unit in reversed(list(enumerate(units)))
        for parameter in unit.parameters()
    }
    linears = {
        id(part.weight)
        for part in model.modules()
        if isinstance(part, nn.Linear) and part is not head
    }
    weights = tuple(
        Weight(path, tuple(weight.shape), unit_of[id(weight)], id(weight) in linears)
        for path, weight in model.named_parameters()
    )
    text = config.get_text_config(decoder=True)

    def number(*fields: str, default: int) -> int:
        found = (getattr(text, field, None) for field in fields)
        return next((int(value) for value in found if isinstance(value, int)), default)

    hidden = number("hidden_size", default=0)
    heads = number("num_attention_heads", default=0)
    kv_heads = number("num_key_value_heads", default=heads)
    head_size = number("head_dim", default=hidden // max(1, heads))
    dense = number("intermediate_size", default=4 * hidden)
    experts = next((weight.shape[0] for weight in weights if weight.of_experts), 0)
    used = number("num_experts_per_tok", default=1)
    expert_size = number("moe_intermediate_size", default=dense)
    return ModelShape(
        name=name,
        weights=weights,
        units=tuple(names[unit] or "root" for unit in units),
        layers=number("num_hidden_layers", default=0),
        hidden=hidden,
        query=heads * head_size,
        key_value=kv_heads * head_size,
        kv_heads=kv_heads,
        mlp=used * expert_size if experts else dense,
        vocabulary=number("vocab_size", default=0),
        tied=head is not None and head.weight is model.get_input_embeddings().weight,
        experts=experts or 1,
        experts_used=used if experts else 1,
        qk_norm=any("q_norm" in weight.name for weight in weights),
    )
