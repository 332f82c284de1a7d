"""Whole weights out of adapters and the model's files: whether that can be done, and doing it.

Imports torch, but not transformers: nodes load no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor

from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.models.lora import adapter_names, merge
from agenticrun_workers.models.source import ModelSource, local_folder
from agenticrun_workers.weights.buckets import TORCH_NAMES, Shape
from agenticrun_workers.weights.merge_plan import Expansion
from agenticrun_workers.weights.sender import DTYPES
from agenticrun_workers.weights.stored import StoredWeights, UnreadableFiles

if TYPE_CHECKING:
    from agenticrun_workers.models.lora import Adapters


def expansion_of(adapters: Adapters, source: ModelSource) -> Expansion | str:
    """How nodes that have `source` make a policy's weights; or why they cannot: its base is not, bit for bit, what the files hold.

    On rank 0, while the other ranks go through `Adapters.base`.
    """
    with source.folder() as path:
        comparison = _Comparison(path, DTYPES[getattr(torch, source.dtype)])
        for (
            name,
            value,
        ) in adapters.base():  # to its end, whatever is found: the other ranks take part in it
            comparison.look(name, value)
    return comparison.refusal or Expansion(
        tuple(comparison.shapes),
        str(comparison.dtype).removeprefix("torch."),
        adapters.rules(),
        comparison.checksums,
    )


class Expander:
    """Makes whole weights, as the trainers would export them.

    Args:
        folder: name on the hub or folder of the model that the trainers have loaded.

    Raises:
        InvalidConfig: it cannot be read here.
    """

    def __init__(self, expansion: Expansion, folder: str) -> None:
        self._expansion = expansion
        self._folder = folder
        self._dtype: torch.dtype = getattr(torch, expansion.base_dtype)
        try:
            self._stored = StoredWeights(local_folder(folder))
        except UnreadableFiles as error:
            raise InvalidConfig("spec.model.path", str(error)) from error
        self._compared: set[str] = set()
        """Parameters whose files were found to hold what the trainers' do."""

    def weights(self, adapters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """All parameters, one at a time. Raises `InvalidConfig` where the files hold another base than the trainers have."""
        for shape in self._expansion.shapes:
            value, rule = self._base(shape), self._expansion.rules.get(shape.name)
            if rule is not None:
                a, b = (adapters[name] for name in adapter_names(shape.name))
                value = merge(value, a, b, rule)
            yield shape.name, value.to(getattr(torch, TORCH_NAMES[shape.dtype]))

    def _base(self, shape: Shape) -> Tensor:
        stored = self._stored.get(shape.name)
        if shape.name not in self._compared:
            if stored is None or _checksum(stored) != self._expansion.checksums[shape.name]:
                raise InvalidConfig(
                    "spec.model.path",
                    f"{self._folder} holds another {shape.name} here than where the trainers run",
                )
            self._compared.add(shape.name)
        assert stored is not None, "it was compared"
        return stored.to(self._dtype)


class _Comparison:
    """Of a base, parameter by parameter, with the files in `folder`.

    Args:
        served: dtype of what engines get, as safetensors names it.
    """

    def __init__(self, folder: str, served: str) -> None:
        self.refusal = ""
        """Why nodes cannot read the base from the files."""
        self.shapes: list[Shape] = []
        self.checksums: dict[str, int] = {}
        self.dtype: torch.dtype | None = None
        self._served = served
        try:
            self._stored = StoredWeights(local_folder(folder))
        except (UnreadableFiles, InvalidConfig) as error:
            self.refusal = str(error)

    def look(self, name: str, value: Tensor) -> None:
        """Compare one, unless another one differs already."""
        if not self.refusal:
            self.refusal = self._difference(name, value)

    def _difference(self, name: str, value: Tensor) -> str:
        self.dtype = self.dtype or value.dtype
        self.shapes.append(Shape(name, self._served, tuple(value.shape)))
        stored = self._stored.get(name)
        if stored is None:
            return f"the model's files have no parameter {name}"
        if value.dtype != self.dtype:
            return f"{name} is held in {value.dtype}, others in {self.dtype}"
        if not torch.equal(stored.to(value.dtype), value.cpu()):
            return f"{name} is not what the model's files hold"
        self.checksums[name] = _checksum(stored)
        return ""


def _checksum(tensor: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
