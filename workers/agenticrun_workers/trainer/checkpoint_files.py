"""torch.distributed.checkpoint's files in a `Folder`: checksummed as they are written, verified before they are read."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

from torch.distributed.checkpoint.filesystem import (
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata

from agenticrun_workers.storage import DamagedFile, FileEntry, Folder

Path = str | os.PathLike[str]


class ShardWriter(FileSystemWriter):
    """Writes a rank's shards into a new folder, each file durable when it is complete."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder.uri, sync_files=False)
        self._files = _Files(folder, {})
        self.fs = self._files  # type: ignore[assignment]  # as FsspecWriter does
        self.path = ""

    @property
    def written(self) -> dict[str, FileEntry]:
        """What this rank has written."""
        return self._files.entries


class ShardReader(FileSystemReader):
    """Reads shards.

    Args:
        entries: what the files must be. A read raises `DamagedFile` for any other.
    """

    def __init__(self, folder: Folder, entries: Mapping[str, FileEntry]) -> None:
        super().__init__(folder.uri)
        self.fs = _Files(folder, dict(entries))  # type: ignore[assignment]
        self.path = ""
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """What the shards hold; read once."""
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata


class _Files(FileSystemBase):
    """Files by their names in a folder."""

    def __init__(self, folder: Folder, entries: dict[str, FileEntry]) -> None:
        self._folder = folder
        self.entries = entries

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[io.IOBase]:
        name = os.fspath(path)
        if mode == "wb":
            with self._folder.create(name) as writer:
                yield cast(io.IOBase, writer)
            self.entries[name] = writer.entry
            return
        if name not in self.entries:
            raise DamagedFile(f"{self._folder}/{name}", "is unknown to the record of its folder")
        with self._folder.open_verified(name, self.entries[name]) as file:
            yield cast(io.IOBase, file)

    def concat_path(self, _: Path, suffix: str) -> str:
        return suffix

    def rename(self, path: Path, new_path: Path) -> None:
        self._folder.rename(os.fspath(path), os.fspath(new_path))
        self.entries[os.fspath(new_path)] = self.entries.pop(os.fspath(path))

    def init_path(self, path: Path) -> Path:
        return path

    def mkdir(self, _: Path) -> None:
        """Folders come with the first file."""

    @classmethod
    def validate_checkpoint_id(cls, _: Path) -> bool:
        return True

    def exists(self, path: Path) -> bool:
        return os.fspath(path) in self.entries

    def rm_file(self, path: Path) -> None:
        self._folder.remove(os.fspath(path))

    def ls(self, _: Path) -> list[str]:
        return list(self.entries)
