"""Checkpoints: published at once or not at all, and never another run's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agenticrun_workers.pipeline.checkpoints import CheckpointStore, DriverState, folder_of
from agenticrun_workers.rollout.errors import InvalidConfig


def state(step: int) -> DriverState:
    return DriverState(step, next_group=step * 16, again=(3, 5), best_success=0.5, baselines={"val/A/random_success": 0.02})


async def save_ranks(folder: Path) -> None:
    (folder / "rank-0.pt").write_bytes(b"weights")


class Killed(BaseException):
    """The driver dies here."""


async def test_a_saved_state_is_read_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, "uid-1", keep=2)
    saved = await store.save(state(10), save_ranks)
    found = store.newest()
    assert found == saved
    assert found is not None
    assert found.driver_state() == state(10)
    assert (found.trainer_folder / "rank-0.pt").read_bytes() == b"weights"


async def test_a_save_that_dies_half_way_is_never_picked_and_is_overwritten(tmp_path: Path) -> None:
    async def dies(folder: Path) -> None:
        (folder / "rank-0.pt").write_bytes(b"half")
        raise Killed

    store = CheckpointStore(tmp_path, "uid-1", keep=2)
    first = await store.save(state(10), save_ranks)
    with pytest.raises(Killed):
        await store.save(state(20), dies)
    assert CheckpointStore(tmp_path, "uid-1", keep=2).newest() == first
    assert (await store.save(state(20), save_ranks)).step == 20
    assert store.resolve("Auto") == store.newest()


@pytest.mark.parametrize("damage", ["missing file", "short file", "broken manifest"])
async def test_a_damaged_checkpoint_is_not_picked(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path, "uid-1", keep=2)
    first = await store.save(state(10), save_ranks)
    second = await store.save(state(20), save_ranks)
    rank = second.trainer_folder / "rank-0.pt"
    if damage == "missing file":
        rank.unlink()
    elif damage == "short file":
        rank.write_bytes(b"w")
    else:
        (second.folder / "manifest.json").write_text("{")
    assert store.newest() == first


async def test_another_runs_checkpoint_is_taken_by_path_only(tmp_path: Path) -> None:
    other = await CheckpointStore(tmp_path, "uid-1", keep=2).save(state(10), save_ranks)
    store = CheckpointStore(tmp_path, "uid-2", keep=2)
    assert store.resolve("Auto") is None
    assert store.resolve("Never") is None
    assert store.resolve(str(other.folder)) == other


def test_a_path_without_a_checkpoint_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"spec\.checkpoint\.resume.*no complete checkpoint"):
        CheckpointStore(tmp_path, "uid-1", keep=2).resolve(str(tmp_path / "nothing"))


async def test_the_newest_ones_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, "uid-1", keep=2)
    for step in (10, 20, 100):
        await store.save(state(step), save_ranks)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-100", "step-20"]


async def test_half_written_ones_are_cleared_away_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "step-15" / "trainer").mkdir(parents=True)
    await CheckpointStore(tmp_path, "uid-1", keep=2).save(state(20), save_ranks)
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-20"]


async def test_other_runs_checkpoints_are_not_deleted(tmp_path: Path) -> None:
    await CheckpointStore(tmp_path, "uid-1", keep=1).save(state(10), save_ranks)
    await CheckpointStore(tmp_path, "uid-2", keep=1).save(state(20), save_ranks)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-10", "step-20"]


async def test_saving_a_step_again_keeps_what_is_there(tmp_path: Path) -> None:
    async def must_not_run(folder: Path) -> None:
        raise AssertionError(folder)

    store = CheckpointStore(tmp_path, "uid-1", keep=2)
    assert await store.save(state(10), save_ranks) == await store.save(state(10), must_not_run)


async def test_the_manifest_names_every_file_and_the_run(tmp_path: Path) -> None:
    saved = await CheckpointStore(tmp_path, "uid-1", keep=2).save(state(10), save_ranks)
    manifest = json.loads((saved.folder / "manifest.json").read_text())
    assert manifest["runUid"] == "uid-1"
    assert sorted(manifest["files"]) == ["state.json", "trainer/rank-0.pt"]


def test_the_folder_of_a_run_tells_name_and_uid() -> None:
    assert folder_of("/checkpoints", "lake", "0123456789ab") == Path("/checkpoints/lake-01234567")
    assert folder_of("file:///data", "lake", "") == Path("/data/lake-local")
    with pytest.raises(InvalidConfig, match=r"spec\.checkpoint\.uri"):
        folder_of("s3://bucket", "lake", "")
