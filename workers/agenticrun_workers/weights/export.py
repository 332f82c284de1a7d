"""The trainer's side: writes exported parameters into the buckets of its node, and says for each what was written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from agenticrun_workers.weights.buckets import TORCH_NAMES, Bucket, Shape
from agenticrun_workers.weights.delta import encode, encoded_bytes
from agenticrun_workers.weights.mapping import UNSIGNED, MappedBucket
from agenticrun_workers.weights.written import Written, delta_file

CHUNK_BYTES = 256 << 10
"""Copied, then summed while it is in the cache."""

DTYPES = {getattr(torch, name): dtype for dtype, name in TORCH_NAMES.items()}


def shapes_of(weights: Iterable[tuple[str, Tensor]]) -> list[Shape]:
    """What an export holds. Raises `ValueError` for a dtype that no engine reads."""
    shapes = []
    for name, tensor in weights:
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is of {tensor.dtype}, which safetensors files cannot hold")
        shapes.append(Shape(name, DTYPES[tensor.dtype], tuple(tensor.shape)))
    return shapes


class Sender:
    """Writes into the buckets' files in `folder`, which hold what was sent last.

    Args:
        deltas: also find what changed since then, and leave it beside the bucket where it is smaller.
    """

    def __init__(self, folder: Path, buckets: tuple[Bucket, ...], *, deltas: bool) -> None:
        self._folder = folder
        self._buckets = [MappedBucket(folder, bucket) for bucket in buckets]
        self._deltas = deltas
        self._sent: dict[int, int] = {}
        """Checksum of each bucket that was sent."""

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Written]:
        """Write one export, bucket by bucket. Nobody may be reading the files.

        Raises:
            ValueError: the export has other parameters than the buckets.
        """
        exported = iter(weights)
        for mapped in self._buckets:
            written = _Pass(mapped, deltas=self._deltas and mapped.bucket.index in self._sent)
            for shape in mapped.bucket.shapes:
                written.take(_bytes_of(shape, next(exported, None)))
            yield self._close(mapped.bucket, written)
        if (more := next(exported, None)) is not None:
            raise ValueError(f"the trainer exports {more[0]}, which it did not export at first")

    def _close(self, bucket: Bucket, written: _Pass) -> Written:
        delta = written.delta()
        if delta is not None:
            delta_file(self._folder, bucket).write_bytes(delta.data)
        base = self._sent.get(bucket.index)
        self._sent[bucket.index] = checksum = written.hash.intdigest()
        elements = bucket.data_bytes // bucket.item_bytes
        return Written(
            bucket=bucket,
            checksum=checksum,
            base=base,
            delta_bytes=None if delta is None else len(delta),
            changed=written.changed if written.deltas else elements,
            elements=elements,
        )


@dataclass
class _Pass:
    """One overwriting of a bucket."""

    mapped: MappedBucket
    deltas: bool

    def __post_init__(self) -> None:
        self.hash = xxhash.xxh3_64(self.mapped.header.data)
        self.changed = 0
        self._at = 0
        self._indices: list[NDArray[np.int64]] = []
        bucket = self.mapped.bucket
        self._most = bucket.data_bytes
        self._elements = bucket.data_bytes // bucket.item_bytes

    def take(self, new: NDArray[np.uint8]) -> None:
        """The next bytes of the bucket."""
        for start in range(0, len(new), CHUNK_BYTES):
            chunk = new[start : start + CHUNK_BYTES]
            held = self.mapped.data[self._at : self._at + len(chunk)]
            if self.deltas:
                self._compare(held, chunk)
            np.copyto(held, chunk)
            self.hash.update(held.data)
            self._at += len(chunk)

    def delta(self) -> NDArray[np.uint8] | None:
        """What changed; None where the whole bucket is smaller."""
        if not self.deltas or self._too_large():
            return None
        indices_K = np.concatenate([np.zeros(0, np.int64), *self._indices])
        return encode(indices_K, self.mapped.elements_N[indices_K])

    def _compare(self, held: NDArray[np.uint8], new: NDArray[np.uint8]) -> None:
        unsigned = UNSIGNED[self.mapped.bucket.item_bytes]
        changed_K = np.flatnonzero(held.view(unsigned) != new.view(unsigned))
        self.changed += len(changed_K)
        if not self._too_large():
            self._indices.append(changed_K + self._at // self.mapped.bucket.item_bytes)

    def _too_large(self) -> bool:
        return (
            encoded_bytes(self.changed, self._elements, self.mapped.bucket.item_bytes) >= self._most
        )


def _bytes_of(shape: Shape, exported: tuple[str, Tensor] | None) -> NDArray[np.uint8]:
    """The elements of a parameter, which must be the one that the layout says."""
    if exported is None:
        raise ValueError(f"the trainer does not export {shape.name} any more")
    name, tensor = exported
    found = Shape(name, DTYPES[tensor.dtype], tuple(tensor.shape))
    if found != shape:
        raise ValueError(f"the trainer exports {found}, at first it was {shape}")
    flat: NDArray[np.uint8] = (
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    )
    return flat
