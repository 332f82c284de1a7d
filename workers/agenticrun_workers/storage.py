"""Folders on any fsspec file system: a local path, s3://bucket/prefix or memory://x.

Files are written whole, durably and with a checksum. Object stores cannot rename files, so nothing
relies on that: readers compare a file with the size and checksum from when it was written.
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
"""File in a checkpointed module's folder.

It describes the module, and has the size and checksum of every other file under "files".
"""

_CHUNK_BYTES = 8 << 20


class DamagedFile(Exception):
    """A file is missing, truncated or altered.

    Args:
        file: URI of the file.
        problem: what is wrong with it, as the end of a sentence.
    """

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(file, problem)
        self.file = file
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.file} {self.problem}"


class UnusableStorage(Exception):
    """This process cannot use a location, for lack of a driver, credentials, bucket or permission.

    The message says what to do.
    """


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and checksum of a file, as it was written.

    CRC-32 finds accidental damage at memory speed. It does not protect against forgery.
    """

    size: int
    crc32: int

    def to_json(self) -> dict[str, Any]:
        return {"size": self.size, "crc32": f"{self.crc32:08x}"}

    @staticmethod
    def from_json(value: dict[str, Any]) -> FileEntry:
        """Parse a value of `to_json`. Raises KeyError, TypeError or ValueError for any other."""
        return FileEntry(int(value["size"]), int(value["crc32"], 16))


class Folder:
    """A folder at a URI; it need not exist.

    Raises:
        UnusableStorage: no fsspec driver for the URI.
    """

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        uri = os.fspath(uri)
        try:
            # Other processes write here, too, so listings are not cached.
            self._fs, path = fsspec.core.url_to_fs(uri, use_listings_cache=False)
        except (ImportError, ValueError, OSError) as error:
            raise UnusableStorage(
                f"{uri}: {error}; use a folder or s3://bucket/prefix, "
                "or install that driver in the image"
            ) from error
        self._path = str(path).rstrip("/")
        self.local_path = Path(path) if isinstance(self._fs, LocalFileSystem) else None
        """Absolute path of a local folder, else None."""
        self.uri = str(self.local_path) if self.local_path else uri.rstrip("/")
        """URI of the folder; for a local folder, its absolute path."""

    def __str__(self) -> str:
        return self.uri

    def __truediv__(self, name: str) -> Folder:
        return Folder(f"{self.uri.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """Last part of the URI."""
        return self.uri.rpartition("/")[2]

    @property
    def parent(self) -> Folder:
        """The folder that this one lies in."""
        return Folder(self.uri.rpartition("/")[0])

    def require_writable(self) -> None:
        """Check that the folder is writable: write and delete a file with a unique name.

        Raises:
            UnusableStorage: writing fails in a way that a retry cannot fix.
        """
        name = f".write-test-{uuid.uuid4().hex}"
        try:
            # A unique name, because other processes may test the same folder.
            self.write(name, b"")
            self.remove(name)
        except Exception as error:
            if (advice := _advice(error)) is None:
                raise
            raise UnusableStorage(f"{self.uri} cannot be written ({error}): {advice}") from error

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError."""
        return cast(bytes, self._fs.cat_file(self._at(name)))

    def write(self, name: str, data: bytes) -> FileEntry:
        """Write a whole file at once. No reader sees a part of it, and it survives a crash."""
        # Object storage shows an object only when it is whole.
        if self.local_path is None:
            self._fs.pipe_file(self._at(name), data)
            return FileEntry(len(data), zlib.crc32(data))
        # Written beside it and renamed: a reader sees the old file or the new one.
        with self.create(f"{name}.tmp") as file:
            file.write(data)
        self.rename(f"{name}.tmp", name)
        return file.entry

    @contextmanager
    def create(self, name: str) -> Iterator[ChecksumWriter]:
        """Open a new file for sequential writes.

        When the block ends, the file is durable and its `entry` is final.
        """
        if self.local_path is not None:
            path = self.local_path / name
            # A new folder survives a power cut only if the folder that holds it was synced after it
            # was made.
            missing = [folder for folder in path.parents if not folder.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in missing:
                _sync_folder(folder.parent)
            with path.open("wb") as raw:
                yield (writer := ChecksumWriter(raw))
                writer.flush()
                os.fsync(raw.fileno())
            # fsync of a file does not make its name durable; fsync of its folder does.
            _sync_folder(path.parent)
        else:
            with self._fs.open(self._at(name), "wb") as raw:
                yield ChecksumWriter(raw)

    @contextmanager
    def open_verified(self, name: str, entry: FileEntry) -> Iterator[IO[bytes]]:
        """Open a seekable file after comparing all of its content with `entry`.

        A remote file is downloaded once, to a temporary file.

        Raises:
            DamagedFile: the file is missing or differs from `entry`.
        """
        try:
            raw = self._fs.open(self._at(name), "rb")
        except FileNotFoundError as error:
            raise DamagedFile(f"{self.uri}/{name}", "is missing") from error
        # Remote files are read once: checksum and use would otherwise be two downloads.
        with raw, nullcontext() if self.local_path else tempfile.TemporaryFile() as download:
            found = _entry_of(raw, download)
            if found != entry:
                raise DamagedFile(f"{self.uri}/{name}", _difference(found, entry))
            file: IO[bytes] = download or raw
            # Only after the whole file was compared: nothing damaged is ever used.
            file.seek(0)
            yield file

    def checksum(self, name: str) -> FileEntry:
        """Read a file and return its size and checksum. Raises FileNotFoundError."""
        with self._fs.open(self._at(name), "rb") as raw:
            return _entry_of(raw, None)

    def sizes(self) -> dict[str, int]:
        """Return the size of every file below, in bytes, by its name relative to this folder.

        It is empty if the folder does not exist.
        """
        start = len(self._path) + 1
        found: dict[str, dict[str, Any]] = self._fs.find(self._path, detail=True)
        return {path[start:]: int(info["size"]) for path, info in found.items()}

    def folders(self) -> list[str]:
        """Return the names of the folders directly below."""
        try:
            found: list[dict[str, Any]] = self._fs.ls(self._path, detail=True)
        except FileNotFoundError:
            return []
        return [
            info["name"].rstrip("/").rpartition("/")[2]
            for info in found
            if info["type"] == "directory"
        ]

    def upload(self, name: str, path: Path) -> None:
        """Copy a local file here, whole; nothing makes sure that it survives a crash."""
        self._fs.put_file(str(path), self._at(name))

    def download(self, name: str, path: Path) -> None:
        """Copy a file to a local path. Raises FileNotFoundError."""
        self._fs.get_file(self._at(name), str(path))

    def exists(self, name: str) -> bool:
        return bool(self._fs.exists(self._at(name)))

    def rename(self, old: str, new: str) -> None:
        """Rename a file: atomic and durable in a local folder, a copy and a deletion elsewhere."""
        if self.local_path is None:
            self._fs.mv(self._at(old), self._at(new))
            return
        path = (self.local_path / old).replace(self.local_path / new)
        _sync_folder(path.parent)

    def remove(self, name: str) -> None:
        """Delete a file. Raises FileNotFoundError."""
        self._fs.rm_file(self._at(name))

    def delete(self) -> None:
        """Delete the folder and everything below it, if it exists."""
        if self._fs.exists(self._path):
            self._fs.rm(self._path, recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"


class ChecksumWriter:
    """Sequential writer that counts the bytes and computes their checksum.

    It has the file methods that torch.save and pickle need.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._size = 0
        self._crc32 = 0

    @property
    def entry(self) -> FileEntry:
        """Size and checksum of the bytes written so far."""
        return FileEntry(self._size, self._crc32)

    def write(self, data: Any, /) -> int:
        # As bytes, because the length of another buffer counts its items.
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
        """Flush only: the underlying file is closed by the code that opened it."""
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
    """Return advice for an error that a retry cannot fix; None for any other error.

    Credential errors are recognised by their names, since each driver has its own types.
    """
    if "Credential" in type(error).__name__:
        return (
            "give driver and trainer pods credentials by environment (roles.<role>.envFrom), "
            "for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "and AWS_ENDPOINT_URL if it is not Amazon's"
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


def _sync_folder(path: Path) -> None:
    """Make the file names in a folder durable, which fsync of a file does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
