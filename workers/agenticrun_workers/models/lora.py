"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) in the linear layers of a model, by peft.

The adapters are put into the model itself, which keeps its class, its decoder and its output layer.
They change nothing until they are trained.

transformers and peft are imported only where adapters are added: nodes that merge adapters into
weights load no model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
BASE = "base_layer"

Gather = Callable[[nn.Parameter], Tensor]
"""Returns the whole value of a parameter, under any sharding. Collective: called for all parameters
in the same order on every rank."""

MergeRule = tuple[float, bool]
"""alpha / rank, and True where the layer holds its weight transposed."""


class UnknownTarget(ValueError):
    """`LoraSpec.target_modules` has no layer which adapters can go into."""


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Trained instead of a layer's weight W: A and B in W + alpha / rank * B A."""

    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] = ()
    """Names of layers, or ends of their dotted names. Empty: all linear layers but the output."""


def add_lora(model: PreTrainedModel, spec: LoraSpec, seed: int = 0) -> PreTrainedModel:
    """Add adapters to `model`, in place, and freeze everything else.

    The adapters have float32 or the model's wider dtype. Those of a model without data (on the meta
    device) have data, on the CPU. The experts of a mixture and its routers stay frozen, unless the
    routers are linear layers.

    Args:
        seed: of A; B is zero. All ranks must pass the same.

    Raises:
        UnknownTarget: no linear layer has a name in `target_modules`, or the output layer has it.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]  # any number
        target_modules=_targets(model, spec.target_modules),
        lora_dropout=0.0,
    )
    # peft translates the targets of a transformers model: all layers, or those of shared experts,
    # into the parameters of all experts. It knows such a model by its config.
    without_config = nn.ModuleDict({"model": model})
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _stand_ins(model):
        # peft detects which layers hold their weight transposed
        warnings.filterwarnings("ignore", "fan_in_fan_out")
        torch.manual_seed(seed)
        inject_adapter_in_model(config, without_config, adapter_name=ADAPTER)
    return model


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[None]:
    """Replace the weights that get adapters by expanded zeros, which take no memory; then freeze.

    peft makes adapters on the device and in the dtype of the layer's weight, but the base may have
    no data yet, or the narrower dtype of frozen weights.
    """
    layers: dict[nn.Module, nn.Parameter] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.dim() == 2:
            layers[module] = weight
    for layer, weight in layers.items():
        dtype = torch.promote_types(weight.dtype, torch.float32)
        zero = torch.zeros((), dtype=dtype, device="cpu" if weight.is_meta else weight.device)
        layer.register_parameter(
            "weight", nn.Parameter(zero.expand(weight.shape), requires_grad=False)
        )
    try:
        yield
    finally:
        for layer, weight in layers.items():
            weight.requires_grad = False
            layer.register_parameter("weight", weight)


@contextmanager
def hidden_adapters(model: nn.Module) -> Iterator[None]:
    """Let the base be the whole model: its names are those of the files."""
    layers = _adapted(model)
    for name, layer in layers.items():
        model.set_submodule(name, layer.get_base_layer())
    try:
        yield
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)


def describe_lora(model: nn.Module) -> dict[str, Any] | None:
    """Return rank, alpha and the names of the adapted layers as JSON; None without adapters."""
    layers = _adapted(model)
    if not layers:
        return None
    first = next(iter(layers.values()))
    spec = LoraSpec(first.r[ADAPTER], first.lora_alpha[ADAPTER], tuple(sorted(layers)))
    return {**asdict(spec), "target_modules": list(spec.target_modules)}


class Adapters:
    """The adapters of a policy that trains nothing else, and its base, out of any sharding.

    `merge` computes the policy's weights from them.
    """

    def __init__(self, model: PreTrainedModel, whole: Gather, rank: int) -> None:
        self._model = model
        self._whole = whole
        self._rank = rank

    @classmethod
    def of(cls, model: PreTrainedModel, whole: Gather, rank: int) -> Adapters | None:
        """Return the adapters of `model`, or None if it has none."""
        return cls(model, whole, rank) if merge_rules(model) else None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield A and B of each layer by `adapter_names`, in the dtype of the computation.

        Collective; yields on rank 0 only.
        """
        return self._on_first(adapter_weights(self._model, self._whole))

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all other parameters, which never change.

        Their order, names and shapes are those of `PolicyTrainer.export_weights`, their dtype is
        that of the computation. Collective; yields on rank 0 only.
        """
        from agenticrun_workers.models.stored_names import stored_weights

        return self._on_first(stored_weights(self._model, base_weights(self._model, self._whole)))

    def rules(self) -> dict[str, MergeRule]:
        """Return the merge rule of each adapted weight, by its name."""
        return merge_rules(self._model)

    def _on_first(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for named in weights:
            if self._rank == 0:
                yield named


def whole_weights(
    model: nn.Module, whole: Gather, without_adapters: Gather | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters under their names without adapters, with adapters merged into them.

    Merged values have float32 or the model's wider dtype. The model does not change. Tied
    parameters come once.

    Args:
        without_adapters: gathers the parameters that have none; default: `whole`. It may round
            them before they travel.
    """
    layers = {f"{name}.weight": layer for name, layer in _adapted(model).items()}
    for name, parameter in _base(model):
        layer = layers.get(name)
        if layer is None:
            yield name, (without_adapters or whole)(parameter)
        else:
            value = whole(parameter)
            a, b = (whole(part) for part in _parts(layer))
            yield name, merge(value, a, b, _rule(layer))


def base_weights(model: nn.Module, whole: Gather) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that are no adapters, under their names without adapters."""
    return ((name, whole(parameter)) for name, parameter in _base(model))


def _base(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    layers = _adapted(model)
    adapters = {id(part) for layer in layers.values() for part in _parts(layer)}
    for name, parameter in model.named_parameters():
        if id(parameter) in adapters:
            continue
        owner, _, last = name.rpartition(".")
        plain = owner.removesuffix(f".{BASE}")
        yield f"{plain}.{last}" if plain in layers else name, parameter


def adapter_weights(model: nn.Module, whole: Gather) -> Iterator[tuple[str, Tensor]]:
    """Yield A and B of each adapted layer, by `adapter_names`."""
    for layer_name, layer in _adapted(model).items():
        for name, part in zip(adapter_names(f"{layer_name}.weight"), _parts(layer), strict=True):
            yield name, whole(part)


def merge_rules(model: nn.Module) -> dict[str, MergeRule]:
    """Return the merge rule of each adapted weight, by its name."""
    return {f"{name}.weight": _rule(layer) for name, layer in _adapted(model).items()}


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of a weight's A and B: `<layer>.lora_{A,B}.weight`."""
    layer = weight.removesuffix(".weight")
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


@torch.no_grad()
def merge(weight: Tensor, a: Tensor, b: Tensor, rule: MergeRule) -> Tensor:
    """Return W + alpha / rank * B A, in float32 or in the weight's wider dtype."""
    scale, transposed = rule
    wide = torch.promote_types(weight.dtype, torch.float32)
    # in place: a pass over memory costs more than the arithmetic
    product = (b.to(wide) @ a.to(wide)).mul_(scale)
    return (product.T if transposed else product).add_(weight)


def _adapted(model: nn.Module) -> dict[str, Any]:
    """Return the layers with adapters (peft's `LoraLayer`), by name."""
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}


def _parts(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A and B."""
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def _rule(layer: Any) -> MergeRule:
    return layer.scaling[ADAPTER], layer.fan_in_fan_out


def _targets(model: PreTrainedModel, targets: tuple[str, ...]) -> list[str]:
    """Return the names of the layers that get adapters.

    Raises:
        UnknownTarget: see `add_lora`.
    """
    from transformers.pytorch_utils import Conv1D

    from agenticrun_workers.models.stored_names import stored_parts

    layers = dict(model.named_modules())
    output = model.get_output_embeddings()
    chosen = [
        name
        for name, layer in layers.items()
        if isinstance(layer, nn.Linear | Conv1D) and layer is not output
    ]
    for target in targets:
        found = [name for name in layers if name == target or name.endswith(f".{target}")]
        if not found:
            if any(name.endswith(f".{target}") for name, _ in model.named_parameters()):
                raise UnknownTarget(f"{target} holds all experts, which adapters leave as they are")
            raise UnknownTarget(f"the model has no layer {target}")
        for name in found:
            if layers[name] is output:
                raise UnknownTarget(f"{name} is the output layer, which adapters leave as it is")
            if name not in chosen:
                raise UnknownTarget(
                    f"{name} is a {type(layers[name]).__name__}, adapters go into linear layers"
                )
    if targets:
        chosen = [name for name in chosen if any(f".{name}".endswith(f".{t}") for t in targets)]
    for name in chosen:
        weight = f"{name}.weight"
        empty = torch.empty(model.get_parameter(weight).shape, device="meta")
        # Engines merge adapters into weights by the names of the files.
        if list(stored_parts(model, weight, empty)) != [weight]:
            raise UnknownTarget(f"{name} has another name in the files of the model: leave it out")
    return chosen
