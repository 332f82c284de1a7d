"""The parameters of a model that serves, and their replacement in place."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from agenticrun_workers.inference.engine import EngineError
from agenticrun_workers.weights.buckets import SafetensorsReader
from agenticrun_workers.weights.collective import WeightGroup


class EngineWeights:
    """Copies new weights into the parameters of a model, in their own dtype and on their device.

    An update is `begin`, then `copy` for every file or one `receive`, then `finish`. The model must
    not compute during an update, or after one that failed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._shapes = {
            name: tuple(parameter.shape) for name, parameter in self._parameters.items()
        }
        self._seen: set[int] = set()
        self._reader = SafetensorsReader()
        self._device = model.device
        self._group: WeightGroup | None = None

    def begin(self) -> None:
        """Begin an update: no parameter is up to date."""
        self._seen.clear()
        self._reader.forget()

    def join(self, host: str, port: int, rank: int, world: int) -> None:
        """Join the collective that `receive` listens to. Raises `EngineError`."""
        self._group = None
        try:
            self._group = WeightGroup(host, port, rank, world, self._device)
        except RuntimeError as error:
            raise EngineError(
                f"the engine could not reach the trainer at {host}:{port}: {error}"
            ) from error

    @torch.no_grad()
    def receive(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        """Copy the parameters of one broadcast.

        Raises:
            EngineError: the broadcast broke off, or the names or shapes are another model's.
        """
        group = self._group
        assert group is not None, "join comes first"
        try:
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
                self._copy(name, group.receive(tuple(shape), getattr(torch, dtype)))
        except RuntimeError as error:
            group.close()
            self._group = None
            raise EngineError(f"the broadcast broke off: {error}") from error

    @torch.no_grad()
    def copy(self, part: Path) -> None:
        """Copy the parameters of one file.

        Raises:
            EngineError: the file is unreadable, or its names or shapes are another model's.
        """
        try:
            for name, value in self._reader.parameters(part):
                self._copy(name, value)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{part} cannot be read as a safetensors file: {error}") from error

    def finish(self) -> None:
        """Raise `EngineError` if a parameter has not come."""
        missing = [
            name for name, parameter in self._parameters.items() if id(parameter) not in self._seen
        ]
        if missing:
            raise EngineError(
                f"the new weights lack {len(missing)} parameters, {missing[0]} among them"
            )

    def drop(self) -> None:
        """Free the memory of all parameters."""
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)

    def allocate(self) -> None:
        """Allocate the memory that `drop` freed, uninitialised. Tied parameters stay tied."""
        for name, parameter in self._parameters.items():
            if tuple(parameter.shape) != self._shapes[name]:
                parameter.data = parameter.data.new_empty(self._shapes[name])

    def _copy(self, name: str, value: Tensor) -> None:
        held = self._parameters.get(name)
        if held is None or held.shape != value.shape:
            shape = None if held is None else tuple(held.shape)
            raise EngineError(
                f"weights for {name} have shape {tuple(value.shape)}, the model has {shape}"
            )
        held.copy_(value)
        self._seen.add(id(held))
