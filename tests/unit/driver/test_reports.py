"""From an exception to what the run's status says about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agenticrun_api import InvalidRun, Outcome, Reason
from agenticrun_api.names import ExitCode
from agenticrun_workers.driver import __main__ as cluster_driver
from agenticrun_workers.driver.outcome import exit_code, report_of
from agenticrun_workers.driver.progress import StopRequested
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.launch import ActorDied


def test_a_config_error_is_not_tried_again_and_names_the_field() -> None:
    error = InvalidConfig(
        "spec.pipeline.envs[1].type",
        "importing mine failed: ModuleNotFoundError: No module named 'x'",
    )
    report = report_of(error, step=0)
    assert (report.outcome, report.reason, report.retryable) == (
        Outcome.FAILED,
        "InvalidConfig",
        False,
    )
    assert (
        report.message == "spec.pipeline.envs[1].type: importing mine failed: "
        "ModuleNotFoundError: No module named 'x'"
    )
    assert exit_code(report) == ExitCode.INVALID_CONFIG


def test_a_run_that_does_not_parse_is_a_config_error() -> None:
    assert report_of(InvalidRun(["spec.model: missing"]), step=0).message == "spec.model: missing"


def test_a_mounted_run_with_equal_keys_ends_the_driver_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("kind: AgenticRun\nspec: {}\nspec: {}\n")
    monkeypatch.setattr(cluster_driver, "RUN_FILE", str(file))
    with pytest.raises(SystemExit) as ended:
        cluster_driver.main()
    assert ended.value.code == ExitCode.INVALID_CONFIG
    assert f"{file}: line 3: spec is set twice (line 2)" in caplog.text


def test_a_stop_is_no_failure() -> None:
    report = report_of(StopRequested(), step=12)
    assert (report.outcome, report.retryable) == (Outcome.STOPPED, True)
    assert "12 steps" in report.message
    assert exit_code(report) == ExitCode.STOPPED


def test_a_pod_that_is_removed_is_named_and_no_failure() -> None:
    report = report_of(StopRequested("lake-head-x"), step=12)
    assert (report.outcome, report.reason, report.retryable) == (
        Outcome.STOPPED,
        Reason.DISRUPTED,
        True,
    )
    assert report.message == "pod lake-head-x is being removed: the driver stopped after 12 steps"
    assert exit_code(report) == ExitCode.STOPPED


def test_a_lost_actor_is_worth_another_attempt() -> None:
    report = report_of(ActorDied("the actor died"), step=7)
    assert (report.outcome, report.reason, report.retryable) == (Outcome.FAILED, "WorkerLost", True)
    assert "step 7" in report.message
    assert exit_code(report) == ExitCode.FAILED


def test_any_other_error_is_told_in_one_line() -> None:
    report = report_of(RuntimeError("CUDA out of memory\nTried to allocate"), step=3)
    assert (report.reason, report.retryable) == ("TrainingFailed", True)
    assert report.message == "in step 3: RuntimeError: CUDA out of memory"


@pytest.mark.parametrize("error", [OSError("name-\udce9.txt"), ActorDied("name-\udce9.txt")])
def test_text_that_is_no_unicode_can_be_sent(error: Exception) -> None:
    report = report_of(error, step=3)
    assert "name-\\udce9.txt" in report.message
    assert report.model_dump_json()


def test_the_death_of_an_actor_may_have_no_text() -> None:
    assert report_of(ActorDied(""), step=3).reason == "WorkerLost"
