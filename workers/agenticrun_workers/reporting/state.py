"""What the reporter remembers, in a file, so that a restarted sidecar still knows it."""

from __future__ import annotations

import os
from pathlib import Path

from agenticrun_api import Commands, Progress
from agenticrun_api.base import Model


class ReporterState(Model):
    """The newest snapshot of the newest attempt, and what has been asked of that attempt."""

    progress: Progress | None = None
    commands: Commands = Commands()

    def with_progress(self, progress: Progress) -> ReporterState:
        """Take a snapshot. One of an older attempt or an older sequence changes nothing; a new attempt clears the stop command."""
        held = self.progress
        if held is None or held.submission_id == progress.submission_id:
            if held is not None and progress.sequence < held.sequence:
                return self
            return self.model_copy(update={"progress": progress})
        if held.run_uid == progress.run_uid and progress.attempt < held.attempt:
            return self
        commands = self.commands.model_copy(update={"stop": False})
        return ReporterState(progress=progress, commands=commands)

    def asked_to_stop(self) -> ReporterState:
        return self.model_copy(update={"commands": self.commands.model_copy(update={"stop": True})})

    def asked_for_checkpoint(self) -> ReporterState:
        count = self.commands.checkpoint + 1
        return self.model_copy(
            update={"commands": self.commands.model_copy(update={"checkpoint": count})}
        )


class StateFile:
    """Reads and writes a `ReporterState` atomically."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> ReporterState:
        """The stored state; a fresh one if there is none or it is of another release."""
        try:
            return ReporterState.model_validate_json(self._path.read_bytes())
        except (FileNotFoundError, ValueError):
            return ReporterState()

    def write(self, state: ReporterState) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        aside = self._path.with_suffix(".tmp")
        with aside.open("w") as file:
            file.write(state.model_dump_json(by_alias=True, exclude_none=True))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._path)
