"""The copy of a run's output beside its checkpoints in object storage."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from agenticrun_workers.driver import output as module
from agenticrun_workers.driver.__main__ import log_file
from agenticrun_workers.driver.output import FETCHED, OutputCopy, copied_output
from agenticrun_workers.storage import Folder


@pytest.fixture
def target() -> Iterator[Folder]:
    folder = Folder(f"memory://{uuid.uuid4()}/lake-01234567")
    yield folder
    folder.delete()


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_changed_files_are_copied_and_others_are_not(
    tmp_path: Path, target: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    upload = Folder.upload

    def noted(folder: Folder, name: str, path: Path) -> None:
        sent.append(name)
        upload(folder, name, path)

    monkeypatch.setattr(Folder, "upload", noted)
    copies = OutputCopy(tmp_path, target)
    write(tmp_path, "metrics.jsonl", "1\n")
    write(tmp_path, "samples/step-1.txt", "a")
    (tmp_path / "latest").symlink_to(tmp_path / "samples")
    copies.copy()
    write(tmp_path, "metrics.jsonl", "1\n2\n")
    copies.copy()
    assert sent == ["metrics.jsonl", "samples/step-1.txt", "metrics.jsonl"]
    assert target.read("metrics.jsonl") == b"1\n2\n"


def test_a_new_head_pod_goes_on_with_the_files_but_not_the_checkpoints(
    tmp_path: Path, target: Folder
) -> None:
    write(tmp_path / "old", "metrics.jsonl", "1\n")
    write(tmp_path / "old", "tensorboard/events", "e")
    OutputCopy(tmp_path / "old", target).copy()
    target.write("step-10/manifest.json", b"{}")
    OutputCopy(tmp_path / "new", target).fetch()
    found = {path.name for path in (tmp_path / "new").rglob("*") if path.is_file()}
    assert found == {"metrics.jsonl", "events", FETCHED}


def test_the_same_head_pod_keeps_its_newer_files(tmp_path: Path, target: Folder) -> None:
    OutputCopy(tmp_path, target).fetch()
    target.write("metrics.jsonl", b"1\n")
    write(tmp_path, "metrics.jsonl", "1\n2\n")
    OutputCopy(tmp_path, target).fetch()
    assert (tmp_path / "metrics.jsonl").read_text() == "1\n2\n"


async def test_files_are_copied_while_the_run_trains_and_at_its_end(
    tmp_path: Path, target: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COPY_SECONDS", 0.01)

    async def training() -> None:
        async with copied_output(tmp_path, target):
            write(tmp_path, "metrics.jsonl", "1\n")
            async with asyncio.timeout(10):
                while not target.exists("metrics.jsonl"):
                    await asyncio.sleep(0.01)
            write(tmp_path, "driver.log", "the last line")
            raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed"):
        await training()
    assert target.read("driver.log") == b"the last line"


async def test_a_copy_under_way_at_the_end_does_not_replace_the_last_one(
    tmp_path: Path, target: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COPY_SECONDS", 0.01)
    began, arrived, upload = threading.Event(), threading.Event(), Folder.upload

    def slow_at_first(folder: Folder, name: str, path: Path) -> None:
        text = path.read_bytes()
        if not began.is_set():
            began.set()
            time.sleep(0.3)
            folder.write(name, text)
            arrived.set()
        else:
            upload(folder, name, path)

    monkeypatch.setattr(Folder, "upload", slow_at_first)
    write(tmp_path, "metrics.jsonl", "1\n")
    async with copied_output(tmp_path, target):
        await asyncio.to_thread(began.wait, 60)
        write(tmp_path, "metrics.jsonl", "1\n2\n")
    assert await asyncio.to_thread(arrived.wait, 60)
    assert target.read("metrics.jsonl") == b"1\n2\n"


async def test_what_cannot_be_read_is_not_replaced_and_training_goes_on(
    tmp_path: Path,
    target: Folder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target.write("metrics.jsonl", b"1\n")

    def fails(folder: Folder, *arguments: object) -> None:
        raise OSError("connection reset")

    monkeypatch.setattr(Folder, "download", fails)
    async with copied_output(tmp_path, target):
        write(tmp_path, "metrics.jsonl", "2\n")
    assert target.read("metrics.jsonl") == b"1\n"
    assert "the output stays in the head pod" in caplog.text


async def test_a_later_attempt_on_a_pod_without_the_history_does_not_replace_it(
    tmp_path: Path, target: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.write("metrics.jsonl", b"1\n2\n3\n")

    def breaks_half_way(folder: Folder, name: str, path: Path) -> None:
        path.write_bytes(folder.read(name)[:2])
        raise OSError("connection reset")

    with monkeypatch.context() as broken:
        broken.setattr(Folder, "download", breaks_half_way)
        async with copied_output(tmp_path, target):
            assert not (tmp_path / "metrics.jsonl").exists()
            write(tmp_path, "metrics.jsonl", "4\n")
    async with copied_output(tmp_path, target):
        write(tmp_path, "metrics.jsonl", "4\n5\n")
    assert target.read("metrics.jsonl") == b"1\n2\n3\n"
    assert [path.name for path in tmp_path.glob("*.part")] == []


async def test_a_pod_that_has_the_history_copies_on_when_storage_fails_for_a_moment(
    tmp_path: Path, target: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Folder) -> dict[str, int]:
        raise OSError("503 slow down")

    async with copied_output(tmp_path, target):
        write(tmp_path, "metrics.jsonl", "1\n")
    with monkeypatch.context() as broken:
        broken.setattr(Folder, "sizes", fails)
        async with copied_output(tmp_path, target):
            write(tmp_path, "metrics.jsonl", "1\n2\n")
    assert target.read("metrics.jsonl") == b"1\n2\n"
    assert set(target.sizes()) == {"metrics.jsonl"}


async def test_a_folder_that_cannot_be_listed_ends_nothing(
    tmp_path: Path, target: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path, pattern: str) -> list[Path]:
        raise OSError(5, "Input/output error")

    async with copied_output(tmp_path, target):
        monkeypatch.setattr(type(tmp_path), "rglob", fails)


def test_a_file_that_storage_refuses_does_not_stop_the_others(
    tmp_path: Path, target: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = Folder.upload

    def picky(folder: Folder, name: str, path: Path) -> None:
        if name == "a":
            raise OSError("name too short")
        upload(folder, name, path)

    monkeypatch.setattr(Folder, "upload", picky)
    write(tmp_path, "a", "")
    write(tmp_path, "metrics.jsonl", "1\n")
    OutputCopy(tmp_path, target).copy()
    assert target.read("metrics.jsonl") == b"1\n"


def test_a_failing_storage_is_logged_once_until_it_works_again(
    tmp_path: Path,
    target: Folder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(folder: Folder, *arguments: object) -> None:
        raise OSError("connection reset")

    copies = OutputCopy(tmp_path, target)
    write(tmp_path, "metrics.jsonl", "1\n")
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        broken.setattr(Folder, "upload", fails)
        copies.copy()
        copies.copy()
    assert caplog.text.count("cannot copy the output") == 1
    copies.copy()
    assert target.read("metrics.jsonl") == b"1\n"


def test_the_drivers_log_is_kept_and_appended_to(tmp_path: Path) -> None:
    file = tmp_path / "lake" / "driver.log"
    for attempt in (1, 2):
        with log_file(file):
            logging.getLogger("any").warning("attempt %d", attempt)
    assert [line.rsplit(": ")[1] for line in file.read_text().splitlines()] == [
        "attempt 1",
        "attempt 2",
    ]
    write(tmp_path, "taken", "")
    with log_file(tmp_path / "taken" / "driver.log"):
        pass  # the store says what is wrong with the folder
