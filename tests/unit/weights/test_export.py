"""From a writer's folder to a receiver's: files, checksums and deltas."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from agenticrun_workers.weights import buckets as buckets_module
from agenticrun_workers.weights.buckets import (
    Bucket,
    CorruptBucket,
    MappedBucket,
    SafetensorsReader,
    Verifier,
    WrittenBucket,
    buckets_of,
)
from agenticrun_workers.weights.export import BucketWriter, tensor_specs

BUCKET_BYTES = 40_000
Weights = dict[str, Tensor]


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Weights:
    random = torch.Generator().manual_seed(seed)
    sizes = {"embed": (100, 64), "small": (5,), "scalar": (), "wide": (64, 300), "last": (64, 33)}
    return {name: torch.randn(size, generator=random).to(dtype) for name, size in sizes.items()}


def buckets_for(weights: Weights) -> tuple[Bucket, ...]:
    return buckets_of(tensor_specs(weights.items()), BUCKET_BYTES)


def held(folder: Path, buckets: tuple[Bucket, ...]) -> Weights:
    return {
        name: value.clone()
        for bucket in buckets
        for name, value in SafetensorsReader().parameters(folder / bucket.file)
    }


def same(found: Weights, expected: Weights) -> bool:
    """Bit for bit."""
    bits = {name: value.reshape(-1).view(torch.uint8) for name, value in found.items()}
    return found.keys() == expected.keys() and all(
        torch.equal(bits[n], v.reshape(-1).view(torch.uint8)) for n, v in expected.items()
    )


def changed(weights: Weights, share: float, seed: int) -> Weights:
    random = torch.Generator().manual_seed(seed)
    return {
        n: torch.where(torch.rand(v.shape, generator=random) < share, v + 1, v)
        for n, v in weights.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_receiver_follows_a_sender_through_deltas_exactly(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    weights = model(dtype=dtype)
    buckets = buckets_for(weights)
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    writer = BucketWriter(tmp_path / "here", buckets, deltas=True)
    received = [MappedBucket(tmp_path / "there", bucket) for bucket in buckets]
    shares = []
    for step in range(4):
        moved = 0
        for written in writer.write(weights.items()):
            index = written.bucket.index
            if written.delta_bytes is None:
                received[index].write(held_bytes(tmp_path / "here", written))
                moved += written.nbytes
            else:
                received[index].patch(
                    np.fromfile(tmp_path / "here" / written.bucket.delta_file, np.uint8)
                )
                moved += written.delta_bytes
            Verifier().check(tmp_path / "there" / written.bucket.file, written.checksum)
        assert same(held(tmp_path / "there", buckets), weights)
        shares.append(moved / sum(bucket.data_bytes for bucket in buckets))
        weights = changed(weights, 0.02, step)
    assert shares[0] == 1
    assert max(shares[1:]) < 0.08


def held_bytes(folder: Path, written: WrittenBucket) -> np.ndarray:
    content = np.fromfile(folder / written.bucket.file, np.uint8)
    return content[len(written.bucket.header) :]


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


class Copied:
    """Stands in for `torch.cuda.Event`: counts who waited."""

    waits = 0

    def record(self) -> None: ...

    def synchronize(self) -> None:
        Copied.waits += 1


@pytest.mark.parametrize("locked", [True, False])
def test_tensors_of_a_gpu_arrive_as_those_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Copied)
    monkeypatch.setattr(MappedBucket, "page_lock", lambda self: locked)
    monkeypatch.setattr(Copied, "waits", 0)
    weights = model()
    buckets = buckets_for(weights)
    assert len(buckets) > 1
    mixed = {
        name: tensor if number % 3 == 1 else tensor.as_subclass(OnGpu)
        for number, (name, tensor) in enumerate(weights.items())
    }
    (tmp_path / "host").mkdir()
    (tmp_path / "gpu").mkdir()
    expected = list(BucketWriter(tmp_path / "host", buckets, deltas=False).write(weights.items()))
    found = list(BucketWriter(tmp_path / "gpu", buckets, deltas=False).write(mixed.items()))
    assert found == expected
    for written in found:
        file = written.bucket.file
        assert (tmp_path / "gpu" / file).read_bytes() == (tmp_path / "host" / file).read_bytes()
    assert bool(Copied.waits) == locked


def test_a_gpu_that_page_locks_no_more_is_asked_once_and_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = Mock(return_value=False)
    monkeypatch.setattr(buckets_module, "_register", asked)
    mapped = MappedBucket(tmp_path, buckets_for(model())[0])
    assert [mapped.page_lock(), mapped.page_lock()] == [False, False]
    assert asked.call_count == 1
    assert caplog.messages == [
        f"CUDA page-locks no more memory: weights reach {mapped.path} more slowly"
    ]


def test_with_deltas_no_memory_is_page_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MappedBucket, "page_lock", Mock(side_effect=AssertionError))
    weights: dict[str, torch.Tensor] = {
        name: tensor.as_subclass(OnGpu) for name, tensor in model().items()
    }
    writer = BucketWriter(tmp_path, buckets_for(weights), deltas=True)
    for _ in range(2):
        assert all(written.checksum for written in writer.write(weights.items()))


def test_the_checksum_is_xxh3_of_the_whole_file_and_changes_with_any_bit(tmp_path: Path) -> None:
    weights = model()
    writer = BucketWriter(tmp_path, buckets_for(weights), deltas=False)
    for written in writer.write(weights.items()):
        file = tmp_path / written.bucket.file
        assert written.checksum == xxhash.xxh3_64_intdigest(file.read_bytes())
        with file.open("r+b") as content:
            content.seek(-1, 2)
            last = content.read(1)
            content.seek(-1, 2)
            content.write(bytes([last[0] ^ 1]))
        with pytest.raises(CorruptBucket, match=f"{file} is not what the trainer wrote"):
            Verifier().check(file, written.checksum)


def test_special_values_and_signs_of_zero_count_as_changes_and_arrive(tmp_path: Path) -> None:
    bits = torch.tensor(
        [0, 0x80000000 - 2**32, 0x7F800000, 0x7FC00001, 0x7FC00002], dtype=torch.int32
    )
    before, after = {"x": bits.view(torch.float32)}, {"x": bits.flip(0).view(torch.float32)}
    buckets = buckets_for(before)
    writer = BucketWriter(tmp_path, buckets, deltas=True)
    list(writer.write(before.items()))
    [again] = writer.write(before.items())
    [written] = writer.write(after.items())
    assert (again.changed, written.changed) == (0, 4)
    assert same(held(tmp_path, buckets), after)


def test_a_bucket_that_changed_all_over_is_sent_whole(tmp_path: Path) -> None:
    weights = model()
    writer = BucketWriter(tmp_path, buckets_for(weights), deltas=True)
    first = list(writer.write(weights.items()))
    second = list(writer.write(model(1).items()))
    assert [written.delta_bytes for written in (*first, *second)] == [None] * (
        len(first) + len(second)
    )
    assert [written.base for written in second] == [written.checksum for written in first]


def test_what_is_not_looked_for_counts_as_changed(tmp_path: Path) -> None:
    weights = model()
    writer = BucketWriter(tmp_path, buckets_for(weights), deltas=False)
    list(writer.write(weights.items()))
    assert all(
        w.changed == w.elements and w.delta_bytes is None for w in writer.write(weights.items())
    )


def test_files_are_kept_and_overwritten(tmp_path: Path) -> None:
    weights = model()
    writer = BucketWriter(tmp_path, buckets_for(weights), deltas=False)
    list(writer.write(weights.items()))
    inodes = {file.name: file.stat().st_ino for file in tmp_path.iterdir()}
    list(writer.write(model(1).items()))
    assert {file.name: file.stat().st_ino for file in tmp_path.iterdir()} == inodes


def test_views_that_are_not_contiguous_are_written_as_they_read(tmp_path: Path) -> None:
    weights = {"x": torch.arange(12.0).reshape(3, 4).T, "y": torch.arange(10.0)[::2]}
    buckets = buckets_for(weights)
    list(BucketWriter(tmp_path, buckets, deltas=False).write(weights.items()))
    assert same(
        held(tmp_path, buckets), {name: value.contiguous() for name, value in weights.items()}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {n: v for n, v in w.items() if n != "last"}, "no longer exports last"),
        (lambda w: {**w, "more": torch.zeros(1)}, "exports more, which it did not export at first"),
        (lambda w: {**w, "small": torch.zeros(6)}, "at first it was TensorSpec.name='small'"),
        (lambda w: {**w, "small": w["small"].double()}, "at first it was TensorSpec.name='small'"),
    ],
    ids=["missing", "more", "shape", "dtype"],
)
def test_another_export_than_the_first_is_refused(
    tmp_path: Path, change: object, message: str
) -> None:
    weights = model()
    writer = BucketWriter(tmp_path, buckets_for(weights), deltas=False)
    other: Weights = change(weights)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        list(writer.write(other.items()))


def test_a_bucket_is_told_before_the_next_one_is_exported(tmp_path: Path) -> None:
    """The pipeline rests on it."""
    weights = model()
    asked: list[str] = []

    def export() -> Iterator[tuple[str, Tensor]]:
        for name, value in weights.items():
            asked.append(name)
            yield name, value

    buckets = buckets_for(weights)
    sending = BucketWriter(tmp_path, buckets, deltas=False).write(export())
    assert next(sending).bucket == buckets[0]
    assert asked == [tensor.name for tensor in buckets[0].tensors]


def test_who_keeps_files_mapped_sees_what_is_sent_next_and_files_that_replaced_them(
    tmp_path: Path,
) -> None:
    reader, verifier = SafetensorsReader(), Verifier()
    buckets = buckets_for(model())
    writer = BucketWriter(tmp_path, buckets, deltas=False)
    for seed in (0, 1, 2):
        if seed == 2:
            for file in tmp_path.iterdir():
                file.unlink()
            writer = BucketWriter(tmp_path, buckets, deltas=False)
        found: Weights = {}
        for written in writer.write(model(seed).items()):
            path = tmp_path / written.bucket.file
            verifier.check(path, written.checksum)
            found |= {name: value.clone() for name, value in reader.parameters(path)}
        assert same(found, model(seed))


def test_a_file_written_anew_under_its_name_is_read_as_it_is_now(tmp_path: Path) -> None:
    reader, file = SafetensorsReader(), tmp_path / "part.safetensors"
    for names in (["a"], ["a", "b"], ["b"]):
        weights = {
            name: torch.full((len(names) * 5000,), float(number))
            for number, name in enumerate(names)
        }
        save_file(weights, file)
        assert same({name: value.clone() for name, value in reader.parameters(file)}, weights)


def test_reading_the_same_file_again_and_again_keeps_no_memory(tmp_path: Path) -> None:
    """Each tensor that safetensors makes leaves two objects behind."""
    reader, file = SafetensorsReader(), tmp_path / "part.safetensors"
    save_file({str(number): torch.zeros(3) for number in range(10)}, file)

    def read(times: int) -> int:
        before = sys.getallocatedblocks()
        for _ in range(times):
            for _ in reader.parameters(file):
                pass
        return sys.getallocatedblocks() - before

    read(10)
    assert read(100) < 100  # 2,000 if each is made again
