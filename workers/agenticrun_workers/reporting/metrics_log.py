"""Metrics of every step on disk: metrics.jsonl, and events for TensorBoard."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    """Takes the metrics of one step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """One JSON object per line: `{"step": 3, "time": 1700000000.0, "rollout/score/mean": 0.25, ...}`.

    Args:
        path: the file; appended to.
        resume_step: lines of later steps are removed, because they are computed again, and so is the validation of this one.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [
            line
            for line in _complete_lines(path)
            if not _computed_again(json.loads(line), resume_step)
        ]
        aside = path.with_suffix(".tmp")
        aside.write_text("".join(kept))
        aside.replace(path)
        self._file = path.open("a", buffering=1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(
            json.dumps({"step": step, "time": round(time.time(), 3), **metrics}) + "\n"
        )

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """Scalars for TensorBoard, written without torch or TensorFlow.

    Where an earlier attempt wrote, a restart marker hides its values of the steps that are computed again.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._event, self._summary = Event, Summary
        earlier = any(folder.iterdir())
        self._writer = EventFileWriter(str(folder))
        if earlier:
            marker = SessionLog(status=SessionLog.START)
            self._writer.add_event(
                Event(step=resume_step + 1, wall_time=time.time(), session_log=marker)
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()
        ]
        self._writer.add_event(
            self._event(step=step, wall_time=time.time(), summary=self._summary(value=values))
        )

    def close(self) -> None:
        self._writer.close()


def _computed_again(line: Mapping[str, float], resume_step: int) -> bool:
    validation = all(name.startswith("val/") for name in line if name not in ("step", "time"))
    return line["step"] > resume_step or (line["step"] == resume_step and validation)


def _complete_lines(path: Path) -> list[str]:
    """Lines that were written to their end; a driver that was killed may leave half a one."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]
