"""Splits of data sets, read from files, folders of Hugging Face datasets, or the hub.

Local paths use no network.
"""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from agenticrun_api.environments import DatasetSpec
from agenticrun_workers.errors import InvalidConfig, RolloutFailed
from agenticrun_workers.rollout.text_rows import (
    COMPRESSED,
    BadFile,
    file_kind,
    read_csv,
    read_json,
)

if TYPE_CHECKING:
    import datasets as hf

KINDS = (".jsonl", ".json", ".csv", ".parquet")
"""Kinds of files by suffix. JSON and CSV may be compressed."""


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
    return _from_folder(found[0], field) if found else _from_hub(spec.path, field)


def _find(path: str) -> list[str]:
    """Return the matches of a path or glob, relative to here or to PYTHONPATH (`spec.code`)."""
    folders = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    matches = (sorted(glob.glob(os.path.join(folder, path))) for folder in folders)
    return next(filter(None, matches), [])


NO_TYPES = "types are those of CSV fields; other data sets have their own: leave it out"


def _from_files(paths: list[str], spec: DatasetSpec, field: str) -> Rows:
    kinds = {file_kind(path) for path in paths}
    compressed = any(path.endswith(COMPRESSED) for path in paths)
    if len(kinds) != 1 or not kinds <= {*KINDS} or (compressed and ".parquet" in kinds):
        raise InvalidConfig(
            f"{field}.path",
            f"one kind of {', '.join(KINDS)} (JSON and CSV also with {' or '.join(COMPRESSED)}) "
            f"is expected, not {', '.join(sorted({Path(path).suffix for path in paths}))}",
        )
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


def _from_folder(path: str, field: str) -> dict[str, Rows]:
    try:
        loaded = _library().load_from_disk(path)
    except (FileNotFoundError, ValueError) as error:
        message = (
            f"{path} is no folder that save_to_disk wrote; "
            f"name plain files with a glob, for example {path}/*.jsonl"
        )
        raise InvalidConfig(f"{field}.path", message) from error
    return _by_name(loaded)


def _from_hub(name: str, field: str) -> dict[str, Rows]:
    try:
        return _by_name(_library().load_dataset(name))
    except FileNotFoundError as error:
        raise InvalidConfig(
            f"{field}.path",
            f"{name} is neither a file or folder on the env pods nor on the hub: {error}",
        ) from error
    except ConnectionError as error:
        raise RolloutFailed(
            f"{field}.path: {name} is no file or folder on the env pods, "
            f"and the hub does not answer: {error}"
        ) from error


def _by_name(loaded: hf.Dataset | hf.DatasetDict) -> dict[str, Rows]:
    if isinstance(loaded, dict):
        return {str(name): cast(Rows, split) for name, split in loaded.items()}
    return {str(loaded.split or FILES_SPLIT): cast(Rows, loaded)}
