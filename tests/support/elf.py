"""Needs of a shared library: the dynamic section of a 64-bit little-endian ELF file."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

LOAD, DYNAMIC = 1, 2
"""Types of segments."""
NEEDED, STRINGS, RPATH, RUNPATH = 1, 5, 15, 29
"""Tags of entries."""


@dataclass(frozen=True)
class Needs:
    """The entries of a library that the loader reads before it loads it."""

    libraries: tuple[str, ...]
    """Names of the libraries that it needs (NEEDED)."""
    folders: tuple[str, ...]
    """Folders of these, from RUNPATH or RPATH."""


def needs(path: Path) -> Needs:
    """Read a library. Raises `ValueError` if it is none."""
    with path.open("rb") as file:
        return _needs(file)


def _needs(file: BinaryIO) -> Needs:
    header = file.read(64)
    if header[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", header, 32)
    size, count = struct.unpack_from("<HH", header, 54)
    segments = [
        struct.unpack("<IIQQQQ", _read(file, offset + number * size, 40)) for number in range(count)
    ]
    entries = [
        entry
        for kind, _, start, _, _, length in segments
        if kind == DYNAMIC
        for entry in struct.iter_unpack("<QQ", _read(file, start, length))
    ]
    (address,) = (value for tag, value in entries if tag == STRINGS)
    (strings,) = (
        address - virtual + start
        for kind, _, start, virtual, _, length in segments
        if kind == LOAD and virtual <= address < virtual + length
    )

    def text(value: int) -> str:
        return _read(file, strings + value, 4096).split(b"\0", 1)[0].decode()

    return Needs(
        tuple(text(value) for tag, value in entries if tag == NEEDED),
        tuple(
            folder
            for tag, value in entries
            if tag in (RPATH, RUNPATH)
            for folder in text(value).split(":")
        ),
    )


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)
