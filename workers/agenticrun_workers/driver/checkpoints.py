"""Checkpoints: all that a run needs to continue unchanged, on any fsspec file system.

A checkpoint is a folder `<base>/step-<N>`: the driver's state, and one folder per module
(actor_train, critic, reference) that the module's ranks write. The manifest lists every other file.
It is written last, in one piece, and makes the folder a checkpoint, because object stores have no
rename: a folder without a manifest is half-written and never loaded. The manifest holds the run's
uid, so that a run never loads the weights of another run of the same name.

Training stops only while the ranks copy their state. They write the copies while it continues, and
the driver publishes the checkpoint when the files of all ranks are durable.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import platform
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agenticrun_api import AgenticRun
from agenticrun_api.names import WORK_DIR
from agenticrun_api.spec import Checkpoint as Storage
from agenticrun_api.status import CheckpointStatus
from agenticrun_api.version import __version__
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.reporting.client import rfc3339
from agenticrun_workers.storage import (
    MODULE_RECORD,
    DamagedFile,
    FileEntry,
    Folder,
    UnusableStorage,
)
from agenticrun_workers.types import RolloutPosition

log = logging.getLogger(__name__)

STATE = "state.json"

IsDurable = Callable[[], Awaitable[bool]]
"""Returns True once the ranks of a module have written all files; raises the error of a write."""

SaveModule = Callable[[str], Awaitable[IsDurable]]
"""Makes the ranks of a module copy their shards, and start to write them into a folder.

Training may continue when it returns. The folder is a path or URI.
"""

LoadModule = Callable[[str], Awaitable[None]]
"""Makes the ranks of a module load a folder.

Raises `DamagedFile` for broken files and `InvalidConfig` for another model.
"""


@dataclass(frozen=True)
class DriverState:
    """The driver's part of a checkpoint."""

    step: int
    """Completed training steps; also the policy version."""
    next_group: int
    again: tuple[int, ...]
    """Groups that were started but not trained on."""
    best_success: float | None = None
    baselines: dict[str, float] = field(default_factory=dict)
    """Metrics measured once: val/<tag>/random_success, random_errors and warmup_success."""
    parts: dict[str, Any] = field(default_factory=dict)
    """State of other parts by name, as JSON values; see `at`."""

    @staticmethod
    def at(
        position: RolloutPosition,
        step: int,
        *,
        best_success: float | None = None,
        baselines: Mapping[str, float] = MappingProxyType({}),
        kl_coef: float | None = None,
        reward_moments: Mapping[str, Sequence[float]] = MappingProxyType({}),
        guards: Mapping[str, int] = MappingProxyType({}),
        schedule: Sequence[int] = (),
    ) -> DriverState:
        """Return the state at a position of rollout."""
        return DriverState(
            step,
            position.next_group,
            position.pending_groups,
            best_success,
            dict(baselines),
            {
                "kl_coef": kl_coef,
                "reward_moments": dict(reward_moments),
                "guards": dict(guards),
                "schedule": list(schedule),
                "requeued": position.requeued_groups,
            },
        )

    # Absent in checkpoints of earlier versions: all but `kl_coef` and `guards`.

    @property
    def position(self) -> RolloutPosition:
        """The position at which rollout continues."""
        requeued = tuple(self.parts.get("requeued", ()))
        return RolloutPosition(self.next_group, self.again, requeued)

    @property
    def kl_coef(self) -> float | None:
        """Coefficient of the KL penalty in the reward; None before the first step."""
        return self.parts.get("kl_coef")

    @property
    def reward_moments(self) -> Mapping[str, Sequence[float]]:
        """Moments of the scores so far, by tag."""
        kept: Mapping[str, Sequence[float]] = self.parts.get("reward_moments", {})
        return kept

    @property
    def guards(self) -> Mapping[str, int]:
        """The state of the guards."""
        kept: Mapping[str, int] = self.parts.get("guards", {})
        return kept

    @property
    def schedule(self) -> list[int]:
        """The numbers that decide when learning-rate schedules end; empty if unknown."""
        kept: list[int] = self.parts.get("schedule", [])
        return kept

    def to_bytes(self) -> bytes:
        """Return JSON.

        Raises:
            TypeError: a part is not a JSON value.
        """
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()

    @staticmethod
    def from_bytes(data: bytes) -> DriverState:
        """Parse the result of `to_bytes`.

        Raises:
            ValueError, KeyError, TypeError: these bytes are something else.
        """
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

    @property
    def status(self) -> CheckpointStatus:
        """The checkpoint in a progress snapshot."""
        return CheckpointStatus(step=self.step, uri=self.folder, time=self.time)

    def module_folder(self, module: str) -> str:
        return f"{self.folder}/{module}"

    def driver_state(self) -> DriverState:
        """Read the driver's state.

        Raises:
            DamagedFile: it cannot be read.
        """
        try:
            return DriverState.from_bytes(Folder(self.folder).read(STATE))
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise DamagedFile(
                f"{self.folder}/{STATE}", f"cannot be read ({type(error).__name__}: {error})"
            ) from error


NO_SPACE = os.strerror(errno.ENOSPC)
FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.05, 1.0
"""Time between two questions to all ranks if their writes have ended; it doubles each time."""


class CheckpointNotSaved(Exception):
    """A checkpoint cannot be written. Earlier ones are intact."""

    def __init__(self, uri: str, step: int, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        # The free space of the nearest folder that exists: the checkpoint's own may not.
        places = () if "://" in uri else (Path(uri), *Path(uri).parents)
        path = next((path for path in places if path.is_dir()), None)
        free = "" if path is None else f" ({shutil.disk_usage(path).free / 2**20:,.0f} MiB free)"
        super().__init__(
            f"the checkpoint of step {step} cannot be written to {uri}: {reason}{free}. Make room "
            "or correct the place, then resume: earlier checkpoints are intact"
        )


class CheckpointStore:
    """The checkpoints of one run in the folder `base`. One attempt at a time writes there.

    Args:
        base: a path or URI.
        run_uid: written into every manifest.
        keep: number of complete checkpoints to keep.

    Raises:
        InvalidConfig: there is no fsspec driver for this URI.
    """

    def __init__(self, base: str | os.PathLike[str], run_uid: str, keep: int) -> None:
        self._base = _folder(base, "spec.checkpoint.uri")
        self._run_uid = run_uid
        self._keep = keep
        self._current: Checkpoint | None = None
        """The checkpoint that this attempt saved or restored last."""

    async def save(
        self, state: DriverState, modules: Mapping[str, SaveModule]
    ) -> Coroutine[Any, Any, Checkpoint]:
        """Let the ranks copy their state, and start to write and publish a checkpoint of it.

        Checkpoints older than the newest `keep`, half-written ones, and those of later steps are
        deleted then. Later steps are left from an earlier attempt; this attempt resumed before
        them. Nothing is written if the checkpoint saved or restored last is of this step.

        Returns:
            what publishes the checkpoint once the ranks have written it. Training may continue; the
            next `save` must wait for it.

        Raises:
            CheckpointNotSaved: there is no space. The coroutine raises it, too.
        """
        current = self._current
        if (
            # A stop request right after a periodic save must not write the same state again.
            current is not None
            and current.step == state.step
            and await asyncio.to_thread(self._complete, Folder(current.folder)) is not None
        ):
            return _at_once(current)
        folder = self._base / _name(state.step)
        # As bytes: the loop changes its values while the ranks write.
        driver_state = state.to_bytes()
        with _not_saved(folder, state.step):
            # Leftovers of an attempt that was killed would be taken for files of this checkpoint.
            await asyncio.to_thread(_delete, folder)
            writes = await asyncio.gather(
                *(save(str(folder / name)) for name, save in modules.items())
            )
        return self._publish(folder, state.step, driver_state, list(modules), writes)

    async def _publish(
        self,
        folder: Folder,
        step: int,
        driver_state: bytes,
        modules: Collection[str],
        writes: Sequence[IsDurable],
    ) -> Checkpoint:
        def finish() -> Checkpoint:
            # The manifest last: only with it do readers accept the folder.
            folder.write(STATE, driver_state)
            manifest = publish(folder, self._run_uid, step, modules)
            # After the new one is published: a crash in between leaves one too many, never none.
            self._delete_old(step)
            return Checkpoint(folder.uri, step, manifest.time)

        with _not_saved(folder, step):
            pause = FIRST_POLL_SECONDS
            while not all(await asyncio.gather(*(is_durable() for is_durable in writes))):
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL_SECONDS)
            # In a thread: object storage may take seconds, in which the event loop must not stand
            # still.
            self._current = await asyncio.to_thread(finish)
        return self._current

    async def restore(
        self, resume: str, modules: Mapping[str, LoadModule], *, restarted: bool = False
    ) -> tuple[Checkpoint, DriverState] | None:
        """Load the checkpoint to resume from.

        Args:
            resume: the value of `spec.checkpoint.resume`: `Auto`, `Never`, `FromPreviousRun`, or
                the folder of a checkpoint. Damaged checkpoints are skipped and logged, except a
                named one.
            modules: loads each module.
            restarted: True for a later attempt of the run. It resumes from the run's own newest
                checkpoint, however the first attempt started; if there is none yet, like the first.

        Returns:
            the checkpoint and the driver's state; None for a fresh start.

        Raises:
            InvalidConfig: the base is not writable; what `resume` names does not exist; or the
                named checkpoint, or every one in question, is damaged or of another model.
        """
        try:
            await asyncio.to_thread(self._base.require_writable)
        except UnusableStorage as error:
            raise InvalidConfig("spec.checkpoint.uri", str(error)) from error
        # A restarted run looks for its own checkpoints first: they are newer than the one it began
        # from.
        for source in dict.fromkeys(("Auto", resume) if restarted else (resume,)):
            folders = await asyncio.to_thread(self._candidates, source)
            found = await self._load_first(folders, modules, any_run=source != "Auto")
            if found is not None:
                return found
            if source in ("Auto", "Never"):
                continue
            problem = f"{source} holds no complete checkpoint (no {MANIFEST})"
            if source == "FromPreviousRun":
                problem = (
                    "no earlier run of this name has a complete checkpoint in "
                    f"{self._base.parent}: set Auto to start at step 0"
                )
            raise InvalidConfig("spec.checkpoint.resume", problem)
        return None

    def _candidates(self, source: str) -> list[Folder]:
        """Return the folders that may hold the checkpoint to resume from, the best one first."""
        match source:
            case "Auto":
                return self._steps()
            case "Never":
                return []
            case "FromPreviousRun":
                own = _RUN_FOLDER.fullmatch(self._base.name)
                if own is None:
                    return []
                found = []
                for name in self._base.parent.folders():
                    other = _RUN_FOLDER.fullmatch(name)
                    if other is None or other["run"] != own["run"] or name == self._base.name:
                        continue
                    for folder in steps_in(self._base.parent / name):
                        try:
                            manifest = read_manifest(folder)
                        except DamagedFile:
                            found.append(("", 0, folder))  # loading it reports what is wrong
                        else:
                            found += [(manifest.time, manifest.step, folder)] if manifest else []
                # Time decides and not the step, because a run that started over has lower steps.
                found.sort(key=lambda item: item[:2], reverse=True)
                return [folder for *_, folder in found]
        return [_folder(source, "spec.checkpoint.resume")]

    async def _load_first(
        self, folders: Sequence[Folder], modules: Mapping[str, LoadModule], *, any_run: bool
    ) -> tuple[Checkpoint, DriverState] | None:
        """Load the first folder that holds an undamaged checkpoint; None if none holds one.

        Raises:
            InvalidConfig: there are only damaged ones.
        """
        damage: list[DamagedFile] = []
        for folder in folders:
            try:
                found = await asyncio.to_thread(self._look, folder, any_run=any_run)
                if found is None:
                    continue
                checkpoint, state = found
                await asyncio.gather(
                    *(load(checkpoint.module_folder(name)) for name, load in modules.items())
                )
            except DamagedFile as error:
                # The text of the copy that Ray raises is a traceback.
                damage.append(getattr(error, "cause", error))
                log.warning("the checkpoint %s is damaged: %s", folder, damage[-1])
                continue
            log.info(
                "resuming from %s (step %d)%s",
                folder,
                state.step,
                ", the newest that is not damaged" if damage else "",
            )
            # Only a checkpoint in our own folder makes a save of the same step superfluous.
            self._current = (
                checkpoint if folder.uri == (self._base / _name(state.step)).uri else None
            )
            return checkpoint, state
        if damage:
            advice = "restore that file, name another checkpoint, or set Never to start over"
            raise InvalidConfig(
                "spec.checkpoint.resume", f"no checkpoint is undamaged: {damage[0]}; {advice}"
            )
        return None

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint of this run; file sizes are checked."""
        return next(
            (
                _checkpoint(folder, manifest)
                for folder in self._steps()
                if (manifest := self._complete(folder))
            ),
            None,
        )

    def _look(self, folder: Folder, *, any_run: bool) -> tuple[Checkpoint, DriverState] | None:
        """Check a folder and read the driver's state from it.

        Returns:
            None for a folder that is not published or belongs to another run.

        Raises:
            DamagedFile: a file has a wrong size, or a file of the driver is damaged.
        """
        manifest = read_manifest(folder)
        if manifest is None or not (any_run or manifest.run_uid == self._run_uid):
            return None
        check_sizes(folder, manifest)
        check_driver_files(folder, manifest)
        checkpoint = _checkpoint(folder, manifest)
        return checkpoint, checkpoint.driver_state()

    def _steps(self) -> list[Folder]:
        """Return the folders of steps, newest first; some may be half-written."""
        return steps_in(self._base)

    def _complete(self, folder: Folder) -> Manifest | None:
        """Return the manifest of a complete checkpoint of this run, else None."""
        try:
            manifest = read_manifest(folder)
            if manifest is None or manifest.run_uid != self._run_uid:
                return None
            check_sizes(folder, manifest)
        except DamagedFile as error:
            log.warning("the checkpoint %s is damaged: %s", folder, error)
            return None
        return manifest

    def _delete_old(self, step: int) -> None:
        """Keep the newest complete checkpoints up to `step`, and all of other runs."""
        kept = 0
        for folder in self._steps():
            try:
                manifest = read_manifest(folder)
            except DamagedFile:
                # A damaged one is kept: a user may still repair it, and it does not count.
                continue
            # A folder may be shared with another run by mistake: what is not ours stays.
            if manifest is not None and manifest.run_uid != self._run_uid:
                continue
            # Later steps would win at the next resume, although this attempt went back before them.
            if manifest is None or manifest.step > step or kept >= self._keep:
                _delete(folder)
            elif self._complete(folder):
                kept += 1


def folder_of(uri: str, name: str, uid: str) -> str:
    """Return the folder of a run's checkpoints in `spec.checkpoint.uri`.

    Raises:
        InvalidConfig: there is no fsspec driver for this URI.
    """
    return str(_folder(uri, "spec.checkpoint.uri") / f"{name}-{uid[:8] or 'local'}")


def cluster_folders(run: AgenticRun) -> tuple[Path, str]:
    """Return the output folder on the head pod, and the folder or URI of the checkpoints.

    The second one is where a run with object storage keeps its output for good. For other runs both
    are the same folder.

    Args:
        run: as it is mounted in the head pod, or as the apiserver serves it. Only the first one
            names the claim that the operator gives to a run without `spec.checkpoint`; the status
            of the second one does.

    Raises:
        InvalidConfig: there is no fsspec driver for the URI.
    """
    storage, name = run.spec.storage, run.metadata.name
    # The operator fills in the claim only in the mounted copy; the apiserver's has it in the
    # status.
    if storage is None and run.status.volume_claim:
        storage = Storage()
    base = folder_of(storage.uri if storage else WORK_DIR, name, run.metadata.uid)
    return Folder(base).local_path or Path(WORK_DIR) / name, base


_RUN_FOLDER = re.compile(r"(?P<run>.+)-[0-9a-f]{8}")
"""The name of a run's folder on a cluster, see `folder_of`."""


def steps_in(base: Folder) -> list[Folder]:
    """Return the folders `step-<N>` in a folder, the newest first; some may be half-written."""
    names = [name for name in base.folders() if name.startswith("step-") and name[5:].isdigit()]
    return [base / name for name in sorted(names, key=lambda name: int(name[5:]), reverse=True)]


def _folder(uri: str | os.PathLike[str], path: str) -> Folder:
    try:
        return Folder(uri)
    except UnusableStorage as error:
        raise InvalidConfig(path, str(error)) from error


def _name(step: int) -> str:
    return f"step-{step}"


@contextmanager
def _not_saved(folder: Folder, step: int) -> Iterator[None]:
    """Turn an error of a full disk into `CheckpointNotSaved`."""
    try:
        yield
    except Exception as error:  # writers in Rust and C++ raise errors of their own
        if not isinstance(error, OSError) and NO_SPACE not in str(error):
            raise
        raise CheckpointNotSaved(folder.uri, step, error) from error


async def _at_once(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint


def _checkpoint(folder: Folder, manifest: Manifest) -> Checkpoint:
    return Checkpoint(folder.uri, manifest.step, manifest.time)


def _delete(folder: Folder) -> None:
    """Delete a checkpoint, its manifest first, so that a partial deletion leaves none."""
    if folder.exists(MANIFEST):
        folder.remove(MANIFEST)
    folder.delete()


MANIFEST = "manifest.json"
FORMAT = 2
"""Version of the manifest, the driver's state, and the layout of the folder."""


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint: run, step, modules and files."""

    run_uid: str
    step: int
    time: str
    files: dict[str, FileEntry]
    """By name relative to the checkpoint's folder."""
    modules: dict[str, dict[str, Any]]
    """By module: architecture, parameters, hash of shapes, ranks, torch version, counters."""
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
    """Write the manifest of a folder.

    Raises:
        DamagedFile: the files differ from what the ranks recorded.
    """
    records = {module: _record(folder / module) for module in modules}
    claimed = _claimed(records)
    # Listed once: in object storage each look at a single file is a request.
    sizes = folder.sizes()
    files = {
        # The ranks computed these checksums while writing; reading the files again would take long.
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
    """Read the manifest of a folder; None if it has none.

    Raises:
        DamagedFile: the manifest cannot be parsed, or has another format version.
    """
    where = f"{folder}/{MANIFEST}"
    try:
        document = json.loads(folder.read(MANIFEST))
        # Checked first, because another format may have other fields.
        if document["format"] != FORMAT:
            raise DamagedFile(
                where,
                f"has format {document['format']}; this version of AgenticRun reads {FORMAT}",
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
    """Compare the sizes of all files with the manifest.

    Raises:
        DamagedFile: names the first file that is missing or of another size.
    """
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
    """Compare the checksums of all files that no rank checks while it loads.

    Raises:
        DamagedFile: a checksum differs.
    """
    records = {f"{module}/{MODULE_RECORD}" for module in manifest.modules} & manifest.files.keys()
    for name in sorted(records):
        # First the records, because they say which files the ranks check themselves.
        _check(folder, name, manifest)
    claimed = _claimed({module: _record(folder / module) for module in manifest.modules})
    for name in sorted(manifest.files.keys() - records - claimed.keys()):
        _check(folder, name, manifest)


def _check(folder: Folder, name: str, manifest: Manifest) -> None:
    with folder.open_verified(name, manifest.files[name]):
        pass


def _record(folder: Folder) -> dict[str, Any]:
    """Read the record that the ranks of a module wrote; empty if there is none."""
    try:
        record: dict[str, Any] = json.loads(folder.read(MODULE_RECORD))
    except FileNotFoundError:
        return {}
    return record


def _claimed(records: dict[str, dict[str, Any]]) -> dict[str, FileEntry]:
    """Return the files that ranks wrote and check while they load."""
    return {
        f"{module}/{name}": FileEntry.from_json(entry)
        for module, record in records.items()
        for name, entry in record.get("files", {}).items()
    }
