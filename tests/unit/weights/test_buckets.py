"""Buckets: their layout, their files as safetensors reads them, and their verification."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.weights.buckets import (
    ITEM_BYTES,
    MappedBucket,
    TensorSpec,
    Verifier,
    buckets_of,
)

shapes = st.lists(
    st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 5), max_size=3)),
    max_size=12,
).map(
    lambda found: [
        TensorSpec(f"layer.{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(found)
    ]
)


@given(shapes, st.integers(1, 400))
def test_buckets_hold_every_parameter_once_in_order_within_their_size(
    found: list[TensorSpec], size: int
) -> None:
    buckets = buckets_of(found, size)
    assert [tensor for bucket in buckets for tensor in bucket.tensors] == found
    for number, bucket in enumerate(buckets):
        assert bucket.index == number
        assert len({tensor.dtype for tensor in bucket.tensors}) == 1
        assert bucket.data_bytes <= size or len(bucket.tensors) == 1
    for one, other in pairwise(buckets):
        first = other.tensors[0]
        assert one.tensors[0].dtype != first.dtype or one.data_bytes + first.nbytes > size


def test_a_parameter_that_is_exported_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="exports a twice"):
        buckets_of([TensorSpec("a", "F32", (1,)), TensorSpec("a", "F32", (1,))], 100)


def test_a_bucket_that_does_not_fit_into_shared_memory_names_the_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    [bucket] = buckets_of([TensorSpec("a", "F32", (1 << 20,))], 1 << 30)
    with pytest.raises(InvalidConfig, match=r"spec.roles: .* 4\.0 MiB of weights: raise shmSize"):
        MappedBucket(tmp_path, bucket)
    assert list(tmp_path.iterdir()) == []


def test_safetensors_reads_a_bucket(tmp_path: Path) -> None:
    [bucket] = buckets_of(
        [
            TensorSpec("vector", "BF16", (3,)),
            TensorSpec("näme", "BF16", (2, 2)),
            TensorSpec("scalar", "BF16", ()),
        ],
        1000,
    )
    mapped = MappedBucket(tmp_path, bucket)
    values = torch.arange(8, dtype=torch.bfloat16)
    mapped.data[:] = values.view(torch.uint8).numpy()
    with safe_open(mapped.path, "pt") as file:
        assert sorted(file.keys()) == ["näme", "scalar", "vector"]
        assert torch.equal(file.get_tensor("vector"), values[:3])
        assert torch.equal(file.get_tensor("näme"), values[3:7].reshape(2, 2))
        assert file.get_tensor("scalar").item() == 7
    assert len(bucket.header) % 64 == 0


def test_files_are_forgotten_while_a_thread_still_checks_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, first, second = Verifier(), tmp_path / "first", tmp_path / "second"
    for file in (first, second):
        file.write_bytes(b"weights")
    checksum = xxhash.xxh3_64_intdigest(b"weights")
    verifier.check(first, checksum)

    def meanwhile(path: Path) -> bool:
        """Check another file, as another thread would."""
        verifier.check(second, checksum)
        return True

    monkeypatch.setattr(Path, "exists", meanwhile)
    verifier.forget()
    verifier.check(first, checksum)
