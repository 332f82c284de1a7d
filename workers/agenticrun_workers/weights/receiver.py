"""A node's side: brings the buckets of its folder to what a sender wrote elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.weights.buckets import Bucket
from agenticrun_workers.weights.delta import patch
from agenticrun_workers.weights.mapping import MappedBucket


class Receiver:
    """The buckets' files in `folder`. Whoever reads them afterwards compares their checksum."""

    def __init__(self, folder: Path, buckets: tuple[Bucket, ...]) -> None:
        self._buckets = [MappedBucket(folder, bucket) for bucket in buckets]

    def data(self, index: int) -> NDArray[np.uint8]:
        """All parameters of a bucket, as they are in memory."""
        return self._buckets[index].data

    def write(self, index: int, whole: NDArray[np.uint8]) -> None:
        """Overwrite the data of a bucket."""
        np.copyto(self._buckets[index].data, whole)

    def patch(self, index: int, delta: NDArray[np.uint8]) -> None:
        """Change what a delta (see `delta.py`) says. The bucket must hold the delta's base."""
        patch(self._buckets[index].elements_N, delta)
