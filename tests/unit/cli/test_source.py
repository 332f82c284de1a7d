"""The output of a cluster run whose pods are gone, read from object storage."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from agenticrun_workers.cli import source
from agenticrun_workers.cli.kubectl import SourceError
from agenticrun_workers.cli.source import ALL, download_output
from agenticrun_workers.reporting.run_folder import RunFolder
from agenticrun_workers.storage import Folder
from run_folders import make_run_folder

BASE = "memory://bucket/lake-01234567"


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[None]:
    source, storage = make_run_folder(tmp_path / "head"), Folder(BASE)
    for file in source.rglob("*.*"):
        storage.upload(str(file.relative_to(source)), file)
    storage.write("step-4/manifest.json", b"{}")
    yield
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize(
    ("count", "files"),
    [
        (1, ["step-4-val"]),
        (2, ["step-2", "step-4-val"]),
        (ALL, ["step-0-val", "step-1", "step-2", "step-3", "step-4", "step-4-val"]),
    ],
)
def test_what_people_look_at_is_copied(
    count: int, files: list[str], stored: None, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    download_output(BASE, copy, count, "films")
    folder = RunFolder(copy)
    assert [file.stem for file in folder.sample_files()] == files
    assert len([line for line in folder.metrics() if "time/step" in line]) == 4
    assert folder.config() is not None
    (episode,) = folder.episodes(folder.sample_files()[-1])
    assert episode.picture == copy / "pictures" / "step-4-val-Lake-3-1.gif"
    assert not (copy / "step-4").exists()


def test_a_storage_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nosuch://bucket cannot be read from here"):
        download_output("nosuch://bucket", tmp_path, 1, None)


def test_logs_of_pods_cannot_act_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        r"import os; os.write(1, b'\x1b]0;title\x07\x1b[31mred\x00 \xff \xf0\x9f\xa4\x97\r\n')"
    )
    source._stream([("env-0", [sys.executable, "-c", program])])
    assert capsys.readouterr().out == "[env-0] red\ufffd \ufffd \U0001f917\n"
