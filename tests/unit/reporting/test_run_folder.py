"""An attempt records itself in its output folder, and others read it there."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml
from rich.console import Console

from agenticrun_api import parse_run
from agenticrun_api.load import parse_mounted
from agenticrun_api.spec import Tracking
from agenticrun_workers.driver.samples import SampleWriter
from agenticrun_workers.errors import CannotStart
from agenticrun_workers.reporting.display import PlainDisplay
from agenticrun_workers.reporting.run_folder import RecordedProgress, RunFolder, without_secrets
from agenticrun_workers.types import StopReason
from rollout_fakes import result
from run_folders import SECRET, make_run_folder, snapshot
from runs import run_with


def test_the_recorded_run_is_a_run_without_its_secrets(tmp_path: Path) -> None:
    folder = RunFolder(make_run_folder(tmp_path / "out"))
    assert SECRET not in (tmp_path / "out" / "run.yaml").read_text()
    config = folder.config()
    assert config is not None
    run = parse_mounted(config)
    assert run.metadata.name == "lake"
    assert run.spec.tracking.render_dir == "films"
    assert [variable["name"] for variable in config["spec"]["roles"]["driver"]["env"]] == [
        "WANDB_API_KEY"
    ]


def test_each_attempt_adds_its_versions_and_its_machine(tmp_path: Path) -> None:
    run = parse_run(run_with())
    for attempt in (1, 2):
        RunFolder(tmp_path).record_attempt(run, attempt, code=tmp_path)
    first, second = RunFolder(tmp_path).attempts()
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert first["versions"]["torch"]
    assert first["started"] <= first["time"]
    assert first["machine"]["cpus"] >= 1
    assert first["code"] == str(tmp_path)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"env": [{"name": "A", "value": "x"}]}, {"env": [{"name": "A", "value": "(hidden)"}]}),
        (
            {"podTemplate": {"spec": {"containers": [{"env": [{"name": "A", "value": "x"}]}]}}},
            {
                "podTemplate": {
                    "spec": {"containers": [{"env": [{"name": "A", "value": "(hidden)"}]}]}
                }
            },
        ),
        (
            {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
            {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
        ),
        ({"roles": {"env": {"replicas": 2}}}, {"roles": {"env": {"replicas": 2}}}),
    ],
)
def test_values_of_environment_variables_are_hidden(document: object, expected: object) -> None:
    assert without_secrets(document) == expected


def test_a_folder_that_cannot_be_written_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    RunFolder(tmp_path / "file").record_attempt(parse_run(run_with()), 1)
    assert "the attempt is not recorded" in caplog.text


def test_half_a_line_of_metrics_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step": 2.0}\n{"step": 2, "ti')
    assert RunFolder(tmp_path).metrics() == [{"step": 1, "time/step": 2.0}]


def test_an_empty_folder_is_no_run_and_has_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "nowhere")
    assert not folder.is_run
    assert folder.config() is None
    assert folder.progress() is None
    assert folder.checkpoint() is None
    assert folder.process() is None
    assert (folder.attempts(), folder.metrics(), folder.sample_files()) == ([], [], [])


def test_sample_files_are_in_the_order_of_steps(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    for name in ("step-10.txt", "step-9-val.txt", "step-9.txt", "step-0-val.txt", "notes.txt"):
        (tmp_path / "samples" / name).write_text("")
    assert [file.stem for file in RunFolder(tmp_path).sample_files()] == [
        "step-0-val",
        "step-9",
        "step-9-val",
        "step-10",
    ]


def test_an_episode_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = RunFolder(make_run_folder(tmp_path))
    (episode,) = folder.episodes(folder.sample_files()[-1])
    assert (episode.step, episode.validation) == (4, True)
    assert episode.facts["tag"] == "Lake"
    assert episode.facts["stop"] == "completed"
    assert [title for title, _ in episode.parts] == [
        "turn 1",
        "answer 1: action 'Down', valid, reward 1",
        "end: completed, score 1",
    ]
    assert episode.parts[1][1] == "Down"
    assert episode.picture == tmp_path / "films" / "step-4-val-Lake-3-1.gif"


def test_the_error_of_an_episode_may_hold_commas(tmp_path: Path) -> None:
    failed = replace(
        result(7, 1, stop=StopReason.ENV_ERROR), transcript="half", error="KeyError: 'x', tag y"
    )
    pipeline = parse_run(run_with(("spec.pipeline.loggingSteps", 1))).spec.pipeline
    SampleWriter(tmp_path, Tracking(), pipeline).write(1, [failed])
    folder = RunFolder(tmp_path)
    (episode,) = folder.episodes(folder.sample_files()[0])
    assert episode.facts["error"] == "KeyError: 'x', tag y"
    assert episode.facts["tag"] == "A"


def test_an_episode_is_shown_without_what_acts_on_a_terminal(tmp_path: Path) -> None:
    transcript = "--- turn 1 ---\n\x1b]0;title\x07\x1b[2Jhalf 🤗\x00\n"
    pipeline = parse_run(run_with(("spec.pipeline.loggingSteps", 1))).spec.pipeline
    episode = replace(result(7, 1), transcript=transcript)
    SampleWriter(tmp_path, Tracking(), pipeline).write(1, [episode])
    folder = RunFolder(tmp_path)
    (read,) = folder.episodes(folder.sample_files()[0])
    assert read.parts[0] == ("turn 1", "half 🤗\ufffd")


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    for step in (2, 10, 30):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"step-{step}" / "manifest.json").write_text("{}")
    assert RunFolder(tmp_path).checkpoint() == tmp_path / "checkpoints" / "step-10"


def test_the_process_that_trains_is_found_until_it_ends(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with RunFolder(tmp_path).announced():
        process = folder.process()
        assert process is not None
        assert process.pid == os.getpid()
        RunFolder(tmp_path).refuse_if_in_use()  # it is ours
    assert folder.process() is None


@pytest.mark.parametrize("change", [{"created": 1.0}, {"host": "elsewhere"}, {"pid": 2**22 + 1}])
def test_another_process_with_the_same_number_is_not_taken_for_it(
    change: dict[str, object], tmp_path: Path
) -> None:
    with RunFolder(tmp_path).announced():
        file = tmp_path / "process.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
        assert RunFolder(tmp_path).process() is None


def test_a_folder_in_which_another_process_trains_is_refused(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with RunFolder(tmp_path).announced():
            file = tmp_path / "process.json"
            created = psutil.Process(other.pid).create_time()
            record = json.loads(file.read_text()) | {"pid": other.pid, "created": created}
            file.write_text(json.dumps(record))
            with pytest.raises(
                CannotStart, match=f"process {other.pid} trains in .*agenticrun stop"
            ):
                RunFolder(tmp_path).refuse_if_in_use()
    finally:
        other.communicate()


async def test_the_newest_snapshot_is_kept_in_a_file(tmp_path: Path) -> None:
    recorded = RecordedProgress(PlainDisplay(Console(quiet=True)), tmp_path)
    recorded.update(snapshot(1))
    recorded.update(snapshot(2))
    assert RunFolder(tmp_path).progress() == snapshot(2)
    await recorded.finish(snapshot(3))
    assert RunFolder(tmp_path).progress() == snapshot(3)


def test_a_disk_that_takes_no_snapshot_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    recorded = RecordedProgress(PlainDisplay(Console(quiet=True)), tmp_path / "nowhere")
    recorded.update(snapshot(1))
    recorded.update(snapshot(2))
    assert len(caplog.records) == 1


def test_a_config_that_is_no_mapping_is_none(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(["no", "run"]))
    assert RunFolder(tmp_path).config() is None
