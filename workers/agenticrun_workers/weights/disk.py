"""Weights through a folder that trainers and engines share: a file per bucket, and a manifest that makes them a version."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.storage import FileEntry, Folder

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Published:
    """The file of one bucket in a published version."""

    index: int
    delta: bool
    entry: FileEntry

    @property
    def file(self) -> str:
        return f"bucket-{self.index:05d}.{'delta' if self.delta else 'data'}"


def publish(folder: Folder, index: int, payload: NDArray[np.uint8], *, delta: bool) -> Published:
    """Write one bucket, or what changed in it."""
    published = Published(index, delta, FileEntry(0, 0))
    with folder.create(published.file) as file:
        file.write(payload)
    return Published(index, delta, file.entry)


def seal(folder: Folder, files: list[Published]) -> None:
    """Write the manifest, at once: who finds it finds a complete version."""
    content = [{"index": file.index, "delta": file.delta, **file.entry.to_json()} for file in files]
    folder.write(MANIFEST, json.dumps(content).encode())


def fetch(folder: Folder) -> Iterator[tuple[Published, NDArray[np.uint8]]]:
    """The files of a sealed version and their content. Raises FileNotFoundError without manifest, `DamagedFile` for another content."""
    for entry in json.loads(folder.read(MANIFEST)):
        published = Published(entry["index"], entry["delta"], FileEntry.from_json(entry))
        with folder.open_verified(published.file, published.entry) as file:
            yield published, np.frombuffer(file.read(), np.uint8)
