"""Rows of JSON and CSV files, with the values that the files have.

JSON values are what `json.loads` returns. CSV fields are text, unless `dataset.types` declares a
column. Libraries that infer types turn "2026-01-04" into a date, 007 into 7.0 and NA into nothing.

Each row is decoded when it is read. Files stay mapped into memory, so that the env workers of a pod
share their pages; compressed ones are decompressed into memory.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import mmap
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

COMPRESSED = (".gz", ".zst")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Row = dict[str, Any]
Buffer = mmap.mmap | bytes

csv.field_size_limit(sys.maxsize)


class BadFile(Exception):
    """A file cannot be read; the text names the file and the line."""


class TextRows:
    """The rows of some files, in order. A row that lacks a column has None there."""

    def __init__(self, files: Sequence[_File], columns: Iterable[str]) -> None:
        self.column_names = list(dict.fromkeys(columns))
        self._files = files
        self._first_rows = [0, *accumulate(len(file.ends) for file in files)]

    def __len__(self) -> int:
        return self._first_rows[-1]

    def __getitem__(self, row: int) -> Row:
        number = bisect_right(self._first_rows, row) - 1
        values = self._files[number].row(row - self._first_rows[number])
        return {name: values.get(name) for name in self.column_names}


@dataclass
class _File:
    path: str
    buffer: Buffer
    decode: Callable[[str], Row] = json.loads
    unit: str = "line"
    """Word for a line of the buffer in messages."""
    begins: array[int] = field(default_factory=lambda: array("q"))
    """Offset of each row."""
    ends: array[int] = field(default_factory=lambda: array("q"))

    def row(self, number: int) -> Row:
        return self.decode(self.buffer[self.begins[number] : self.ends[number]].decode())

    def lines(self) -> _Lines:
        return _Lines(self.path, self.buffer)


@dataclass
class _Lines(Iterator[str]):
    """The lines of a buffer as text, with their line breaks."""

    path: str
    buffer: Buffer
    begin: int = 0
    """Offset of the last line."""
    end: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        if self.buffer[:3] == BYTE_ORDER_MARK:
            self.end = 3

    def __next__(self) -> str:
        if self.end >= len(self.buffer):
            raise StopIteration
        self.begin = self.end
        self.end = self.buffer.find(b"\n", self.begin) + 1 or len(self.buffer)
        self.number += 1
        try:
            return self.buffer[self.begin : self.end].decode()
        except UnicodeDecodeError as error:
            raise BadFile(f"{self.path} is not UTF-8 (line {self.number})") from error


def file_kind(path: str) -> str:
    """Return the suffix that says what a file is: `.jsonl` of `items.jsonl.gz`."""
    name = Path(path)
    return Path(name.stem).suffix if name.suffix in COMPRESSED else name.suffix


def read_json(paths: Sequence[str]) -> TextRows:
    """Return the rows of JSON files: an object on each line, or a list of objects.

    Raises:
        BadFile: a file or row cannot be read.
    """
    columns: dict[str, None] = {}
    files = [_File(path, _buffer(path)) for path in paths]
    for file in files:
        if file_kind(file.path) == ".json" and not _has_json_lines(file):
            file.buffer, file.unit = _as_json_lines(file), "item"
        lines = file.lines()
        for line in lines:
            if line.strip():
                columns |= dict.fromkeys(_checked_object(line, file, lines.number))
                file.begins.append(lines.begin)
                file.ends.append(lines.end)
    return TextRows(files, columns)


def read_csv(paths: Sequence[str], types: Mapping[str, str]) -> TextRows:
    """Return the rows of CSV files, whose first line has the names of the columns.

    Args:
        paths: of the files, which may have different columns.
        types: a key of `CONVERTERS` by column; the others are text.

    Raises:
        BadFile: a file or row cannot be read, or a field is not of its declared type.
    """
    columns: dict[str, None] = {}
    files = [_File(path, _buffer(path)) for path in paths]
    for file in files:
        lines = file.lines()
        try:
            names = _index_records(file, lines, types)
        except (csv.Error, ValueError) as error:
            raise BadFile(
                f"{file.path} cannot be read: CSV error in line {lines.number}: {error}"
            ) from error
        columns |= dict.fromkeys(names)
    return TextRows(files, columns)


def _buffer(path: str) -> Buffer:
    try:
        if path.endswith(".gz"):
            with gzip.open(path) as compressed:
                return compressed.read()
        if path.endswith(".zst"):
            import pyarrow as pa

            with pa.input_stream(path, compression="zstd") as stream:
                content: bytes = stream.read()
            return content
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, EOFError) as error:  # a file that was cut off is an EOFError
        raise BadFile(f"{path} cannot be read: {error}") from error


def _has_json_lines(file: _File) -> bool:
    """Return True if the first line with text is an object of its own."""
    first = next((line for line in file.lines() if line.strip()), "")
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _as_json_lines(file: _File) -> bytes:
    try:
        content = json.loads("".join(file.lines()))
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{file.path} cannot be read: JSON parse error: {error}") from error
    rows = content if isinstance(content, list) else [content]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _checked_object(line: str, file: _File, number: int) -> Row:
    place = f"{file.unit} {number}"
    try:
        row = json.loads(line)
        if "\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()  # lone surrogates are not text
    except (ValueError, RecursionError) as error:
        raise BadFile(
            f"{file.path} cannot be read: JSON parse error in {place}: {error}"
        ) from error
    if not isinstance(row, dict):
        raise BadFile(f"{file.path} cannot be read: {place} is no object with named values")
    return row


def _index_records(file: _File, lines: _Lines, types: Mapping[str, str]) -> list[str]:
    """Find the records of a CSV file, check them, and return the names of the columns."""
    names: list[str] = []

    def decode(record: str) -> Row:
        (fields,) = csv.reader(io.StringIO(record, newline="\n"))
        return _converted(names, fields, types)

    file.decode = decode
    begin = lines.end
    for fields in csv.reader(lines, strict=True):
        if fields and not names:
            names += fields
            if len(set(names)) < len(names):
                raise ValueError(f"two columns have the same name: {', '.join(names)}")
        elif fields:
            _converted(names, fields, types)
            file.begins.append(begin)
            file.ends.append(lines.end)
        begin = lines.end
    return names


def _converted(names: Sequence[str], fields: Sequence[str], types: Mapping[str, str]) -> Row:
    if len(fields) > len(names):
        raise ValueError(f"{len(fields)} fields, but {len(names)} columns: {', '.join(names)}")
    row: Row = dict(zip(names, fields, strict=False))
    for name, kind in types.items():
        if name in row:
            row[name] = _value(row[name], kind, name)
    return row


def _value(text: str, kind: str, name: str) -> Any:
    """Return a field as the declared type; None if it is empty."""
    try:
        return CONVERTERS[kind](text.strip()) if text.strip() else None
    except (ValueError, KeyError) as error:
        raise ValueError(f"column {name} has {text[:80]!r}, which is no {kind}") from error


def _whole_number(text: str) -> int:
    if "_" in text:
        raise ValueError("Python's separator of digits")
    return int(text)


CONVERTERS: Mapping[str, Callable[[str], Any]] = {
    "int": _whole_number,
    "float": float,
    "bool": lambda text: {"true": True, "false": False, "1": True, "0": False}[text.lower()],
}
"""Converters of a field's text, by the type in `dataset.types`."""
