"""A bucket's file, mapped into memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from agenticrun_workers.weight_sync.layout import Bucket

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""By bytes of an element."""


class MappedBucket:
    """The file of `bucket` in `folder`, writable. Made with its header and zeros if it is not there.

    The mapping is kept as long as this object: pages of a new one cost more to fault in than to copy.
    """

    def __init__(self, folder: Path, bucket: Bucket) -> None:
        self.bucket = bucket
        self.path = folder / bucket.file
        header = bucket.header
        if not self.path.exists():
            with self.path.open("xb") as file:
                file.write(header)
                file.truncate(len(header) + bucket.data_bytes)
        with self.path.open("r+b") as file:
            self._bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        self.data: NDArray[np.uint8] = self._bytes[len(header) :]
        self.header: NDArray[np.uint8] = self._bytes[: len(header)]
        self.elements_N = self.data.view(UNSIGNED[bucket.item_bytes])


def checksum_of(path: Path) -> int:
    """xxh3_64 of a whole file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return xxhash.xxh3_64_intdigest(content)
