"""What a sender says about a bucket that it has written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agenticrun_workers.weights.buckets import Bucket


@dataclass(frozen=True, slots=True)
class Written:
    """A bucket's file holds a new version."""

    bucket: Bucket
    checksum: int
    """xxh3_64 of the whole file."""
    base: int | None
    """Checksum of what the file held before, which a delta begins from; None at the first sync."""
    delta_bytes: int | None
    """Size of the delta that lies beside it; None where the whole bucket is to be sent."""
    changed: int
    """Elements that differ from the version before; all where that was not looked for."""
    elements: int

    @property
    def nbytes(self) -> int:
        """Size of the whole."""
        return self.bucket.data_bytes


@dataclass(frozen=True, slots=True)
class Part:
    """A file with some whole parameters, for engines to take."""

    path: str
    checksum: int
    """xxh3_64 of the whole file."""


def delta_file(folder: Path, bucket: Bucket) -> Path:
    """Where a sender leaves what changed in a bucket."""
    return folder / f"bucket-{bucket.index:05d}.delta"


class CorruptBucket(Exception):
    """A bucket's file is not what was sent: its checksum differs."""


class BroadcastFailed(Exception):
    """A collective broke off: a member is gone, or was late."""
