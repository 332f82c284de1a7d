"""A bucket's file, mapped into memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from agenticrun_workers.weights.buckets import Bucket
from agenticrun_workers.weights.written import CorruptBucket

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


class Verifier:
    """Compares files with their checksums. Keeps them mapped, because they are read again at the next sync."""

    def __init__(self) -> None:
        self._maps: dict[Path, tuple[tuple[int, int], mmap.mmap]] = {}
        """By path: the file's inode and size, and its content."""

    def check(self, path: Path, checksum: int) -> None:
        """Raises `CorruptBucket` for another content than the sender's."""
        status = path.stat()
        identity = status.st_ino, status.st_size
        known = self._maps.get(path)
        if known is None or known[0] != identity:
            with path.open("rb") as file:
                known = self._maps[path] = (
                    identity,
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ),
                )
        if xxhash.xxh3_64_intdigest(known[1]) != checksum:
            raise CorruptBucket(f"{path} is not what the trainer wrote")

    def forget(self) -> None:
        """Unmap files that are gone. Threads of an update that has failed may still be inside `check`."""
        self._maps = {path: entry for path, entry in list(self._maps.items()) if path.exists()}
