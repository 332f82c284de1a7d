"""Parameters out of buckets, or any other safetensors files, that are read again and again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

LONGEST_HEADER = 100_000_000
"""Of the safetensors format, in bytes."""


class PartReader:
    """Keeps files mapped between updates: their pages are mapped once, and overwritten by whoever sends."""

    def __init__(self) -> None:
        self._open: dict[Path, tuple[tuple[int, bytes], Any]] = {}
        """By path: the file's inode and header, and its reader."""

    def parameters(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, which are views of the mapped file: copy what must last.

        Raises:
            OSError, safetensors.SafetensorError: it cannot be read.
        """
        identity = path.stat().st_ino, _header(path)
        known = self._open.get(path)
        if known is None or known[0] != identity:
            known = self._open[path] = identity, safe_open(path, "pt")
        for name in known[1].keys():  # noqa: SIM118 - the file is no mapping
            yield name, known[1].get_tensor(name)

    def forget(self) -> None:
        """Unmap files that are gone."""
        self._open = {path: entry for path, entry in self._open.items() if path.exists()}


def _header(path: Path) -> bytes:
    """What says where the parameters are. A file that was written anew under the same name may have another."""
    with path.open("rb") as file:
        return file.read(min(int.from_bytes(file.read(8), "little"), LONGEST_HEADER))
