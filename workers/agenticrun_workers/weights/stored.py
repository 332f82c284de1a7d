"""The parameters in the files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor


class UnreadableFiles(Exception):
    """A folder holds no safetensors files of a model, or broken ones."""


class StoredWeights:
    """Of the safetensors files in `folder`. They are mapped into memory and read where somebody looks: no second model lies in memory.

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
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - the file is no mapping

    def get(self, name: str) -> Tensor | None:
        """A view of the file, in its own dtype; None without a parameter of this name."""
        file = self._file_of.get(name)
        tensor: Tensor | None = None if file is None else file.get_tensor(name)
        return tensor
