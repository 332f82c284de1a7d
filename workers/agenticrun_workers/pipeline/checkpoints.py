"""Checkpoints: everything needed to go on as if nothing had happened.

A checkpoint is a folder `<base>/step-<N>`. Trainer ranks and the driver write into it, and at last a manifest is moved into
place: that one rename publishes it. A folder without a readable manifest is half-written and never picked. The manifest
carries the run's uid, so that a run of the same name does not take another run's weights.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agenticrun_workers.reporting.clock import rfc3339
from agenticrun_workers.rollout.errors import InvalidConfig

MANIFEST = "manifest.json"
STATE = "state.json"
TRAINER = "trainer"
FORMAT = 1


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


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    step: int
    time: str

    @property
    def trainer_folder(self) -> Path:
        return self.folder / TRAINER

    def driver_state(self) -> DriverState:
        """Raises `InvalidConfig` if it was written by something else."""
        try:
            state: dict[str, Any] = json.loads((self.folder / STATE).read_text())
            return DriverState(**{**state, "again": tuple(state["again"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidConfig("spec.checkpoint.resume", f"{self.folder / STATE} cannot be read: {error}") from error


class CheckpointStore:
    """The checkpoints of one run below `base`.

    Args:
        keep: how many complete ones are kept.
        run_uid: goes into every manifest.
    """

    def __init__(self, base: Path, run_uid: str, keep: int) -> None:
        self._base = base
        self._run_uid = run_uid
        self._keep = keep

    async def save(self, state: DriverState, save_trainer: Callable[[Path], Awaitable[None]]) -> Checkpoint:
        """Write and publish a checkpoint, then delete what is older than the newest `keep`.

        `save_trainer` writes the ranks' parts into the folder that it is given. A complete checkpoint of this step is
        left alone: it holds the same.
        """
        folder = self._base / f"step-{state.step}"
        if (found := read(folder)) is not None and found[1] == self._run_uid:
            return found[0]
        shutil.rmtree(folder, ignore_errors=True)
        (folder / TRAINER).mkdir(parents=True)
        await save_trainer(folder / TRAINER)
        (folder / STATE).write_text(json.dumps(asdict(state), indent=1))
        manifest = {
            "format": FORMAT,
            "runUid": self._run_uid,
            "step": state.step,
            "time": rfc3339(time.time()),
            "files": {str(file.relative_to(folder)): file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()},
        }
        _publish(folder / MANIFEST, json.dumps(manifest, indent=1))
        self._delete_old()
        return Checkpoint(folder, state.step, str(manifest["time"]))

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint of this run."""
        return max(self._complete(), key=lambda checkpoint: checkpoint.step, default=None)

    def resolve(self, resume: str) -> Checkpoint | None:
        """What `spec.checkpoint.resume` says to go on from: `Auto`, `Never`, or a folder. Raises `InvalidConfig`."""
        if resume == "Never":
            return None
        if resume == "Auto":
            return self.newest()
        found = read(Path(resume))
        if found is None:
            raise InvalidConfig("spec.checkpoint.resume", f"{resume} holds no complete checkpoint (no readable {MANIFEST})")
        return found[0]

    def _complete(self) -> list[Checkpoint]:
        found = [read(folder) for folder in self._base.glob("step-*")]
        return [checkpoint for checkpoint, uid in filter(None, found) if uid == self._run_uid]

    def _delete_old(self) -> None:
        """Keep the newest complete ones of this run. What a dying attempt left half-written goes too: no other attempt writes."""
        complete = sorted(self._complete(), key=lambda checkpoint: checkpoint.step)
        for checkpoint in complete[: -self._keep]:
            (checkpoint.folder / MANIFEST).unlink()
            shutil.rmtree(checkpoint.folder)
        for folder in self._base.glob("step-*"):
            if not (folder / MANIFEST).exists():
                shutil.rmtree(folder)


def read(folder: Path) -> tuple[Checkpoint, str] | None:
    """The checkpoint in a folder and the uid of its run; None if it is not complete."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
        if manifest["format"] != FORMAT or sizes != manifest["files"]:
            return None
        return Checkpoint(folder, int(manifest["step"]), str(manifest["time"])), str(manifest["runUid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def folder_of(uri: str, name: str, uid: str) -> Path:
    """Where a run keeps its checkpoints below `spec.checkpoint.uri`. Raises `InvalidConfig` for what is no local folder."""
    path = re.sub(r"^file://", "", uri)
    if "://" in path:
        raise InvalidConfig("spec.checkpoint.uri", f"{uri}: only folders are supported, for example /checkpoints")
    return Path(path) / f"{name}-{uid[:8] or 'local'}"


def _publish(path: Path, text: str) -> None:
    """Move a file into place when all of it and all before it is on the disk."""
    aside = path.with_suffix(".tmp")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
