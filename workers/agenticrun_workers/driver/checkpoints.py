"""Checkpoints: all that a run needs to go on as if nothing had happened, on any fsspec file system.

A checkpoint is a folder `<base>/step-<N>`: the driver's state, and one folder per module (actor_train,
critic, reference) that the module's ranks write. The manifest lists every other file. It is written
last, in one piece, and makes the folder a checkpoint, because object stores have no rename: a folder
without one is half-written and never loaded. The manifest holds the run's uid, so that a run never
loads the weights of another run of the same name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from agenticrun_api.version import __version__
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.reporting.clock import rfc3339
from agenticrun_workers.storage import (
    MODULE_RECORD,
    DamagedFile,
    FileEntry,
    Folder,
    UnusableStorage,
)

log = logging.getLogger(__name__)

STATE = "state.json"

SaveModule = Callable[[str], Awaitable[None]]
"""Has a module's ranks write their parts into this folder (a path or URI); all is durable when it returns."""

LoadModule = Callable[[str], Awaitable[None]]
"""Has a module's ranks go on from this folder. Raises `DamagedFile` for broken files, `InvalidConfig` for another model."""


@dataclass(frozen=True)
class DriverState:
    """The driver's part of a checkpoint."""

    step: int
    """Completed training steps; also the policy version."""
    next_group: int
    again: tuple[int, ...]
    """Groups that were begun and not trained on."""
    best_success: float | None = None
    baselines: dict[str, float] = field(default_factory=dict)
    """Metrics that are measured once: val/<tag>/random_success, val/<tag>/warmup_success."""
    parts: dict[str, Any] = field(default_factory=dict)
    """What the loop's other parts keep, each under its name: the KL controller, guards, trackers, ... as JSON values."""

    def to_bytes(self) -> bytes:
        """JSON. Raises TypeError for a part that is none."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()

    @staticmethod
    def from_bytes(data: bytes) -> DriverState:
        """Raises ValueError, KeyError or TypeError for anything else."""
        state: dict[str, Any] = json.loads(data)
        if (found := state.pop("format")) != FORMAT:
            raise ValueError(f"format {found} instead of {FORMAT}")
        return DriverState(**{**state, "again": tuple(state["again"])})


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint."""

    folder: str
    step: int
    time: str

    def module_folder(self, module: str) -> str:
        return f"{self.folder}/{module}"

    def driver_state(self) -> DriverState:
        """Raises `DamagedFile`."""
        try:
            return DriverState.from_bytes(Folder(self.folder).read(STATE))
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise DamagedFile(
                f"{self.folder}/{STATE}", f"cannot be read ({type(error).__name__}: {error})"
            ) from error


class CheckpointStore:
    """The checkpoints of one run below `base`. One attempt at a time writes there.

    Args:
        base: a path or URI.
        run_uid: goes into every manifest.
        keep: how many complete ones are kept.

    Raises:
        InvalidConfig: no driver for this URI.
    """

    def __init__(self, base: str | os.PathLike[str], run_uid: str, keep: int) -> None:
        self._base = _folder(base, "spec.checkpoint.uri")
        self._run_uid = run_uid
        self._keep = keep
        self._current: Checkpoint | None = None
        """What this attempt has saved or restored last."""

    async def save(self, state: DriverState, modules: Mapping[str, SaveModule]) -> Checkpoint:
        """Write and publish a checkpoint; then delete what is older than the newest `keep`, half-written, or ahead of this step.

        What lies ahead comes from an attempt that was given up: this one went on from before. The checkpoint that was saved or
        restored last is left alone if it is of this step: it holds the same.
        """
        if (
            self._current is not None
            and self._current.step == state.step
            and await asyncio.to_thread(self._intact, self._current.folder)
        ):
            return self._current
        folder = self._base / _name(state.step)
        await asyncio.to_thread(_delete, folder)
        await asyncio.gather(*(save(str(folder / name)) for name, save in modules.items()))

        def finish() -> Checkpoint:
            folder.write(STATE, state.to_bytes())
            manifest = publish(folder, self._run_uid, state.step, modules)
            self._delete_old(state.step)
            return Checkpoint(folder.uri, state.step, manifest.time)

        self._current = await asyncio.to_thread(finish)
        return self._current

    async def restore(
        self, resume: str, modules: Mapping[str, LoadModule]
    ) -> tuple[Checkpoint, DriverState] | None:
        """Load what `spec.checkpoint.resume` says to go on from: `Auto`, `Never`, or a checkpoint's folder. None: begin anew.

        `Auto` passes over a damaged checkpoint to the newest undamaged one before it, and logs that.

        Raises:
            InvalidConfig: the base cannot be written; the named checkpoint, or every one of this run, is damaged or of another model.
        """
        await asyncio.to_thread(self._require_writable)
        if resume == "Never":
            return None
        folders = (
            await asyncio.to_thread(self._steps)
            if resume == "Auto"
            else [_folder(resume, "spec.checkpoint.resume")]
        )
        damage: list[DamagedFile] = []
        for folder in folders:
            try:
                found = await asyncio.to_thread(self._look, folder, any_run=resume != "Auto")
                if found is None:
                    continue
                checkpoint, state = found
                await asyncio.gather(
                    *(load(checkpoint.module_folder(name)) for name, load in modules.items())
                )
            except DamagedFile as error:
                damage.append(
                    getattr(error, "cause", error)
                )  # Ray raises a copy whose text is a traceback
                log.warning("the checkpoint %s is damaged: %s", folder, damage[-1])
                continue
            log.info(
                "going on from %s (step %d)%s",
                folder,
                state.step,
                ", the newest that is not damaged" if damage else "",
            )
            self._current = (
                checkpoint if folder.uri == (self._base / _name(state.step)).uri else None
            )
            return checkpoint, state
        if damage:
            advice = "restore that file, name another checkpoint, or set Never to begin anew"
            raise InvalidConfig(
                "spec.checkpoint.resume", f"no checkpoint is whole: {damage[0]}; {advice}"
            )
        if resume != "Auto":
            raise InvalidConfig(
                "spec.checkpoint.resume", f"{resume} holds no complete checkpoint (no {MANIFEST})"
            )
        return None

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint of this run whose files have their sizes."""
        return next(
            (
                _checkpoint(folder, manifest)
                for folder in self._steps()
                if (manifest := self._complete(folder))
            ),
            None,
        )

    def _look(self, folder: Folder, *, any_run: bool) -> tuple[Checkpoint, DriverState] | None:
        """A checkpoint whose sizes, and the driver's files, are right. None: not published, or another run's. Raises `DamagedFile`."""
        manifest = read_manifest(folder)
        if manifest is None or not (any_run or manifest.run_uid == self._run_uid):
            return None
        check_sizes(folder, manifest)
        check_driver_files(folder, manifest)
        checkpoint = _checkpoint(folder, manifest)
        return checkpoint, checkpoint.driver_state()

    def _require_writable(self) -> None:
        try:
            self._base.require_writable()
        except UnusableStorage as error:
            raise InvalidConfig("spec.checkpoint.uri", str(error)) from error

    def _steps(self) -> list[Folder]:
        """Folders of steps, the highest first; not all need be checkpoints."""
        names = [
            name for name in self._base.folders() if name.startswith("step-") and name[5:].isdigit()
        ]
        return [
            self._base / name
            for name in sorted(names, key=lambda name: int(name[5:]), reverse=True)
        ]

    def _complete(self, folder: Folder) -> Manifest | None:
        """The manifest of this run's checkpoint in a folder, if it is published and its files have their sizes."""
        try:
            manifest = read_manifest(folder)
            if manifest is None or manifest.run_uid != self._run_uid:
                return None
            check_sizes(folder, manifest)
        except DamagedFile as error:
            log.warning("the checkpoint %s is damaged: %s", folder, error)
            return None
        return manifest

    def _intact(self, folder: str) -> bool:
        return self._complete(Folder(folder)) is not None

    def _delete_old(self, step: int) -> None:
        """Keep the newest complete ones of this run up to `step`, and what belongs to other runs."""
        kept = 0
        for folder in self._steps():
            try:
                manifest = read_manifest(folder)
            except DamagedFile:
                continue
            if manifest is not None and manifest.run_uid != self._run_uid:
                continue
            if manifest is None or manifest.step > step or kept >= self._keep:
                _delete(folder)
            elif self._complete(folder):
                kept += 1


def folder_of(uri: str, name: str, uid: str) -> str:
    """Where a run keeps its checkpoints below `spec.checkpoint.uri`. Raises `InvalidConfig` if there is no driver for that."""
    return str(_folder(uri, "spec.checkpoint.uri") / f"{name}-{uid[:8] or 'local'}")


def _folder(uri: str | os.PathLike[str], path: str) -> Folder:
    try:
        return Folder(uri)
    except UnusableStorage as error:
        raise InvalidConfig(path, str(error)) from error


def _name(step: int) -> str:
    return f"step-{step}"


def _checkpoint(folder: Folder, manifest: Manifest) -> Checkpoint:
    return Checkpoint(folder.uri, manifest.step, manifest.time)


def _delete(folder: Folder) -> None:
    """From here on it is no checkpoint, however far the deletion comes."""
    if folder.exists(MANIFEST):
        folder.remove(MANIFEST)
    folder.delete()


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
