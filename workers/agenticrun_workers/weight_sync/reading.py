"""Parameters out of a bucket, or any other safetensors file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor


def parameters_in(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, which are views of the mapped file: copy what must last.

    Raises:
        OSError, safetensors.SafetensorError: it cannot be read.
    """
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            yield name, file.get_tensor(name)
