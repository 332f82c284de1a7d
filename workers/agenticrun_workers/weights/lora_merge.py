"""Merge LoRA adapters into whole weights on the engines' nodes, so that only adapters travel.

The base never changes, and every node can read it from the model's files. On rank 0, `plan_merge`
checks that the trainers' base is, bit for bit, what those files hold; on each node, an
`AdapterMerger` repeats the check with checksums and computes what the trainers would export.

torch is imported, transformers is not: nodes load no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.models.lora import Adapters, adapter_names, merge
from agenticrun_workers.models.source import ModelSource, local_folder
from agenticrun_workers.weights.buckets import TORCH_NAMES, MergePlan, TensorSpec
from agenticrun_workers.weights.export import DTYPES


def plan_merge(adapters: Adapters, source: ModelSource) -> MergePlan | str:
    """Plan how nodes that can read `source` compute the policy's whole weights.

    Called on rank 0, while the other ranks iterate over `Adapters.base`.

    Returns:
        The plan, or the reason why nodes cannot read the base from the model's files.
    """
    with source.folder() as path:
        comparison = _BaseComparison(path, DTYPES[getattr(torch, source.dtype)])
        # to the end, whatever is found: the other ranks take part in it
        for name, value in adapters.base():
            comparison.compare(name, value)
    if comparison.refusal:
        return comparison.refusal
    rules = adapters.rules()
    if renamed := rules.keys() - {tensor.name for tensor in comparison.tensors}:
        return f"the model's files hold {min(renamed)} under another name"
    return MergePlan(
        tuple(comparison.tensors),
        str(comparison.dtype).removeprefix("torch."),
        rules,
        comparison.checksums,
    )


class AdapterMerger:
    """Computes whole weights as the trainers would export them.

    Args:
        folder: name on the hub or folder of the model that the trainers have loaded.

    Raises:
        InvalidConfig: it cannot be read here.
    """

    def __init__(self, plan: MergePlan, folder: str) -> None:
        self._plan = plan
        self._folder = folder
        self._dtype: torch.dtype = getattr(torch, plan.base_dtype)
        try:
            self._files = ModelFiles(local_folder(folder))
        except UnreadableFiles as error:
            raise InvalidConfig("spec.model.path", str(error)) from error
        self._verified: set[str] = set()
        """Parameters that the files were found to hold as the trainers do."""

    def weights(self, adapters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield all parameters, one at a time.

        Raises:
            InvalidConfig: the files hold another base than the trainers have.
        """
        for tensor in self._plan.tensors:
            value, rule = self._base(tensor.name), self._plan.rules.get(tensor.name)
            if rule is not None:
                a, b = (adapters[name] for name in adapter_names(tensor.name))
                value = merge(value, a, b, rule)
            yield tensor.name, value.to(getattr(torch, TORCH_NAMES[tensor.dtype]))

    def _base(self, name: str) -> Tensor:
        stored = self._files.get(name)
        # Once per parameter: the files do not change while they are mapped.
        if name not in self._verified:
            if stored is None or _checksum(stored) != self._plan.checksums[name]:
                raise InvalidConfig(
                    "spec.model.path",
                    f"{self._folder} holds another {name} here than where the trainers run",
                )
            self._verified.add(name)
        assert stored is not None, "it was verified"
        return stored.to(self._dtype)


class UnreadableFiles(Exception):
    """A folder holds no safetensors files of a model, or broken ones."""


class ModelFiles:
    """The parameters in the safetensors files of a Hugging Face folder.

    The files are mapped and read on access, so that no second model lies in memory. Each tensor is
    made once: see `SafetensorsReader`.

    Raises:
        UnreadableFiles
    """

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        try:
            names = (
                sorted(set(json.loads(index.read_text())["weight_map"].values()))
                if index.exists()
                else ["model.safetensors"]
            )
            files: list[Any] = [safe_open(folder / name, "pt") for name in names]
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UnreadableFiles(
                f"{folder} holds no safetensors files that can be read: {error}"
            ) from error
        self._views: dict[str, Tensor] = {}
        self._file_of = {
            name: file
            for file in files
            for name in file.keys()  # noqa: SIM118 - the file is no mapping
        }

    def get(self, name: str) -> Tensor | None:
        """Return a view of the file in its own dtype, or None for an unknown name."""
        # Views are made once: safetensors 0.8 leaks memory whenever it makes one.
        if name not in self._views and name in self._file_of:
            self._views[name] = self._file_of[name].get_tensor(name)
        return self._views.get(name)


class _BaseComparison:
    """Compares a base with the files in `folder`, parameter by parameter.

    Args:
        served: dtype that engines serve, as safetensors names it.
    """

    def __init__(self, folder: str, served: str) -> None:
        self.refusal = ""
        """Why nodes cannot read the base from the files."""
        self.tensors: list[TensorSpec] = []
        self.checksums: dict[str, int] = {}
        self.dtype: torch.dtype | None = None
        self._served = served
        try:
            self._files = ModelFiles(local_folder(folder))
        except (UnreadableFiles, InvalidConfig) as error:
            self.refusal = str(error)

    def compare(self, name: str, value: Tensor) -> None:
        """Compare one parameter, unless another one differs already."""
        # After a difference the loop only takes part in the collective.
        if not self.refusal:
            self.refusal = self._difference(name, value)

    def _difference(self, name: str, value: Tensor) -> str:
        self.dtype = self.dtype or value.dtype
        self.tensors.append(TensorSpec(name, self._served, tuple(value.shape)))
        stored = self._files.get(name)
        if stored is None:
            return f"the model's files have no parameter {name}"
        # The plan names one dtype for the base.
        if value.dtype != self.dtype:
            return f"{name} is held in {value.dtype}, others in {self.dtype}"
        # Compared as the trainers hold it: rounding to their dtype is not a difference.
        if not torch.equal(stored.to(value.dtype), value.cpu()):
            return f"{name} is not what the model's files hold"
        self.checksums[name] = _checksum(stored)
        return ""


def _checksum(tensor: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
