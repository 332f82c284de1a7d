"""Buckets: safetensors files of fixed layout in shared memory, and what processes say about them.

A bucket holds some whole parameters of one dtype. Layout and path are decided once per attempt,
from the parameters' names, dtypes and shapes; each sync overwrites the data in place. Processes
keep the files mapped between syncs, because faulting in pages of a new mapping costs more than
copying them.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import safe_open

from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.weights.delta import patch

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

HEADER_ALIGNMENT = 64
"""Data start at a multiple of this many bytes, so that every element is aligned in memory."""

MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of an element, by the dtype's name in safetensors."""

TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names of the same dtypes in torch."""

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Unsigned integers by their bytes."""


class CorruptBucket(Exception):
    """A bucket's file is not what the trainer wrote: its checksum differs."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of a parameter that the trainer exports."""

    name: str
    dtype: str
    """A key of `ITEM_BYTES`."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Bucket:
    """The layout of a safetensors file: a header, then parameters of one dtype in export order."""

    index: int
    tensors: tuple[TensorSpec, ...]

    @property
    def file(self) -> str:
        return f"bucket-{self.index:05d}.safetensors"

    @property
    def delta_file(self) -> str:
        """The file next to `file` with what the last sync changed."""
        return f"bucket-{self.index:05d}.delta"

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.tensors[0].dtype]

    @property
    def header(self) -> bytes:
        """Length and JSON as safetensors defines them, padded with spaces."""
        offsets = [0]
        for tensor in self.tensors:
            offsets.append(offsets[-1] + tensor.nbytes)
        entries = {
            tensor.name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": list(span),
            }
            for tensor, span in zip(self.tensors, pairwise(offsets), strict=True)
        }
        text = json.dumps(
            {"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")
        ).encode()
        # Padded, so that parameters are aligned in the mapped file, whatever their dtype.
        text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @property
    def data_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def buckets_of(tensors: Iterable[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Lay out parameters in buckets, keeping their order.

    A bucket ends where it would exceed `bucket_bytes` of data, and where the dtype changes.

    Raises:
        ValueError: two parameters have the same name.
    """
    groups: list[list[TensorSpec]] = []
    names: set[str] = set()
    size = 0
    for tensor in tensors:
        if tensor.name in names:
            raise ValueError(f"the trainer exports {tensor.name} twice")
        names.add(tensor.name)
        # One dtype per bucket, because a delta compares elements of one size.
        if not groups or groups[-1][0].dtype != tensor.dtype or size + tensor.nbytes > bucket_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return tuple(Bucket(index, tuple(group)) for index, group in enumerate(groups))


@dataclass(frozen=True, slots=True)
class WrittenBucket:
    """A new version of a bucket, as the trainer reports it."""

    bucket: Bucket
    checksum: int
    """xxh3_64 of the whole file."""
    base: int | None
    """Checksum of the previous version, which the delta applies to; None at the first sync."""
    delta_bytes: int | None
    """Size of `Bucket.delta_file`; None where the whole bucket must be sent."""
    changed: int
    """Elements that differ from the previous version; all of them where deltas are off."""
    elements: int
    policy_version: int = 0
    """Number of batches that the exported policy was trained on."""

    @property
    def nbytes(self) -> int:
        """Size of the whole bucket's data."""
        return self.bucket.data_bytes


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file with some whole parameters, ready to be loaded."""

    path: str
    checksum: int
    """xxh3_64 of the whole file."""


@dataclass(frozen=True, slots=True)
class MergePlan:
    """All that a node needs to merge LoRA adapters into the base in the model's files.

    See `lora_merge.py`. It is declared here because the driver passes it on without torch.
    """

    tensors: tuple[TensorSpec, ...]
    """All parameters in the order of the trainers' whole export, in the served dtype."""
    base_dtype: str
    """The trainers' dtype of the base, as torch names it. The files may have another one."""
    rules: Mapping[str, tuple[float, bool]]
    """`MergeRule` of the weights that have adapters."""
    checksums: Mapping[str, int]
    """By name, xxh3_64 of the elements in the files that the trainers have loaded."""


class MappedBucket:
    """The writable file of `bucket` in `folder`, mapped as long as this object lives.

    A missing file is created with its header and zeros.

    Raises:
        InvalidConfig: the folder's file system is full.
    """

    def __init__(self, folder: Path, bucket: Bucket) -> None:
        self.bucket = bucket
        self.path = folder / bucket.file
        header = bucket.header
        if not self.path.exists():
            self._create(header)
        with self.path.open("r+b") as file:
            self._bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        self.data: NDArray[np.uint8] = self._bytes[len(header) :]
        """All parameters, as they are in memory."""
        self.header: NDArray[np.uint8] = self._bytes[: len(header)]
        self.elements_N = self.data.view(UNSIGNED[bucket.item_bytes])
        self._locked: bool | None = None

    def _create(self, header: bytes) -> None:
        size = len(header) + self.bucket.data_bytes
        # "x": a file that exists belongs to another process, and both would write to it.
        with self.path.open("xb") as file:
            try:
                # Without space, a write to the mapped file would kill the process (SIGBUS).
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                self.path.unlink()
                if error.errno != errno.ENOSPC:
                    raise
                raise InvalidConfig(
                    "spec.roles",
                    f"{self.path.parent} has no space for the next {size / 2**20:.1f} MiB of "
                    "weights: raise shmSize of the trainer and inference pods to twice the size "
                    "of the model",
                ) from error
            file.write(header)

    def write(self, data: NDArray[np.uint8]) -> None:
        """Overwrite all parameters."""
        np.copyto(self.data, data)

    def page_lock(self) -> bool:
        """Let GPUs copy into the mapping, at the speed of the bus; False if CUDA refuses.

        Only the first call asks CUDA, which takes time for each page.
        """
        if self._locked is None:
            self._locked = _register(self._bytes)
            if not self._locked:
                log.warning(
                    "CUDA page-locks no more memory: weights reach %s more slowly", self.path
                )
            else:
                weakref.finalize(self, _unregister, self._bytes).atexit = False
        return self._locked

    def patch(self, delta: NDArray[np.uint8]) -> None:
        """Apply a delta (see `delta.py`). The bucket must hold the delta's base."""
        patch(self.elements_N, delta)


def _register(mapping: NDArray[np.uint8]) -> bool:
    """Page-lock a mapping for CUDA; False if it is refused."""
    import torch

    error = torch.cuda.cudart().cudaHostRegister(mapping.ctypes.data, mapping.nbytes, 0)  # type: ignore[no-untyped-call]
    if not int(error):
        return True
    # CUDA reports it once more, with the next kernel.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def _unregister(mapping: NDArray[np.uint8]) -> None:
    """Undo `_register`, before the mapping goes."""
    import torch

    torch.cuda.cudart().cudaHostUnregister(mapping.ctypes.data)  # type: ignore[no-untyped-call]


class Verifier:
    """Compares files with their checksums."""

    def __init__(self) -> None:
        self._maps: dict[Path, tuple[tuple[int, int], mmap.mmap]] = {}
        """By path: the file's inode and size, and its content."""

    def check(self, path: Path, checksum: int) -> None:
        """Check one file.

        Raises:
            CorruptBucket: the trainer wrote another content.
        """
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
        """Unmap deleted files. Threads of a failed update may still be inside `check`."""
        self._maps = {path: entry for path, entry in list(self._maps.items()) if path.exists()}


class SafetensorsReader:
    """Reads parameters from safetensors files, which stay mapped for the next update.

    Each tensor is made once for each file: safetensors 0.8 leaks 60 bytes whenever it makes one.
    """

    def __init__(self) -> None:
        self._open: dict[Path, tuple[tuple[int, bytes], dict[str, Tensor]]] = {}
        """By path: the file's inode and header, and views of its tensors."""

    def parameters(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors.

        The tensors are views of the file: copy what must last, and never write to them.

        Raises:
            OSError: the file cannot be read.
            safetensors.SafetensorError: it is not in this format.
        """
        # The header differs where a new file of the same name has another layout.
        with path.open("rb") as raw:
            header = raw.read(min(int.from_bytes(raw.read(8), "little"), MAX_HEADER_BYTES))
        identity = path.stat().st_ino, header
        known = self._open.get(path)
        if known is None or known[0] != identity:
            file: Any = safe_open(path, "pt")
            names = file.keys()  # the file is no mapping
            known = self._open[path] = identity, {name: file.get_tensor(name) for name in names}
        yield from known[1].items()

    def forget(self) -> None:
        """Unmap deleted files."""
        self._open = {path: entry for path, entry in list(self._open.items()) if path.exists()}
