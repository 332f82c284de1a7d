"""Splits of data sets, read from files, folders of Hugging Face datasets, or the hub.

Local paths use no network.

JSON and CSV files have the values that the files have: JSON values are what `json.loads` returns,
CSV fields are text, unless `dataset.types` declares a column. Libraries that infer types turn
"2026-01-04" into a date, 007 into 7.0 and NA into nothing. Each row is decoded when it is read.
Files stay mapped into memory, so that the env workers of a pod share their pages; compressed ones
are decompressed into memory.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import mmap
import os
import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from agenticrun_api.environments import DatasetSpec
from agenticrun_workers.errors import InvalidConfig, RolloutFailed

if TYPE_CHECKING:
    import datasets as hf

KINDS = (".jsonl", ".json", ".csv", ".parquet")
"""Kinds of files by suffix. JSON and CSV may be compressed."""
COMPRESSED = (".gz", ".zst")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Buffer = mmap.mmap | bytes

Values = dict[str, Any]
"""A row: values by column."""

csv.field_size_limit(sys.maxsize)


class Rows(Protocol):
    """The rows of a split."""

    column_names: list[str]

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, Any]: ...


FILES_SPLIT = "train"
"""Split name of plain files."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def read_splits(spec: DatasetSpec, field: str) -> dict[str, Rows]:
    """Return the splits by name.

    Args:
        spec: path or hub name, and types of columns.
        field: path of the spec, for messages.

    Raises:
        InvalidConfig: the data do not exist or cannot be read.
        RolloutFailed: the hub cannot be reached.
    """
    found = _find(spec.path)
    is_hub_name = _HUB_NAME.fullmatch(spec.path) and file_kind(spec.path) not in KINDS
    if not found and not is_hub_name:
        raise InvalidConfig(
            f"{field}.path", f"no file or folder {spec.path} can be read on the env pods"
        )
    if found and not Path(found[0]).is_dir():
        return {FILES_SPLIT: _from_files(found, spec, field)}
    if spec.types:
        raise InvalidConfig(f"{field}.types", NO_TYPES)
    if len(found) > 1:
        raise InvalidConfig(f"{field}.path", f"{spec.path} matches several folders: name one")
    if not found:
        try:
            return _by_name(_library().load_dataset(spec.path))
        except FileNotFoundError as error:
            raise InvalidConfig(
                f"{field}.path",
                f"{spec.path} is neither a file or folder on the env pods nor on the hub: {error}",
            ) from error
        except ConnectionError as error:
            raise RolloutFailed(
                f"{field}.path: {spec.path} is no file or folder on the env pods, "
                f"and the hub does not answer: {error}"
            ) from error
    try:
        loaded = _library().load_from_disk(found[0])
    except (FileNotFoundError, ValueError) as error:
        message = (
            f"{found[0]} is no folder that save_to_disk wrote; "
            f"name plain files with a glob, for example {found[0]}/*.jsonl"
        )
        raise InvalidConfig(f"{field}.path", message) from error
    return _by_name(loaded)


def _find(path: str) -> list[str]:
    """Return the matches of a path or glob, relative to here or to PYTHONPATH (`spec.code`)."""
    # `spec.code` is on PYTHONPATH, so its data files are found by the same path as on a laptop.
    folders = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    matches = (sorted(glob.glob(os.path.join(folder, path))) for folder in folders)
    return next(filter(None, matches), [])


NO_TYPES = "types are those of CSV fields; other data sets have their own: leave it out"


def _from_files(paths: list[str], spec: DatasetSpec, field: str) -> Rows:
    kinds = {file_kind(path) for path in paths}
    compressed = any(path.endswith(COMPRESSED) for path in paths)
    # Mixed files would have columns of different types.
    if len(kinds) != 1 or not kinds <= {*KINDS} or (compressed and ".parquet" in kinds):
        raise InvalidConfig(
            f"{field}.path",
            f"one kind of {', '.join(KINDS)} (JSON and CSV also with {' or '.join(COMPRESSED)}) "
            f"is expected, not {', '.join(sorted({Path(path).suffix for path in paths}))}",
        )
    # Sharded exports often have empty files, which parsers refuse.
    filled = [path for path in paths if Path(path).stat().st_size]
    if not filled:
        raise InvalidConfig(f"{field}.path", f"{paths[0]} is empty")
    (kind,) = kinds
    if spec.types and kind != ".csv":
        raise InvalidConfig(f"{field}.types", NO_TYPES)
    try:
        if kind == ".parquet":
            return _from_parquet(filled, field)
        rows = read_csv(filled, spec.types) if kind == ".csv" else read_json(filled)
    except BadFile as error:
        raise InvalidConfig(f"{field}.path", str(error)) from error
    for name in spec.types:
        if name not in rows.column_names:
            raise InvalidConfig(
                f"{field}.types.{name}",
                f"{spec.path} has no column {name!r}; it has {', '.join(rows.column_names)}",
            )
    return rows


def _from_parquet(paths: list[str], field: str) -> Rows:
    hf = _library()
    try:
        # `hf.load_dataset` reads them too, but reports each use to a server.
        return cast(Rows, hf.Dataset.from_parquet(paths))
    except (hf.exceptions.DatasetGenerationError, ValueError) as error:
        raise InvalidConfig(
            f"{field}.path", f"{', '.join(paths)} cannot be read: {error.__cause__ or error}"
        ) from error


def _library() -> Any:
    """Return Hugging Face's library, which brings pandas and pyarrow: only if it is needed."""
    import datasets as hf

    hf.disable_progress_bars()
    return hf


def _by_name(loaded: hf.Dataset | hf.DatasetDict) -> dict[str, Rows]:
    if isinstance(loaded, dict):
        return {str(name): cast(Rows, split) for name, split in loaded.items()}
    return {str(loaded.split or FILES_SPLIT): cast(Rows, loaded)}


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

    def __getitem__(self, row: int) -> Values:
        number = bisect_right(self._first_rows, row) - 1
        values = self._files[number].row(row - self._first_rows[number])
        return {name: values.get(name) for name in self.column_names}


@dataclass
class _File:
    path: str
    buffer: Buffer
    decode: Callable[[str], Values] = json.loads
    unit: str = "line"
    """Word for a line of the buffer in messages."""
    begins: array[int] = field(default_factory=lambda: array("q"))
    """Offset of each row."""
    ends: array[int] = field(default_factory=lambda: array("q"))

    def row(self, number: int) -> Values:
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
        # `.json` may hold lines or one list: only the content tells.
        if file_kind(file.path) == ".json" and not _has_json_lines(file):
            try:
                content = json.loads("".join(file.lines()))
            except (ValueError, RecursionError) as error:
                raise BadFile(f"{file.path} cannot be read: JSON parse error: {error}") from error
            rows = content if isinstance(content, list) else [content]
            # As lines, so that rows are read one at a time like those of other files.
            file.buffer = "".join(json.dumps(row) + "\n" for row in rows).encode()
            file.unit = "item"
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
        # Mapped: the pages are shared by all env workers of a pod, and need no memory of ours.
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


def _checked_object(line: str, file: _File, number: int) -> Values:
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

    def decode(record: str) -> Values:
        # Parsed again when the row is read: an index of offsets is all that stays in memory.
        (fields,) = csv.reader(io.StringIO(record, newline="\n"))
        return _converted(names, fields, types)

    file.decode = decode
    # A record may span several lines, so its beginning is where the last one ended.
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


def _converted(names: Sequence[str], fields: Sequence[str], types: Mapping[str, str]) -> Values:
    if len(fields) > len(names):
        raise ValueError(f"{len(fields)} fields, but {len(names)} columns: {', '.join(names)}")
    row: Values = dict(zip(names, fields, strict=False))
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
    # Python reads 1_000 as a number, other programs as text.
    if "_" in text:
        raise ValueError("Python's separator of digits")
    return int(text)


CONVERTERS: Mapping[str, Callable[[str], Any]] = {
    "int": _whole_number,
    "float": float,
    "bool": lambda text: {"true": True, "false": False, "1": True, "0": False}[text.lower()],
}
"""Converters of a field's text, by the type in `dataset.types`."""
