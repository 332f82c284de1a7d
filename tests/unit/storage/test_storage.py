"""Folders keep files complete and unchanged, on a local path and in memory."""

from __future__ import annotations

import os
import uuid
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.storage import DamagedFile, FileEntry, Folder, UnusableStorage


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path / "a" / "b" if request.param == "local" else f"memory://{uuid.uuid4()}")
    yield made
    made.delete()


@given(chunks=st.lists(st.binary(max_size=50), max_size=8))
def test_a_file_written_in_pieces_has_the_size_and_checksum_of_the_whole(
    chunks: list[bytes],
) -> None:
    folder = Folder("memory://pieces")
    with folder.create("file") as file:
        for chunk in chunks:
            assert file.write(chunk) == len(chunk)
    whole = b"".join(chunks)
    assert file.entry == folder.checksum("file") == FileEntry(len(whole), zlib.crc32(whole))
    assert folder.read("file") == whole


@given(
    size=st.integers(min_value=0, max_value=2**50),
    crc32=st.integers(min_value=0, max_value=2**32 - 1),
)
def test_an_entry_survives_json(size: int, crc32: int) -> None:
    assert FileEntry.from_json(FileEntry(size, crc32).to_json()) == FileEntry(size, crc32)


def test_a_verified_file_can_be_read_anywhere(folder: Folder) -> None:
    entry = folder.write("x/file", b"0123456789")
    with folder.open_verified("x/file", entry) as file:
        file.seek(4)
        assert file.read(3) == b"456"


def test_a_file_that_is_not_what_was_written_is_not_read(folder: Folder) -> None:
    entry = folder.write("file", b"0123456789")
    folder.write("file", b"0123456780")
    with (
        pytest.raises(
            DamagedFile, match=r"/file was altered: its checksum is [0-9a-f]{8} instead of"
        ),
        folder.open_verified("file", entry),
    ):
        pass
    folder.write("file", b"012")
    with (
        pytest.raises(DamagedFile, match="has 3 bytes instead of 10"),
        folder.open_verified("file", entry),
    ):
        pass
    with (
        pytest.raises(DamagedFile, match="/other is missing"),
        folder.open_verified("other", entry),
    ):
        pass


def test_files_are_listed_by_their_names_below_the_folder(folder: Folder) -> None:
    assert folder.sizes() == {}
    assert folder.folders() == []
    folder.write("top", b"1")
    folder.write("x/y/deep", b"12")
    assert folder.sizes() == {"top": 1, "x/y/deep": 2}
    assert folder.folders() == ["x"]
    assert (folder / "x").sizes() == {"y/deep": 2}


def test_a_renamed_file_is_at_the_new_name_only(folder: Folder) -> None:
    folder.write("old", b"1")
    folder.rename("old", "new")
    assert folder.sizes() == {"new": 1}


def test_deleting_what_is_not_there_is_fine(folder: Folder) -> None:
    folder.delete()
    folder.write("x/file", b"")
    folder.delete()
    assert folder.sizes() == {}


def test_trying_whether_a_folder_is_writable_leaves_nothing(folder: Folder) -> None:
    folder.require_writable()
    assert folder.sizes() == {}


def test_several_may_try_the_same_folder_at_once(tmp_path: Path) -> None:
    def tries() -> None:
        for _ in range(50):
            Folder(tmp_path).require_writable()

    with ThreadPoolExecutor(4) as pool:
        for trying in [pool.submit(tries) for _ in range(4)]:
            trying.result()


def test_a_local_file_appears_under_its_name_only_when_it_is_whole_and_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path)
    visible: list[bool] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        visible.append(folder.exists("file"))
        fsync(descriptor)

    monkeypatch.setattr("agenticrun_workers.storage.os.fsync", noted)
    folder.write("file", b"1")
    assert visible == [False, False, True], (
        "the bytes and the temporary name are synced before, the name after"
    )


def test_a_local_folder_has_an_absolute_path_whatever_way_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x", "x/", f"file://{tmp_path}/x", str(tmp_path / "x"), tmp_path / "x"):
        assert Folder(name).uri == str(Folder(name).local_path) == str(tmp_path / "x")
    assert Folder("memory://x/").local_path is None
    assert str(Folder("memory://x/") / "y") == "memory://x/y"


def test_a_folder_without_permission_is_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(
        *_: object, **__: object
    ) -> None:  # root, as whom tests may run, is refused nothing
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refused)
    with pytest.raises(UnusableStorage, match="let this user or these credentials write there"):
        Folder(tmp_path / "x").require_writable()


def test_an_error_that_may_pass_is_not_the_configuration_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agenticrun_workers.storage.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        Folder(tmp_path).require_writable()
