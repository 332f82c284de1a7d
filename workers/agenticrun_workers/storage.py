"""Folders on any fsspec file system: a local path, s3://bucket/prefix, memory://x. Files are written whole, durably and with a checksum.

Object stores know no rename, so nothing here relies on one: a file that is read is compared with the size and checksum that were
noted when it was written.
"""

from __future__ import annotations

import errno
import os
import tempfile
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

MODULE_RECORD = "module.json"
"""In a checkpointed module's folder: what it is, and under "files" the size and checksum of every other file there."""

_CHUNK_BYTES = 8 << 20


class DamagedFile(Exception):
    """A file is missing, truncated or altered. Raised by (file, what is wrong with it)."""

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(file, problem)
        self.file = file
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.file} {self.problem}"


class UnusableStorage(Exception):
    """A place that this process cannot use: no driver, no credentials, no such bucket, no permission. Says what to do."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file as it was written. CRC-32: it finds accidents, at memory speed, and is no protection from forgery."""

    size: int
    crc32: int

    def to_json(self) -> dict[str, Any]:
        return {"size": self.size, "crc32": f"{self.crc32:08x}"}

    @staticmethod
    def from_json(value: dict[str, Any]) -> FileEntry:
        """Raises KeyError, TypeError or ValueError for anything else."""
        return FileEntry(int(value["size"]), int(value["crc32"], 16))


class Folder:
    """A folder at a URI; it need not exist.

    Raises:
        UnusableStorage: no fsspec driver for the URI.
    """

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        uri = os.fspath(uri)
        try:
            self._fs, path = fsspec.core.url_to_fs(
                uri, use_listings_cache=False
            )  # other processes write here too
        except (ImportError, ValueError, OSError) as error:
            raise UnusableStorage(
                f"{uri}: {error}; use a folder or s3://bucket/prefix, or install that driver in the image"
            ) from error
        self._path = str(path).rstrip("/")
        self.local_path = Path(path) if isinstance(self._fs, LocalFileSystem) else None
        """The absolute path, if this is a folder of this machine."""
        self.uri = str(self.local_path) if self.local_path else uri.rstrip("/")
        """A local folder's is its absolute path."""

    def __str__(self) -> str:
        return self.uri

    def __truediv__(self, name: str) -> Folder:
        return Folder(f"{self.uri.rstrip('/')}/{name}")

    def require_writable(self) -> None:
        """Write a file of a name that nobody else uses and delete it. Raises `UnusableStorage` if that cannot work, now or later."""
        name = f".write-test-{uuid.uuid4().hex}"
        try:
            self.write(name, b"")
            self.remove(name)
        except Exception as error:
            if (advice := _advice(error)) is None:
                raise
            raise UnusableStorage(f"{self.uri} cannot be written ({error}): {advice}") from error

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        return cast(bytes, self._fs.cat_file(self._at(name)))

    def write(self, name: str, data: bytes) -> FileEntry:
        """Put a whole file in place at once: nobody sees half of it, and after this call it survives a crash."""
        if self.local_path is None:
            self._fs.pipe_file(self._at(name), data)
            return FileEntry(len(data), zlib.crc32(data))
        with self.create(f"{name}.tmp") as file:
            file.write(data)
        self.rename(f"{name}.tmp", name)
        return file.entry

    @contextmanager
    def create(self, name: str) -> Iterator[ChecksumWriter]:
        """A new file to write in order. It is durable, and its `entry` final, when the block ends."""
        if self.local_path is not None:
            path = self.local_path / name
            _make_folders(path.parent)
            with path.open("wb") as raw:
                yield (writer := ChecksumWriter(raw))
                writer.flush()
                os.fsync(raw.fileno())
            _sync_folder(path.parent)
        else:
            with self._fs.open(self._at(name), "wb") as raw:
                yield ChecksumWriter(raw)

    @contextmanager
    def open_verified(self, name: str, entry: FileEntry) -> Iterator[IO[bytes]]:
        """A file, seekable, after all of it was compared with `entry`; a remote one is downloaded once, to a temporary file.

        Raises:
            DamagedFile: it is missing, or not what was written.
        """
        try:
            raw = self._fs.open(self._at(name), "rb")
        except FileNotFoundError as error:
            raise DamagedFile(f"{self.uri}/{name}", "is missing") from error
        with raw, nullcontext() if self.local_path else tempfile.TemporaryFile() as download:
            found = _entry_of(raw, download)
            if found != entry:
                raise DamagedFile(f"{self.uri}/{name}", _difference(found, entry))
            file: IO[bytes] = download or raw
            file.seek(0)
            yield file

    def checksum(self, name: str) -> FileEntry:
        """Read a file for its size and checksum. Raises FileNotFoundError."""
        with self._fs.open(self._at(name), "rb") as raw:
            return _entry_of(raw, None)

    def sizes(self) -> dict[str, int]:
        """Bytes of every file below, by name relative to this folder; empty if there is no such folder."""
        start = len(self._path) + 1
        found: dict[str, dict[str, Any]] = self._fs.find(self._path, detail=True)
        return {path[start:]: int(info["size"]) for path, info in found.items()}

    def folders(self) -> list[str]:
        """Names of the folders directly below."""
        try:
            found: list[dict[str, Any]] = self._fs.ls(self._path, detail=True)
        except FileNotFoundError:
            return []
        return [
            info["name"].rstrip("/").rpartition("/")[2]
            for info in found
            if info["type"] == "directory"
        ]

    def exists(self, name: str) -> bool:
        return bool(self._fs.exists(self._at(name)))

    def rename(self, old: str, new: str) -> None:
        """At once and durable in a local folder; a copy and a deletion elsewhere."""
        if self.local_path is None:
            self._fs.mv(self._at(old), self._at(new))
            return
        path = (self.local_path / old).replace(self.local_path / new)
        _sync_folder(path.parent)

    def remove(self, name: str) -> None:
        """Raises FileNotFoundError."""
        self._fs.rm_file(self._at(name))

    def delete(self) -> None:
        """Delete the folder and all below, if there is any."""
        if self._fs.exists(self._path):
            self._fs.rm(self._path, recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"


class ChecksumWriter:
    """Passes writes on, in order, and counts and sums them. As much of a file as torch.save and pickle need."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._size = 0
        self._crc32 = 0

    @property
    def entry(self) -> FileEntry:
        """What was written so far."""
        return FileEntry(self._size, self._crc32)

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._raw.write(view)
        self._size += len(view)
        self._crc32 = zlib.crc32(view, self._crc32)
        return len(view)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._raw.flush()

    def close(self) -> None:
        """Whoever opened the file below closes it."""
        self.flush()


def _entry_of(raw: IO[bytes], copy: IO[bytes] | None) -> FileEntry:
    size = crc32 = 0
    while chunk := raw.read(_CHUNK_BYTES):
        size += len(chunk)
        crc32 = zlib.crc32(chunk, crc32)
        if copy is not None:
            copy.write(chunk)
    return FileEntry(size, crc32)


def _difference(found: FileEntry, expected: FileEntry) -> str:
    if found.size != expected.size:
        return f"has {found.size} bytes instead of {expected.size}"
    return f"was altered: its checksum is {found.crc32:08x} instead of {expected.crc32:08x}"


def _advice(error: Exception) -> str | None:
    """What to do about an error that trying again cannot cure; None for any other. Drivers name their credential errors so."""
    if "Credential" in type(error).__name__:
        return (
            "give driver and trainer pods credentials by environment (roles.<role>.envFrom), "
            "for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL if it is not Amazon's"
        )
    if isinstance(error, FileNotFoundError):
        return "make the bucket first"
    if isinstance(error, PermissionError) or (
        isinstance(error, OSError) and error.errno == errno.EROFS
    ):
        return "let this user or these credentials write there"
    if isinstance(error, NotADirectoryError | FileExistsError):
        return "name a folder, not a file"
    return None


def _make_folders(path: Path) -> None:
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        _sync_folder(folder.parent)


def _sync_folder(path: Path) -> None:
    """Make the names in a folder durable, as fsync of a file does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
