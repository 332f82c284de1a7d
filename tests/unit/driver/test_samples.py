"""Sample episodes and their pictures on disk."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from agenticrun_api import parse_run
from agenticrun_api.pipeline import Pipeline
from agenticrun_api.spec import Tracking
from agenticrun_workers.driver import samples
from agenticrun_workers.driver.samples import SampleWriter
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.types import StopReason
from rollout_fakes import result
from run_folders import gif
from runs import run_with


def pipeline(logging_steps: int = 1) -> Pipeline:
    return parse_run(run_with(("spec.pipeline.loggingSteps", logging_steps))).spec.pipeline


def shown(group: int, member: int = 0, tag: str = "A", *, frames: bytes = b"") -> EpisodeResult:
    return replace(
        result(group, member, tag=tag, score=0.5),
        transcript=f"play of {tag} {group}\n",
        frames=frames,
    )


def test_an_episode_says_what_it_is_and_is_written_whole(tmp_path: Path) -> None:
    failed = replace(
        result(7, 1, stop=StopReason.ENV_ERROR), transcript="half a play", error="KeyError: 'x'"
    )
    SampleWriter(tmp_path, Tracking(sample_logs=2), pipeline()).write(12, [shown(3), failed])
    assert (tmp_path / "samples" / "step-12.txt").read_text() == (
        "=== tag A, group 3, member 0, score 0.5, stop completed, turns 2, tokens 20 ===\n"
        "play of A 3\n"
        "\n"
        "=== tag A, group 7, member 1, score 0, stop env_error, turns 2, tokens 20, "
        "error KeyError: 'x' ===\n"
        "half a play\n"
    )


def test_as_many_episodes_as_asked_for_taking_tags_in_turn(tmp_path: Path) -> None:
    episodes = [shown(0, tag="A"), shown(1, tag="A"), result(2, tag="A"), shown(3, tag="B")]
    SampleWriter(tmp_path, Tracking(sample_logs=2), pipeline()).write(1, episodes)
    assert [
        line
        for line in (tmp_path / "samples" / "step-1.txt").read_text().splitlines()
        if line.startswith("play")
    ] == [
        "play of A 0",
        "play of B 3",
    ]


def test_validations_have_files_of_their_own(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, Tracking(render_dir="pictures"), pipeline())
    writer.write(5, [shown(0, frames=gif())])
    writer.write(5, [shown(0, frames=gif())], validation=True)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")) == [
        "pictures/step-5-A-0-0.gif",
        "pictures/step-5-val-A-0-0.gif",
        "samples/step-5-val.txt",
        "samples/step-5.txt",
    ]


def test_pictures_are_gifs_of_the_episodes_that_have_frames(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, Tracking(sample_logs=2, render_dir="pictures"), pipeline())
    assert writer.frames
    writer.write(1, [shown(0, frames=gif()), shown(1)])
    (path,) = (tmp_path / "pictures").iterdir()
    with Image.open(path) as picture:
        assert (picture.format, picture.size, getattr(picture, "n_frames", 1)) == ("GIF", (4, 4), 2)


@pytest.mark.parametrize(
    ("logs", "every", "due"), [(1, 1, [1, 2, 3, 4]), (1, 2, [2, 4]), (1, 0, []), (0, 1, [])]
)
def test_samples_are_due_every_logging_steps(
    tmp_path: Path, logs: int, every: int, due: list[int]
) -> None:
    writer = SampleWriter(
        tmp_path, Tracking(sample_logs=logs, render_dir="pictures"), pipeline(every)
    )
    for step in range(1, 5):
        if writer.due(step):
            writer.write(step, [shown(0)])
    assert [
        step for step in range(1, 5) if (tmp_path / "samples" / f"step-{step}.txt").exists()
    ] == due
    assert writer.frames == (logs > 0)


def test_nothing_to_show_writes_nothing(tmp_path: Path) -> None:
    SampleWriter(tmp_path, Tracking(), pipeline()).write(1, [result(0)])
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_nothing_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "samples").write_text("a file where the folder belongs")
    writer = SampleWriter(tmp_path, Tracking(), pipeline())
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            writer.write(step, [shown(0)])
    told = [
        record.getMessage().split(":")[0]
        for record in caplog.records
        if record.name == samples.__name__
    ]
    assert told == ["cannot write sample episodes"]
