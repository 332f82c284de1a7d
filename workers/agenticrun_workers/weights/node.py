"""A node's copy of the weights, in shared memory, for all engines there.

One actor per node owns a folder of buckets that engines map. On the first trainer's node, the
trainer writes into it; elsewhere buckets arrive through `NodeWeights.receive` or `fetch`. Where
only LoRA adapters travel, an `AdapterNode` merges them into whole weights, once for all engines.

The folder does not outlive the run, also after kill -9 (`SharedFolder`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.storage import FileEntry, Folder
from agenticrun_workers.weights.buckets import (
    Bucket,
    MappedBucket,
    MergePlan,
    SafetensorsReader,
    Verifier,
    WeightFile,
    buckets_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from agenticrun_workers.models.source import ModelSource
    from agenticrun_workers.weights.export import BucketWriter
    from agenticrun_workers.weights.lora_merge import AdapterMerger

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "agenticrun-"
MAX_NAME = 200
"""Most characters of the run's name in a folder's name, which may have 255 bytes."""

# Nothing else frees shared memory.
_DELETE_AT_END = 'exec 3<&0; (read -r _ <&3; rm -rf -- "$1") >/dev/null 2>&1 &'
"""Waits for the end of its input, which comes when no process holds the other end of the pipe."""


class SharedFolder:
    """A new folder in shared memory, deleted when this process ends, however it ends.

    Args:
        name: becomes a part of the folder's name; the run's.
    """

    def __init__(self, name: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name[:MAX_NAME]}-", dir=SHARED_MEMORY))
        command = ["/bin/sh", "-c", _DELETE_AT_END, "agenticrun-weights", str(self.path)]
        # Detached, because Ray ends the children of a worker with it.
        shell = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert shell.stdin is not None
        self._lifeline = shell.stdin
        shell.wait()

    def delete(self) -> None:
        """Delete the folder now. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lifeline.close()


class NodeWeights:
    """The actor that owns the buckets of one node.

    Args:
        run: the run's name, for the folder's.
    """

    def __init__(self, run: str, buckets: tuple[Bucket, ...]) -> None:
        self._shared = SharedFolder(run)
        self._buckets = buckets
        self._mapped: list[MappedBucket] = []

    def allocate(self) -> str:
        """Allocate the buckets, and return their folder. The first call, made once.

        Raises:
            InvalidConfig: the shared memory is too small.
        """
        self._mapped = [MappedBucket(self._shared.path, bucket) for bucket in self._buckets]
        return self.folder()

    def folder(self) -> str:
        """Return the folder of the buckets."""
        return str(self._shared.path)

    def read(self, index: int, delta: bool) -> NDArray[np.uint8]:
        """Return a bucket's data, or the delta of the last sync."""
        if delta:
            # The delta is in a file of its own, which the trainer replaces in each sync.
            return np.fromfile(self._shared.path / self._buckets[index].delta_file, np.uint8)
        return self._mapped[index].data

    def receive(self, index: int, payload: NDArray[np.uint8], delta: bool) -> None:
        """Store what another node's `read` returned. Readers compare the file's checksum."""
        if delta:
            self._mapped[index].patch(payload)
        else:
            self._mapped[index].write(payload)

    def publish(self, uri: str, index: int, delta: bool) -> PublishedBucket:
        """Write what `read` returns into the folder of a version."""
        return publish_bucket(Folder(uri), index, self.read(index, delta), delta=delta)

    def seal(self, uri: str, files: list[PublishedBucket]) -> None:
        """Complete a version."""
        seal_version(Folder(uri), files)

    def fetch(self, uri: str) -> None:
        """Load a complete version."""
        for published, payload in read_version(Folder(uri)):
            self.receive(published.index, payload, published.delta)

    def delete(self, uri: str) -> None:
        """Delete the folder of a version, or of all versions of a run."""
        Folder(uri).delete()

    def release(self) -> None:
        """Free the memory now."""
        self._shared.delete()

    def close(self) -> None:
        """Free the memory. Needed only where the actor is not a process of its own."""
        self.release()


class AdapterNode(NodeWeights):
    """A `NodeWeights` whose buckets hold adapters.

    Engines read whole weights from a folder below, in buckets of their own.

    Args:
        run: see `NodeWeights`.
        source: the model that the trainers have loaded. Files made by the run are kept in shared
            memory, too.
        bucket_bytes: of whole weights.
        threads: for torch, on a CPU.
    """

    def __init__(
        self,
        run: str,
        buckets: tuple[Bucket, ...],
        plan: MergePlan,
        source: ModelSource,
        bucket_bytes: int,
        threads: int,
    ) -> None:
        super().__init__(run, buckets)
        self._plan = plan
        self._source = source
        self._bucket_bytes = bucket_bytes
        self._threads = threads
        self._verifier = Verifier()
        self._reader = SafetensorsReader()

    def merge(self, checksums: list[int]) -> Iterator[WeightFile]:
        """Overwrite the whole weights with those of the current adapters, file by file.

        No process may read them during the call, and calls must not overlap.

        Args:
            checksums: of all buckets, as the trainers wrote them.

        Raises:
            CorruptBucket: the adapters here are others. Nothing was yielded then.
            InvalidConfig: the model's files are not here.
        """
        import torch

        # Checked here, because the engines only see the merged weights.
        for bucket, checksum in zip(self._buckets, checksums, strict=True):
            self._verifier.check(self._shared.path / bucket.file, checksum)
        # Ray gives an actor one thread by default, and the engines wait for this merge.
        torch.set_num_threads(self._threads)
        for written in self._writer.write(self._merger.weights(self._adapters())):
            yield WeightFile(str(self._whole_folder / written.bucket.file), written.checksum)

    def _adapters(self) -> dict[str, Tensor]:
        """Return views of the adapters in the buckets."""
        return {
            name: value
            for bucket in self._buckets
            for name, value in self._reader.parameters(self._shared.path / bucket.file)
        }

    @property
    def _whole_folder(self) -> Path:
        return self._shared.path / "whole"

    @cached_property
    def _writer(self) -> BucketWriter:
        from agenticrun_workers.weights.export import BucketWriter

        self._whole_folder.mkdir(exist_ok=True)
        return BucketWriter(
            self._whole_folder, buckets_of(self._plan.tensors, self._bucket_bytes), deltas=False
        )

    @cached_property
    def _merger(self) -> AdapterMerger:
        from agenticrun_workers.weights.lora_merge import AdapterMerger

        # Files of a hub or a volume are on this node as well; what the run made is not.
        if self._source.path is not None:
            return AdapterMerger(self._plan, self._source.path)
        folder = self._shared.path / "base"
        folder.mkdir(exist_ok=True)
        self._source.write(folder)
        return AdapterMerger(self._plan, str(folder))


MANIFEST = "manifest.json"
"""Completes a version on disk: readers that find it find all files."""


@dataclass(frozen=True, slots=True)
class PublishedBucket:
    """The file of one bucket, or of its delta, in a version on disk."""

    index: int
    delta: bool
    entry: FileEntry

    @property
    def file(self) -> str:
        return f"bucket-{self.index:05d}.{'delta' if self.delta else 'data'}"


def publish_bucket(
    folder: Folder, index: int, payload: NDArray[np.uint8], *, delta: bool
) -> PublishedBucket:
    """Write one bucket, or its delta."""
    published = PublishedBucket(index, delta, FileEntry(0, 0))
    with folder.create(published.file) as file:
        file.write(payload)
    return PublishedBucket(index, delta, file.entry)


def seal_version(folder: Folder, files: list[PublishedBucket]) -> None:
    """Write the manifest, atomically."""
    content = [{"index": file.index, "delta": file.delta, **file.entry.to_json()} for file in files]
    folder.write(MANIFEST, json.dumps(content).encode())


def read_version(folder: Folder) -> Iterator[tuple[PublishedBucket, NDArray[np.uint8]]]:
    """Yield the files of a complete version and their content.

    Raises:
        FileNotFoundError: there is no manifest.
        DamagedFile: a file has another content.
    """
    for entry in json.loads(folder.read(MANIFEST)):
        published = PublishedBucket(entry["index"], entry["delta"], FileEntry.from_json(entry))
        with folder.open_verified(published.file, published.entry) as file:
            yield published, np.frombuffer(file.read(), np.uint8)
