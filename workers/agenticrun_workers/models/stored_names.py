"""Names and shapes under which the files of a model hold its parameters.

transformers fuses what the files hold apart: the experts of a layer are two parameters of the model
and three weights of each expert in the files. Engines load the weights of files, so exports have
their names. The conversions are transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from typing_extensions import override


class _Views(TorchFunctionMode):
    """Conversions return views: they would copy parts that are not contiguous."""

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def stored_parts(model: PreTrainedModel, name: str, value: Tensor) -> dict[str, Tensor]:
    """Return a parameter as the files of its model hold it, whole or in parts.

    It keeps its own name and shape if the files have its values in another order, or together with
    another parameter (`has_stored_names`).

    Args:
        model: knows the conversions with which it was loaded, or those of its type.
        name: of the parameter.
        value: of the parameter, whole. The parts are views of it.
    """
    value = value.detach()
    with _Views():
        parts: dict[str, Tensor] = revert_weight_conversion(model, {name: value})
    storage = value.untyped_storage()._cdata
    if any(part.untyped_storage()._cdata != storage for part in parts.values()):
        return {name: value}
    return parts


def stored_weights(
    model: PreTrainedModel, parameters: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield what the files of a model hold: parameters, then buffers such as biases of routers.

    Args:
        model: holds the buffers, which keep their dtype.
        parameters: whole, by name. What is yielded are views of them.
    """
    for name, value in chain(parameters, stored_buffers(model).items()):
        yield from stored_parts(model, name, value).items()


def stored_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that the files of a model hold, by name."""
    stored = model.state_dict().keys()
    return {name: value for name, value in model.named_buffers() if name in stored}


def has_stored_names(model: PreTrainedModel) -> bool:
    """Return True if `stored_weights` gives exactly the weights of the model's files.

    Args:
        model: may be without data.
    """
    tensors = {**dict(model.named_parameters()), **stored_buffers(model)}
    if not all(value.is_floating_point() for value in tensors.values()):
        return False
    expected = revert_weight_conversion(model, tensors)
    found = dict(stored_weights(model, model.named_parameters()))
    return {weight: value.shape for weight, value in found.items()} == {
        weight: value.shape for weight, value in expected.items()
    }


class ParameterAssembly:
    """Puts parameters and buffers together from the weights of files, which come in any order.

    Args:
        shapes: whole shape of each one, by name.
    """

    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> None:
        self._model = model
        self._shapes = dict(shapes)
        self._missing: dict[str, set[str]] = {}
        """Parts that have not come, by parameter."""
        self._parameter: dict[str, str] = {}
        self._part_shapes: dict[str, torch.Size] = {}
        for name, shape in shapes.items():
            parts = stored_parts(model, name, torch.empty(shape, device="meta"))
            self._missing[name] = set(parts)
            for part_name, part in parts.items():
                self._parameter[part_name] = name
                self._part_shapes[part_name] = part.shape
        self._begun: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
        """Parameters of which a part has come, and views of their parts."""

    def shape(self, weight: str) -> torch.Size | None:
        """Return the shape that a weight must have; None if the model has no such weight."""
        return self._part_shapes.get(weight)

    @property
    def missing(self) -> Iterator[str]:
        """The weights that have not come."""
        return (weight for weights in self._missing.values() for weight in weights)

    def add(self, weight: str, value: Tensor) -> tuple[str, Tensor] | None:
        """Take a weight.

        Returns:
            name and whole value of the parameter that it completes, if any.
        """
        name = self._parameter[weight]
        missing = self._missing[name]
        whole = value
        if name in self._begun or missing != {weight}:
            if name not in self._begun:
                whole = value.new_empty(self._shapes[name])
                self._begun[name] = (whole, stored_parts(self._model, name, whole))
            whole, parts = self._begun[name]
            parts[weight].copy_(value)
        missing.discard(weight)
        if missing:
            return None
        self._begun.pop(name, None)
        return name, whole
