"""Which trackers a run gets, what its log says, and what happens when one fails."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from agenticrun_api import AgenticRun
from agenticrun_workers.reporting.display import step_line, validation_line
from agenticrun_workers.reporting.trackers import Tolerated, build_trackers

STEP = {
    "rollout/score/mean": 0.25,
    "actor/total_loss": -0.0123,
    "actor/entropy": 0.91,
    "system/tps": 9100.0,
    "time/step": 1.2,
}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Ours: other threads and loggers have theirs."""
    return [
        record.getMessage() for record in caplog.records if record.name.startswith("agenticrun_")
    ]


def test_every_tracker_that_the_run_asks_for_gets_every_step(
    make_run: Callable[..., AgenticRun], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trackers = build_trackers(make_run(), tmp_path, resume_step=0, max_steps=lambda: 10)
    for tracker in trackers:
        tracker.log(3, STEP)
        tracker.log(
            3, {"val/Lake/success": 0.65, "val/Lake/random_success": 0.02, "val/Lake/score": 0.7}
        )
        tracker.close()
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written[0] == {"step": 3, "time": written[0]["time"], **STEP}
    assert list(tmp_path.glob("tensorboard/events.out.tfevents.*"))
    assert lines(caplog) == [
        "step 3/10  reward 0.250  loss -0.0123  entropy 0.910  tok/s 9,100  s/step 1.20",
        "[validation] step 3: Lake success 0.650, Lake random_success 0.020",
    ]


def test_a_line_names_the_alarms_that_are_up() -> None:
    assert step_line(1, 10, {**STEP, "guard/entropy": 1.0, "guard/logprob_gap": 0.0}).endswith(
        "s/step 1.20  ALARM entropy"
    )


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        (
            {"val/A/success": 0.0, "val/A/stop/env_error": 1.0, "val/A/stop/completed": 0.0},
            "A success 0.000, A env_error 1.00",
        ),
        (
            {"val/A/random_success": 0.0, "val/A/random_errors": 0.5, "val/B/stop/timeout": 0.002},
            "A random_success 0.000, A random_errors 0.50, B timeout 0.002",
        ),
        ({"val/A/score": 0.0, "val/A/stop/max_turns": 1.0}, "A score 0.000"),
    ],
)
def test_a_validation_says_which_share_of_its_episodes_failed(
    metrics: dict[str, float], line: str
) -> None:
    assert validation_line(0, metrics) == f"[validation] step 0: {line}"


def test_a_validation_without_success_shows_scores(
    make_run: Callable[..., AgenticRun], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for tracker in build_trackers(
        make_run(tensorboard=False), tmp_path, resume_step=0, max_steps=lambda: 10
    ):
        tracker.log(0, {"val/Talk/score": 0.7, "val/Talk/turns": 3.0})
        tracker.close()
    assert lines(caplog) == ["[validation] step 0: Talk score 0.700"]


def test_what_a_run_does_not_ask_for_is_not_written(
    make_run: Callable[..., AgenticRun], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for tracker in build_trackers(
        make_run(console=False, tensorboard=False),
        tmp_path,
        resume_step=0,
        max_steps=lambda: 10,
    ):
        tracker.log(1, STEP)
        tracker.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert lines(caplog) == []


def test_a_tracker_that_cannot_start_is_told_and_the_others_work(
    make_run: Callable[..., AgenticRun], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder belongs")
    trackers = build_trackers(
        make_run(console=False), tmp_path, resume_step=0, max_steps=lambda: 10
    )
    for tracker in trackers:
        tracker.log(1, STEP)
        tracker.close()
    assert (tmp_path / "metrics.jsonl").read_text().startswith('{"step": 1')
    (said,) = lines(caplog)
    assert said.startswith("the run trains without TensorBoard: FileExistsError")


class Flaky:
    """Fails at the steps it is told to."""

    def __init__(self, *bad_steps: int) -> None:
        self.bad_steps = bad_steps
        self.steps: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step in self.bad_steps:
            raise OSError("No space left on device")
        self.steps.append(step)

    def close(self) -> None:
        raise OSError("No space left on device")


def test_failures_are_told_once_until_the_tracker_works_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flaky = Flaky(2, 3, 5)
    tolerated = Tolerated("metrics.jsonl", flaky)
    for step in range(1, 6):
        tolerated.log(step, STEP)
    tolerated.close()
    assert flaky.steps == [1, 4]
    assert (
        lines(caplog)
        == ["metrics.jsonl does not accept metrics: OSError: No space left on device"] * 2
    )
