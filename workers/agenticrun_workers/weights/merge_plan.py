"""What a node must know to make whole weights of adapters. torch is not imported: the driver passes this on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agenticrun_workers.weights.buckets import Shape


@dataclass(frozen=True, slots=True)
class Expansion:
    """Whole weights are the base that lies in the model's files, with adapters merged into some of it."""

    shapes: tuple[Shape, ...]
    """All parameters in the order of the trainers' whole export, in the dtype that engines serve."""
    base_dtype: str
    """What the trainers hold the base in, as torch names it. Files may hold another, and are read as the trainers read them."""
    rules: Mapping[str, tuple[float, bool]]
    """`MergeRule` of the weights that have adapters."""
    checksums: Mapping[str, int]
    """By name, xxh3_64 of the elements in the files that the trainers have loaded."""
