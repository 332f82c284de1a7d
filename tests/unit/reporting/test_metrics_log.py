"""metrics.jsonl and TensorBoard over resumes and crashes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.event_file_writer import AtomicCounter

from agenticrun_workers.reporting.trackers import JsonlTracker, TensorBoardTracker


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_resume_removes_what_is_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "out" / "metrics.jsonl"
    first = JsonlTracker(path, resume_step=0)
    for step in range(1, 6):
        first.log(step, {"rollout/score/mean": step / 10})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 6, "roll')  # the driver was killed while it wrote
    second = JsonlTracker(path, resume_step=3)
    second.log(4, {"rollout/score/mean": 0.4})
    second.close()
    assert steps(path) == [1, 2, 3, 4]


def test_numbers_that_json_does_not_have_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = JsonlTracker(path, resume_step=0)
    norms = {"actor/grad_norm": math.inf, "val/A/score": -math.inf, "actor/entropy": math.nan}
    log.log(1, {**norms, "actor/skipped_steps": 1.0})
    log.close()

    def refuse(word: str) -> float:
        raise AssertionError(word)

    (line,) = path.read_text().splitlines()
    read = json.loads(line, parse_constant=refuse)
    assert read == {"step": 1, "time": read["time"], "actor/skipped_steps": 1.0}


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    first = TensorBoardTracker(tmp_path, resume_step=0)
    for step in (1, 2, 3):
        first.log(step, {"actor/entropy": float(step)})
    first.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/entropy")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
    ]


def test_a_resume_keeps_the_step_of_its_checkpoint_and_validates_it_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlTracker(path, resume_step=0)
    first.log(2, {"rollout/score/mean": 0.2, "val/Lake/success": 0.1})
    first.log(2, {"val/Lake/success": 0.2})
    first.close()
    JsonlTracker(path, resume_step=2).close()
    assert [json.loads(line)["val/Lake/success"] for line in path.read_text().splitlines()] == [0.1]


def test_tensorboard_hides_what_an_earlier_attempt_wrote_and_this_one_computes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files of one second and process are read in the order of their numbers as text; real attempts
    # are processes of their own.
    monkeypatch.setattr(
        "tensorboard.summary.writer.event_file_writer._global_uid", AtomicCounter(0)
    )
    for resume_step, steps, value in ((0, (1, 2, 3, 4), 1.0), (2, (3,), 2.0), (0, (1,), 3.0)):
        tracker = TensorBoardTracker(tmp_path, resume_step)
        for step in steps:
            tracker.log(step, {"actor/entropy": value})
        tracker.close()
        events = EventAccumulator(str(tmp_path))
        events.Reload()
        shown = [(e.step, e.value) for e in events.Scalars("actor/entropy")]
        assert (
            shown
            == {0: [(s, value) for s in steps], 2: [(1, 1.0), (2, 1.0), (3, 2.0)]}[resume_step]
        )
