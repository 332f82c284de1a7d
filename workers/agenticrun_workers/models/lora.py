"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) in the linear layers of a model, by peft.

The adapters are put into the model itself: it keeps its class, its decoder and its output layer. At first they change nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from agenticrun_workers.models.merging import MergeRule, adapter_names, merge

ADAPTER = "default"
BASE = "base_layer"


class UnknownTarget(ValueError):
    """A name in `LoraSpec.target_modules` that is no layer which adapters can go into."""


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """What is trained instead of a layer's weight W: A and B in W + alpha / rank * B A."""

    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] = ()
    """Names of the layers, or ends of their dotted names; default: all linear ones but the output layer."""


def add_lora(model: PreTrainedModel, spec: LoraSpec, seed: int = 0) -> PreTrainedModel:
    """The same model, changed: from now on its adapters alone train.

    Args:
        seed: of A; B is zero. All ranks must give the same.

    Raises:
        UnknownTarget: a name in `target_modules` that no linear layer has, or that the output layer has.
    """
    from peft import (
        LoraConfig,
        inject_adapter_in_model,
    )  # seconds: only runs with adapters wait for it

    _check_targets(model, spec.target_modules)
    targets = list(spec.target_modules) or "all-linear"
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]  # any number
        target_modules=targets,
        lora_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "fan_in_fan_out"
        )  # peft sees by itself which layers hold their weight transposed
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    return model


def describe_lora(model: nn.Module) -> dict[str, Any] | None:
    """Rank, alpha and the layers that have adapters, as JSON; None without adapters."""
    layers = _adapted(model)
    if not layers:
        return None
    first = next(iter(layers.values()))
    spec = LoraSpec(first.r[ADAPTER], first.lora_alpha[ADAPTER], tuple(sorted(layers)))
    return {**asdict(spec), "target_modules": list(spec.target_modules)}


def whole_weights(
    model: nn.Module, whole: Callable[[nn.Parameter], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The parameters under the names that they have without adapters, with these merged: W + alpha / rank * B A.

    Merged ones are computed and given in float32, or in the model's wider dtype. The model does not change. Tied ones come once.

    Args:
        whole: gives a parameter's whole value, under any sharding. Called for all parameters, in the same order on every rank.
    """
    layers = {f"{name}.weight": layer for name, layer in _adapted(model).items()}
    for name, value in base_weights(model, whole):
        layer = layers.get(name)
        if layer is not None:
            a, b = (whole(part) for part in _parts(layer))
            value = merge(value, a, b, _rule(layer))
        yield name, value


def base_weights(
    model: nn.Module, whole: Callable[[nn.Parameter], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The parameters without the adapters, under the names that they have without them. `whole` as of `whole_weights`."""
    layers = _adapted(model)
    adapters = {id(part) for layer in layers.values() for part in _parts(layer)}
    for name, parameter in model.named_parameters():
        if id(parameter) in adapters:
            continue
        owner, _, last = name.rpartition(".")
        plain = owner.removesuffix(f".{BASE}")
        yield f"{plain}.{last}" if plain in layers else name, whole(parameter)


def adapter_weights(
    model: nn.Module, whole: Callable[[nn.Parameter], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """A and B of each adapted layer, as `adapter_names` calls them. `whole` as of `whole_weights`."""
    for layer_name, layer in _adapted(model).items():
        for name, part in zip(adapter_names(f"{layer_name}.weight"), _parts(layer), strict=True):
            yield name, whole(part)


def merge_rules(model: nn.Module) -> dict[str, MergeRule]:
    """Of each weight that adapters belong to."""
    return {f"{name}.weight": _rule(layer) for name, layer in _adapted(model).items()}


def _adapted(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters (peft's `LoraLayer`), by name."""
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}


def _parts(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """A and B."""
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def _rule(layer: Any) -> MergeRule:
    return layer.scaling[ADAPTER], layer.fan_in_fan_out


def _check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    for target in targets:
        found = {
            name: layer
            for name, layer in model.named_modules()
            if name == target or name.endswith(f".{target}")
        }
        if not found:
            raise UnknownTarget(f"the model has no layer {target}")
        for name, layer in found.items():
            if layer is model.get_output_embeddings():
                raise UnknownTarget(f"{name} is the output layer, which adapters leave as it is")
            if not isinstance(layer, nn.Linear | Conv1D):
                raise UnknownTarget(
                    f"{name} is a {type(layer).__name__}, adapters go into linear layers"
                )
