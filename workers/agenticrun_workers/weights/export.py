"""The trainer's side: write exported parameters into the buckets of its node.

Without deltas, a GPU copies its tensors straight into the bucket, and threads hash it while those
of the next ones are on their way. Otherwise one pass over each bucket compares, copies and hashes
it in chunks that stay in the CPU's cache, because the pass over memory costs more than the
arithmetic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from agenticrun_workers.weights.buckets import (
    TORCH_NAMES,
    UNSIGNED,
    Bucket,
    MappedBucket,
    TensorSpec,
    WrittenBucket,
)
from agenticrun_workers.weights.delta import encode, encoded_bytes

CHUNK_BYTES = 256 << 10
"""Fits into the cache of a core."""
HASHED_AT_ONCE = 4
"""Buckets. A GPU copies 55 GB in a second, a core hashes 13."""

DTYPES = {getattr(torch, name): dtype for dtype, name in TORCH_NAMES.items()}


def tensor_specs(weights: Iterable[tuple[str, Tensor]]) -> list[TensorSpec]:
    """Describe an export.

    Raises:
        ValueError: safetensors has no name for a dtype.
    """
    specs = []
    for name, tensor in weights:
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is of {tensor.dtype}, which safetensors files cannot hold")
        specs.append(TensorSpec(name, DTYPES[tensor.dtype], tuple(tensor.shape)))
    return specs


class BucketWriter:
    """Overwrites the buckets in `folder` with each export.

    Args:
        deltas: also find what changed since the last export, and write it next to the bucket where
            it is smaller.
    """

    def __init__(self, folder: Path, buckets: tuple[Bucket, ...], *, deltas: bool) -> None:
        self._folder = folder
        self._buckets = [MappedBucket(folder, bucket) for bucket in buckets]
        self._deltas = deltas
        self._checksums: dict[int, int] = {}
        """Checksums of the last export, by bucket."""

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[WrittenBucket]:
        """Write one export, bucket by bucket. No process may read the files until it ends.

        Raises:
            ValueError: the export has other parameters than the buckets.
        """
        exported = iter(weights)
        copied: deque[tuple[_Overwrite, Future[int]]] = deque()
        with ThreadPoolExecutor(HASHED_AT_ONCE, "bucket-hash") as threads:
            for mapped in self._buckets:
                was_written = mapped.bucket.index in self._checksums
                # The first export has nothing to compare with.
                overwrite = _Overwrite(
                    mapped, deltas=self._deltas and was_written, direct=not self._deltas
                )
                for tensor in mapped.bucket.tensors:
                    overwrite.append(_bytes_of(tensor, next(exported, None)))
                if overwrite.copying:
                    copied.append((overwrite, threads.submit(overwrite.checksum)))
                # Readers get buckets in order.
                while copied and (len(copied) > HASHED_AT_ONCE or not overwrite.copying):
                    earlier, checksum = copied.popleft()
                    yield self._finish(earlier, checksum.result())
                if not overwrite.copying:
                    yield self._finish(overwrite, overwrite.checksum())
            for earlier, checksum in copied:
                yield self._finish(earlier, checksum.result())
        # Asked only at the end, because the generator gathers each parameter from all ranks.
        if (more := next(exported, None)) is not None:
            raise ValueError(f"the trainer exports {more[0]}, which it did not export at first")

    def _finish(self, overwrite: _Overwrite, checksum: int) -> WrittenBucket:
        bucket, delta = overwrite.mapped.bucket, overwrite.delta()
        # In shared memory beside the bucket, for other nodes. Receivers on this node read the
        # bucket.
        if delta is not None:
            (self._folder / bucket.delta_file).write_bytes(delta.data)
        base = self._checksums.get(bucket.index)
        self._checksums[bucket.index] = checksum
        elements = bucket.data_bytes // bucket.item_bytes
        return WrittenBucket(
            bucket=bucket,
            checksum=checksum,
            base=base,
            delta_bytes=None if delta is None else len(delta),
            changed=overwrite.changed if overwrite.deltas else elements,
            elements=elements,
        )


@dataclass
class _Overwrite:
    """One pass over a bucket."""

    mapped: MappedBucket
    deltas: bool
    direct: bool
    """A GPU may copy into the bucket: nothing is compared, now or later."""

    def __post_init__(self) -> None:
        self.changed = 0
        self._hash = xxhash.xxh3_64(self.mapped.header.data)
        self._position = 0
        self._copied: torch.cuda.Event | None = None
        """Recorded after the last tensor of a GPU, which is not hashed yet."""
        self._indices: list[NDArray[np.int64]] = []
        bucket = self.mapped.bucket
        self._max_bytes = bucket.data_bytes
        self._elements = bucket.data_bytes // bucket.item_bytes

    def append(self, flat: Tensor) -> None:
        """Overwrite the next bytes of the bucket, uint8 [N]. A GPU may still be copying them."""
        if flat.is_cuda and self.direct and self.mapped.page_lock():
            held = self.mapped.data[self._position : self._position + len(flat)]
            torch.from_numpy(held).copy_(flat, non_blocking=True)
            self._position += len(flat)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
            return
        new = flat.cpu().numpy()
        for start in range(0, len(new), CHUNK_BYTES):
            chunk = new[start : start + CHUNK_BYTES]
            held = self.mapped.data[self._position : self._position + len(chunk)]
            # In the same pass over the chunk: it is in the cache of a core for comparison, copy and
            # hash.
            if self.deltas:
                self._compare(held, chunk)
            np.copyto(held, chunk)
            self._hash.update(held.data)
            self._position += len(chunk)

    @property
    def copying(self) -> bool:
        """True if a GPU may still be copying into the bucket."""
        return self._copied is not None

    def checksum(self) -> int:
        """Return the checksum of the whole bucket, as soon as the GPU has copied it."""
        if self._copied is not None:
            self._copied.synchronize()
            self._hash = xxhash.xxh3_64(self.mapped.header.data)
            self._hash.update(self.mapped.data.data)
        return self._hash.intdigest()

    def delta(self) -> NDArray[np.uint8] | None:
        """Encode what changed; None where the whole bucket is not larger."""
        if not self.deltas or self._is_too_large():
            return None
        indices_K = np.concatenate([np.zeros(0, np.int64), *self._indices])
        return encode(indices_K, self.mapped.elements_N[indices_K])

    def _compare(self, held: NDArray[np.uint8], new: NDArray[np.uint8]) -> None:
        item_bytes = self.mapped.bucket.item_bytes
        unsigned = UNSIGNED[item_bytes]
        # As bits: NaN differs from itself, and -0.0 equals 0.0, but both must arrive exactly.
        changed_K = np.flatnonzero(held.view(unsigned) != new.view(unsigned))
        self.changed += len(changed_K)
        # Once the whole bucket is smaller, indices would only cost memory.
        if not self._is_too_large():
            self._indices.append(changed_K + self._position // item_bytes)

    def _is_too_large(self) -> bool:
        size = encoded_bytes(self.changed, self._elements, self.mapped.bucket.item_bytes)
        return size >= self._max_bytes


def _bytes_of(expected: TensorSpec, exported: tuple[str, Tensor] | None) -> Tensor:
    """Return the bytes of an exported parameter, which must be the one of the layout, uint8 [N]."""
    if exported is None:
        raise ValueError(f"the trainer no longer exports {expected.name}")
    name, tensor = exported
    found = TensorSpec(name, DTYPES[tensor.dtype], tuple(tensor.shape))
    if found != expected:
        raise ValueError(f"the trainer exports {found}, at first it was {expected}")
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
