"""Which trackers a run gets, what its log says, and what happens when one fails."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from agenticrun_api import AgenticRun
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.reporting.display import step_line, validation_line
from agenticrun_workers.reporting.trackers import Tolerated, build_trackers, custom_tracker

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
        tracker.log(3, {"engine/parity_gap": 1e-7})  # no step, no validation: no line
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
        (
            {"val/A/score": 5.0, "env/A/score": 0.5, "val/A/easy/score": 7.0, "val/score": 9.0},
            "A score 5.000",
        ),
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


OWN = """
class Own:
    def __init__(self, run, unit="s"):
        if unit == "fails":
            raise OSError("no server")
        self.lines = run.folder / "own.txt"
        self.write(run.name, run.id, run.resume_step, sorted(run.config), unit)

    def write(self, *words):
        with self.lines.open("a") as file:
            file.write(f"{words}\\n")

    def log(self, step, metrics):
        self.write(step, metrics["time/step"])

    def close(self):
        self.write("closed")


class Half:
    def __init__(self, run):
        pass

    def log(self, step, metrics):
        pass
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_trackers.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("own")
def test_a_tracker_of_the_users_gets_the_run_its_config_and_every_step(
    make_run: Callable[..., AgenticRun], tmp_path: Path
) -> None:
    run = make_run("uid-1", custom="own_trackers:Own", customConfig={"unit": "min"})
    for tracker in build_trackers(run, tmp_path, resume_step=4, max_steps=lambda: 10):
        tracker.log(5, STEP)
        tracker.close()
    assert (tmp_path / "own.txt").read_text().splitlines() == [
        "('lake', 'uid-1', 4, ['model', 'pipeline'], 'min')",
        "(5, 1.2)",
        "('closed',)",
    ]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("tracking", "problem"),
    [
        ({"custom": "absent:Own"}, "importing absent failed"),
        ({"custom": "own_trackers:Absent"}, "own_trackers has no Absent"),
        ({"custom": "own_trackers:Half"}, "own_trackers:Half has no method close"),
        ({"custom": "own_trackers:Own", "customConfig": {"Url": ""}}, "unexpected keyword"),
    ],
)
def test_a_tracker_that_can_never_work_fails_the_run_before_it_starts(
    make_run: Callable[..., AgenticRun], tracking: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidConfig, match=problem) as caught:
        custom_tracker(make_run(**tracking))
    assert caught.value.path == "spec.tracking.custom"


@pytest.mark.usefixtures("own")
def test_a_tracker_whose_server_does_not_answer_is_left_out(
    make_run: Callable[..., AgenticRun], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(custom="own_trackers:Own", customConfig={"unit": "fails"})
    for tracker in build_trackers(run, tmp_path, resume_step=0, max_steps=lambda: 10):
        tracker.close()
    assert lines(caplog) == ["the run trains without own_trackers:Own: OSError: no server"]


@pytest.mark.parametrize("name", ["Mlflow", "Trackio", "Swanlab"])
def test_the_trackers_of_the_examples_pass_every_step_on_and_end_their_run(
    name: str,
    make_run: Callable[..., AgenticRun],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their libraries are not installed here; docs/tracking.md says which versions were tried."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples/trackers"))
    monkeypatch.setenv("TRACKIO_DIR", "")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")
    library = MagicMock()
    library.search_runs.return_value = [SimpleNamespace(info=SimpleNamespace(run_id="before"))]
    monkeypatch.setitem(sys.modules, name.lower(), library)
    run = make_run("uid-1", custom=f"trackers:{name}", tensorboard=False, console=False)
    for tracker in build_trackers(run, tmp_path, resume_step=0, max_steps=lambda: 10):
        tracker.log(5, STEP)
        tracker.close()
    calls = [str(call) for call in library.mock_calls]
    assert sum("'time/step': 1.2" in call for call in calls) == 1
    assert any("finish()" in call or "end_run()" in call for call in calls)
