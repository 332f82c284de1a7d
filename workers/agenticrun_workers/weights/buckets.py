"""How parameters are laid out in buckets. Decided once per attempt, from their names, dtypes and shapes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

HEADER_ALIGNMENT = 64
"""Data begin at a multiple of it, so that every element is aligned in memory."""

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
"""Bytes of an element by its dtype, as safetensors names it."""

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
"""The same as torch names them."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A parameter as the trainer exports it."""

    name: str
    dtype: str
    """A key of `ITEM_BYTES`."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Bucket:
    """One safetensors file: its header, then the parameters in the order of their export, all of one dtype."""

    index: int
    shapes: tuple[Shape, ...]

    @property
    def file(self) -> str:
        return f"bucket-{self.index:05d}.safetensors"

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.shapes[0].dtype]

    @property
    def header(self) -> bytes:
        """Length and JSON of the safetensors format, padded with spaces."""
        offsets = [0]
        for shape in self.shapes:
            offsets.append(offsets[-1] + shape.nbytes)
        entries = {
            shape.name: {
                "dtype": shape.dtype,
                "shape": list(shape.shape),
                "data_offsets": list(span),
            }
            for shape, span in zip(self.shapes, pairwise(offsets), strict=True)
        }
        text = json.dumps(
            {"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")
        ).encode()
        text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @property
    def data_bytes(self) -> int:
        return sum(shape.nbytes for shape in self.shapes)


def buckets_of(shapes: Iterable[Shape], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Parameters in their order, split where a bucket would exceed `bucket_bytes` of data, and where the dtype changes.

    Raises:
        ValueError: a dtype that safetensors has no name for here, or two parameters of one name.
    """
    groups: list[list[Shape]] = []
    names: set[str] = set()
    size = 0
    for shape in shapes:
        if shape.name in names:
            raise ValueError(f"the trainer exports {shape.name} twice")
        names.add(shape.name)
        if not groups or groups[-1][0].dtype != shape.dtype or size + shape.nbytes > bucket_bytes:
            groups.append([])
            size = 0
        groups[-1].append(shape)
        size += shape.nbytes
    return tuple(Bucket(index, tuple(group)) for index, group in enumerate(groups))
