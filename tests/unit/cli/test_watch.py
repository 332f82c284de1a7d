"""`watch`, `samples`, `logs`, `stop` and their like on an output folder of this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agenticrun_api import FinalReport, Outcome
from agenticrun_api.names import ExitCode
from agenticrun_workers.cli import app
from agenticrun_workers.cli.run_notes import closing_lines
from agenticrun_workers.reporting.client import rfc3339
from agenticrun_workers.reporting.run_folder import RunFolder
from run_folders import BEGAN, make_run_folder
from tiny_runs import tiny_run


def cli(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    return make_run_folder(tmp_path / "out")


def test_watch_shows_an_ended_run_once(ended: Path) -> None:
    code, shown = cli("watch", ended)
    assert code == 0
    for piece in (
        "lake",
        "Succeeded  trained 4 steps",
        "4/10",
        "40 s elapsed",
        "rollout 1.20 s 60%",
        "▁▃▆█ 0.4 (0.1 to 0.4)",
        "▁█ 0.4 (0 to 0.4)",
        "action 'Down', valid, reward 1",
    ):
        assert piece in shown, piece


@pytest.mark.parametrize(
    ("changes", "shown"),
    [({"started": rfc3339(BEGAN - 25)}, "1 min 05 s"), ({"started": None}, "40 s")],
)
def test_the_elapsed_time_counts_from_the_start_of_the_process(
    ended: Path, changes: dict[str, object], shown: str
) -> None:
    (attempt,) = RunFolder(ended).attempts()
    (ended / "attempts.jsonl").write_text(json.dumps({**attempt, **changes}) + "\n")
    assert f"{shown} elapsed" in cli("watch", ended)[1]


def test_watch_says_that_a_killed_run_can_go_on(tmp_path: Path) -> None:
    _, shown = cli("watch", make_run_folder(tmp_path / "out", finished=False))
    assert "Ended" in shown
    assert "agenticrun resume" in shown
    assert "remaining" not in shown


def test_watch_shows_what_a_live_run_does(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "out", finished=False)
    with RunFolder(folder).announced():
        _, shown = cli("watch", folder, "--once")
    assert "rollout" in shown
    assert "12 s remaining" in shown


def test_samples_prints_the_newest_episode(ended: Path) -> None:
    code, shown = cli("samples", ended)
    assert code == 0
    assert "step 4, validation: tag Lake, group 3, member 1, score 1" in shown
    assert "answer 1: action 'Down', valid, reward 1" in shown
    assert str(ended / "films" / "step-4-val-Lake-3-1.gif") in shown.replace("\n", "")


def test_samples_of_a_step_as_a_list(ended: Path) -> None:
    code, shown = cli("samples", ended, "--step", 4, "--list")
    assert code == 0
    assert [line.split(":")[0] for line in shown.splitlines()] == ["step 4", "step 4, validation"]


def test_a_list_of_samples_is_as_long_as_count_says(ended: Path) -> None:
    _, everything = cli("samples", ended, "--list")
    _, two = cli("samples", ended, "--list", "-c", 2)
    assert two.splitlines() == everything.splitlines()[-2:]
    assert len(everything.splitlines()) > 2


def test_samples_that_are_not_there_name_those_that_are(ended: Path) -> None:
    code, shown = cli("samples", ended, "--step", 77)
    assert code == ExitCode.INVALID_CONFIG
    assert "step-0-val" in shown


def test_logs_are_those_of_the_role(ended: Path) -> None:
    started = "INFO agenticrun_workers.driver.actors: {} runs on vm (node 0f4ca771, pid {})\n"
    (ended / "run.log").write_text(
        started.format("env-worker-0", 11) + started.format("trainer-0", 12) + "second\nthird\n"
    )
    (ended / "engines").mkdir()
    (ended / "engines" / "vllm-0.log").write_text("engine starts\n")
    written = ended.parent / "logs"
    written.mkdir()
    (written / "worker-ab-01-11.err").write_text(":actor_name:E\njudge right: KeyError\n")
    (written / "worker-ab-01-11.out").write_text("")
    (written / "worker-cd-01-12.err").write_text(":job_id:01\n:actor_name:T\n")
    (written / "raylet.out").write_text("not an actor's\n")
    RunFolder(ended).link_actor_logs(written)
    for _ in range(2):  # while it trains, and afterwards
        assert cli("logs", ended, "--lines", 2) == (0, "second\nthird\n")
        assert cli("logs", ended, "--role", "inference") == (0, "engine starts\n")
        assert cli("logs", ended, "--role", "env") == (0, "judge right: KeyError\n")
        RunFolder(ended).keep_actor_logs()
    assert [file.name for file in (ended / "actors").iterdir()] == ["worker-ab-01-11.err"]
    code, said = cli("logs", ended, "--role", "trainer")
    assert code == ExitCode.INVALID_CONFIG
    assert "it has printed nothing" in said


def test_the_log_of_a_copied_run_is_one_log_in_two_files(ended: Path) -> None:
    (ended / "driver.log.1").write_text("first\nsecond\n")
    (ended / "driver.log").write_text("third\n")
    assert cli("logs", ended, "--lines", 2) == (0, "second\nthird\n")


def test_an_unknown_role_is_refused(ended: Path) -> None:
    code, said = cli("logs", ended, "--role", "worker")
    assert code == 2
    assert "driver, trainer" in said


@pytest.mark.parametrize("command", ["stop", "suspend", "checkpoint"])
def test_a_run_that_does_not_train_cannot_be_asked(command: str, ended: Path) -> None:
    code, said = cli(command, ended)
    assert code == ExitCode.INVALID_CONFIG
    assert "no process of this machine trains in" in said


def test_a_run_that_is_done_is_not_resumed(ended: Path) -> None:
    code, said = cli("resume", ended)
    assert code == ExitCode.INVALID_CONFIG
    assert f"agenticrun run -f {ended / 'run.yaml'} -o {ended} --set pipeline.maxSteps=" in said


def test_a_folder_without_the_run_cannot_be_resumed(ended: Path) -> None:
    (ended / "run.yaml").unlink()
    code, said = cli("resume", ended)
    assert code == ExitCode.INVALID_CONFIG
    assert f"agenticrun run -f FILE -o {ended}" in said


def test_a_run_file_with_equal_keys_is_not_resumed_and_not_shown(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "out", finished=False)
    file = folder / "run.yaml"
    file.write_text(f"{file.read_text()}kind: AgenticRun\n")
    first, *_, last = (
        number
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if line.startswith("kind:")
    )
    message = f"line {last}: kind is set twice (line {first})"
    code, said = cli("resume", folder)
    assert code == ExitCode.INVALID_CONFIG
    assert f"{file}: {message}" in said
    code, shown = cli("watch", folder, "--once")
    assert code == 0
    assert message in shown


def test_a_path_that_is_not_there_is_not_looked_for_on_a_cluster(tmp_path: Path) -> None:
    code, said = cli("watch", tmp_path / "runs" / "nothing")
    assert code == ExitCode.INVALID_CONFIG
    assert "there is no such folder" in said


def test_a_run_ends_with_where_everything_is(ended: Path) -> None:
    checkpoint = ended / "checkpoints" / "step-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    progress = RunFolder(ended).progress()
    assert progress is not None
    assert progress.final is not None
    lines = closing_lines(tiny_run(), RunFolder(ended), progress.final, Path("run.yaml"))
    assert lines == [
        "Succeeded: trained 4 steps",
        "steps        4 in 8 s: rollout 60%, train 30%, other 10%",
        "reward       ▁▃▆█ 0.4 (0.1 to 0.4)",
        f"metrics      {ended / 'metrics.jsonl'}",
        f"samples      {ended / 'samples'}",
        f"checkpoint   {checkpoint}",
        f"next         agenticrun report {ended} -o report.html",
        f"             agenticrun eval -f {ended / 'run.yaml'} --checkpoint {checkpoint}",
        f"             agenticrun export -f {ended / 'run.yaml'} --checkpoint {checkpoint} "
        "-o policy",
    ]


@pytest.mark.parametrize(
    ("outcome", "retryable", "saved", "expected"),
    [
        (Outcome.FAILED, False, False, "correct the file and run again: agenticrun run -f my.yaml"),
        (
            Outcome.FAILED,
            False,
            True,
            "correct the file and run again: agenticrun run -f my.yaml -o {}",
        ),
        (Outcome.FAILED, True, False, "no checkpoint to resume from, run again: agenticrun run -f"),
        (Outcome.FAILED, True, True, "agenticrun resume {}"),
        (Outcome.STOPPED, True, True, "agenticrun resume {}"),
    ],
)
def test_a_run_that_did_not_succeed_says_how_to_go_on(
    outcome: Outcome, retryable: bool, saved: bool, expected: str, tmp_path: Path
) -> None:
    if saved:
        (tmp_path / "checkpoints" / "step-4").mkdir(parents=True)
        (tmp_path / "checkpoints" / "step-4" / "manifest.json").write_text("{}")
    report = FinalReport(
        outcome=outcome,
        reason="Anything",
        message="",
        retryable=retryable,
        time="2026-11-21T10:45:00Z",
    )
    last = closing_lines(tiny_run(), RunFolder(tmp_path), report, Path("my.yaml"))[-1]
    assert last.startswith(f"next         {expected.format(tmp_path)}")
    assert ("agenticrun resume" in expected) == ("agenticrun resume" in last)


LOG_LINE = "E1123 10:00:00.1 7 memcache.go:265] cannot get the current server's list of API groups"


def kubectl_that_says(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "message").write_text(text)
    program = folder / "kubectl"
    program.write_text(f"#!/bin/sh\ncat {folder / 'message'} >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_name_that_is_no_folder_without_a_cluster_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = "The connection to the server localhost:8080 was refused"
    kubectl_that_says(f"{LOG_LINE}\n{refused}\n", tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    code, said = cli("watch", "nosuch")
    assert code == ExitCode.INVALID_CONFIG
    assert said == (
        "there is no folder nosuch here, and kubectl knows no cluster: name the output folder "
        "of a run, such as runs/nosuch, or set KUBECONFIG\n"
    )


def test_the_log_lines_of_kubectl_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl_that_says(f"{LOG_LINE}\nthe server says no\n", tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    _, said = cli("watch", "nosuch")
    assert said.endswith(": the server says no\n")
    assert "memcache" not in said
