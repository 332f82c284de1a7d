"""The manifest of a checkpoint: the only thing that makes a folder one. It is written last, and lists every other file."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from agenticrun_api.version import __version__
from agenticrun_workers.reporting.clock import rfc3339
from agenticrun_workers.storage import MODULE_RECORD, DamagedFile, FileEntry, Folder

MANIFEST = "manifest.json"
FORMAT = 2
"""Of the manifest, of the driver's state, and of how files lie in the folder."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is and consists of."""

    run_uid: str
    step: int
    time: str
    files: dict[str, FileEntry]
    """By name relative to the checkpoint's folder."""
    modules: dict[str, dict[str, Any]]
    """What each module's ranks say about it: architecture, parameters, hash of the shapes, ranks, version of torch, counters."""
    versions: dict[str, str]

    def to_bytes(self) -> bytes:
        document = {
            "format": FORMAT,
            "runUid": self.run_uid,
            "step": self.step,
            "time": self.time,
            "versions": self.versions,
            "modules": self.modules,
            "files": {name: entry.to_json() for name, entry in self.files.items()},
        }
        return json.dumps(document, indent=1).encode()


def publish(folder: Folder, run_uid: str, step: int, modules: Collection[str]) -> Manifest:
    """Write the manifest of what lies in the folder. Raises `DamagedFile` if that is not what the ranks have written."""
    records = {module: _record(folder / module) for module in modules}
    claimed = _claimed(records)
    sizes = folder.sizes()
    files = {
        name: claimed.get(name) or folder.checksum(name)
        for name in sorted(sizes.keys() | claimed.keys())
    }
    _check_sizes(folder, files, sizes)
    manifest = Manifest(
        run_uid=run_uid,
        step=step,
        time=rfc3339(time.time()),
        files=files,
        modules={
            module: {key: value for key, value in record.items() if key != "files"}
            for module, record in records.items()
        },
        versions={"agenticrun": __version__, "python": platform.python_version()},
    )
    folder.write(MANIFEST, manifest.to_bytes())
    return manifest


def read_manifest(folder: Folder) -> Manifest | None:
    """None if there is none. Raises `DamagedFile` for one that cannot be understood."""
    where = f"{folder}/{MANIFEST}"
    try:
        document = json.loads(folder.read(MANIFEST))
        if document["format"] != FORMAT:
            raise DamagedFile(
                where,
                f"is of format {document['format']}; this version of AgenticRun reads format {FORMAT}",
            )
        files = {name: FileEntry.from_json(entry) for name, entry in document["files"].items()}
        return Manifest(
            document["runUid"],
            int(document["step"]),
            document["time"],
            files,
            document["modules"],
            document["versions"],
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFile(where, f"cannot be read ({type(error).__name__}: {error})") from error


def check_sizes(folder: Folder, manifest: Manifest) -> None:
    """Raises `DamagedFile` naming the first file that is missing or of another size."""
    _check_sizes(folder, manifest.files, folder.sizes())


def _check_sizes(folder: Folder, files: dict[str, FileEntry], sizes: dict[str, int]) -> None:
    for name, entry in files.items():
        if name not in sizes:
            raise DamagedFile(f"{folder}/{name}", "is missing")
        if sizes[name] != entry.size:
            raise DamagedFile(
                f"{folder}/{name}", f"has {sizes[name]} bytes instead of {entry.size}"
            )


def check_driver_files(folder: Folder, manifest: Manifest) -> None:
    """Compare the checksums of what no module's ranks compare while they load. Raises `DamagedFile`."""
    records = {f"{module}/{MODULE_RECORD}" for module in manifest.modules} & manifest.files.keys()
    for name in sorted(records):
        _check(folder, name, manifest)
    claimed = _claimed({module: _record(folder / module) for module in manifest.modules})
    for name in sorted(manifest.files.keys() - records - claimed.keys()):
        _check(folder, name, manifest)


def _check(folder: Folder, name: str, manifest: Manifest) -> None:
    with folder.open_verified(name, manifest.files[name]):
        pass


def _record(folder: Folder) -> dict[str, Any]:
    """What a module's ranks have written about it; nothing if they do not."""
    try:
        record: dict[str, Any] = json.loads(folder.read(MODULE_RECORD))
    except FileNotFoundError:
        return {}
    return record


def _claimed(records: dict[str, dict[str, Any]]) -> dict[str, FileEntry]:
    """Files that modules have written and will check."""
    return {
        f"{module}/{name}": FileEntry.from_json(entry)
        for module, record in records.items()
        for name, entry in record.get("files", {}).items()
    }
