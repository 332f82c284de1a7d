"""Splits of data sets, read from files, folders of Hugging Face datasets, or the hub.

Local paths use no network.
"""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

import datasets as hf

from agenticrun_api.environments import DatasetSpec
from agenticrun_workers.errors import InvalidConfig, RolloutFailed

hf.disable_progress_bars()

READERS = {
    ".jsonl": hf.Dataset.from_json,
    ".json": hf.Dataset.from_json,
    ".csv": hf.Dataset.from_csv,
    ".parquet": hf.Dataset.from_parquet,
}
"""Readers by file suffix. `hf.load_dataset` reads them too, but reports each use to a server."""

FILES_SPLIT = "train"
"""Split name of plain files."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def read_splits(spec: DatasetSpec, field: str) -> dict[str, hf.Dataset]:
    """Return the splits by name.

    Args:
        spec: path or hub name.
        field: path of the spec, for messages.

    Raises:
        InvalidConfig: the data do not exist or cannot be read.
        RolloutFailed: the hub cannot be reached.
    """
    found = _find(spec.path)
    if not found and _HUB_NAME.fullmatch(spec.path) and Path(spec.path).suffix not in READERS:
        return _from_hub(spec.path, field)
    if not found:
        raise InvalidConfig(
            f"{field}.path", f"no file or folder {spec.path} can be read on the env pods"
        )
    if len(found) == 1 and Path(found[0]).is_dir():
        return _from_folder(found[0], field)
    return {FILES_SPLIT: _from_files(found, field)}


def _find(path: str) -> list[str]:
    """Return the matches of a path or glob, relative to here or to PYTHONPATH (`spec.code`)."""
    folders = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    matches = (sorted(glob.glob(os.path.join(folder, path))) for folder in folders)
    return next(filter(None, matches), [])


def _from_files(paths: list[str], field: str) -> hf.Dataset:
    suffixes = {Path(path).suffix for path in paths}
    if len(suffixes) != 1 or not suffixes <= READERS.keys():
        raise InvalidConfig(
            f"{field}.path",
            f"one kind of {', '.join(READERS)} is expected, "
            f"not {', '.join(sorted(suffixes)) or 'none'}",
        )
    filled = [path for path in paths if Path(path).stat().st_size]
    if not filled:
        raise InvalidConfig(f"{field}.path", f"{paths[0]} is empty")
    try:
        return READERS[suffixes.pop()](filled)
    except (hf.exceptions.DatasetGenerationError, ValueError) as error:
        raise InvalidConfig(
            f"{field}.path", f"{', '.join(filled)} cannot be read: {error.__cause__ or error}"
        ) from error


def _from_folder(path: str, field: str) -> dict[str, hf.Dataset]:
    try:
        loaded = hf.load_from_disk(path)
    except (FileNotFoundError, ValueError) as error:
        message = (
            f"{path} is no folder that save_to_disk wrote; "
            f"name plain files with a glob, for example {path}/*.jsonl"
        )
        raise InvalidConfig(f"{field}.path", message) from error
    return _by_name(loaded)


def _from_hub(name: str, field: str) -> dict[str, hf.Dataset]:
    try:
        return _by_name(hf.load_dataset(name))
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


def _by_name(loaded: hf.Dataset | hf.DatasetDict) -> dict[str, hf.Dataset]:
    if isinstance(loaded, hf.DatasetDict):
        return {str(name): split for name, split in loaded.items()}
    return {str(loaded.split or FILES_SPLIT): loaded}
