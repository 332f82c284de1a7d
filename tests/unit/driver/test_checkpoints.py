"""Checkpoints: atomic, never another run's, never damaged; with and without rename."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from agenticrun_api import parse_run
from agenticrun_api.names import WORK_DIR
from agenticrun_workers.driver import checkpoints
from agenticrun_workers.driver.checkpoints import (
    Checkpoint,
    CheckpointNotSaved,
    CheckpointStore,
    DriverState,
    IsDurable,
    cluster_folders,
    folder_of,
)
from agenticrun_workers.driver.outcome import report_of
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.storage import MODULE_RECORD, DamagedFile, FileEntry, Folder
from module_savers import save_whole
from runs import run_with


@pytest.fixture(params=["local", "memory"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path / "base" if request.param == "local" else f"memory://{uuid.uuid4()}")
    yield folder
    folder.delete()


def state(step: int) -> DriverState:
    baselines = {"val/A/random_success": 0.02}
    return DriverState(
        step,
        step * 16,
        again=(3, 5),
        best_success=0.5,
        baselines=baselines,
        parts={"kl": {"coef": 0.1}},
    )


async def write_shard(folder: str) -> None:
    """A module's rank writes a shard and, as real ones do, a record of it."""
    entry = Folder(folder).write("rank-0.pt", folder.encode())
    Folder(folder).write(
        MODULE_RECORD, json.dumps({"ranks": 1, "files": {"rank-0.pt": entry.to_json()}}).encode()
    )


async def read_shard(folder: str) -> None:
    """A module's rank loads its shard, checking it."""
    record = json.loads(Folder(folder).read(MODULE_RECORD))
    with Folder(folder).open_verified(
        "rank-0.pt", FileEntry.from_json(record["files"]["rank-0.pt"])
    ):
        pass


SAVE = {"actor_train": write_shard, "critic": write_shard}
LOAD = {"actor_train": read_shard, "critic": read_shard}


def a_store(base: Folder, uid: str = "uid-1", keep: int = 2) -> CheckpointStore:
    """As a new attempt makes it."""
    return CheckpointStore(base.uri, uid, keep)


class Killed(BaseException):
    """The driver dies here."""


async def killed(folder: str) -> None:
    Folder(folder).write("rank-0.pt", b"half")
    raise Killed


async def must_not_run(folder: str) -> None:
    raise AssertionError(folder)


async def restored_step(store: CheckpointStore, resume: str = "Auto") -> int | None:
    found = await store.restore(resume, LOAD)
    return found[1].step if found else None


async def test_a_saved_state_is_read_back(base: Folder) -> None:
    saved = await save_whole(a_store(base), state(10), SAVE)
    assert await a_store(base).restore("Auto", LOAD) == (saved, state(10))
    assert a_store(base).newest() == saved


async def test_each_module_has_a_folder_of_its_own(base: Folder) -> None:
    saved = await save_whole(a_store(base), state(10), SAVE)
    loaded: list[str] = []

    async def note(folder: str) -> None:
        loaded.append(folder)

    await a_store(base).restore("Auto", {"critic": note})
    assert loaded == [f"{base}/step-10/critic"] == [saved.module_folder("critic")]


async def test_nothing_saved_begins_anew(base: Folder) -> None:
    assert await a_store(base).restore("Auto", LOAD) is None


async def test_a_save_that_dies_half_way_is_never_picked_and_is_overwritten(base: Folder) -> None:
    store = a_store(base)
    first = await save_whole(store, state(10), SAVE)
    with pytest.raises(Killed):
        await save_whole(store, state(20), SAVE | {"critic": killed})
    assert a_store(base).newest() == first
    again = a_store(base)
    assert await restored_step(again) == 10
    await save_whole(again, state(20), SAVE)
    assert await restored_step(a_store(base)) == 20


async def test_the_manifest_is_written_last(base: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write = Folder.write

    def noted(folder: Folder, name: str, data: bytes) -> FileEntry:
        written.append(name)
        return write(folder, name, data)

    monkeypatch.setattr(Folder, "write", noted)
    await save_whole(a_store(base), state(10), SAVE)
    assert written[-1] == "manifest.json"


async def test_the_manifest_names_the_run_the_modules_and_every_file_with_its_checksum(
    base: Folder,
) -> None:
    saved = Folder((await save_whole(a_store(base), state(10), SAVE)).folder)
    manifest = json.loads(saved.read("manifest.json"))
    assert (manifest["runUid"], manifest["step"]) == ("uid-1", 10)
    assert manifest["modules"] == {"actor_train": {"ranks": 1}, "critic": {"ranks": 1}}
    assert manifest["versions"].keys() == {"agenticrun", "python"}
    files = {name: FileEntry.from_json(entry) for name, entry in manifest["files"].items()}
    assert files.keys() == saved.sizes().keys() - {"manifest.json"}
    assert files == {name: saved.checksum(name) for name in files}


DAMAGES = [
    "missing shard",
    "short shard",
    "altered shard",
    "altered state",
    "altered record",
    "broken manifest",
]


def damage(checkpoint: Checkpoint, kind: str) -> None:
    shard = Folder(checkpoint.module_folder("critic"))
    folder = Folder(checkpoint.folder)
    match kind:
        case "missing shard":
            shard.remove("rank-0.pt")
        case "short shard":
            shard.write("rank-0.pt", b"w")
        case "altered shard":
            shard.write("rank-0.pt", shard.read("rank-0.pt")[:-1] + b"?")
        case "altered state":
            folder.write("state.json", folder.read("state.json").replace(b"0.5", b"0.6"))
        case "altered record":
            shard.write(MODULE_RECORD, shard.read(MODULE_RECORD).replace(b"1,", b"2,"))
        case _:
            folder.write("manifest.json", b"{")


NAMED = {
    "shard": "critic/rank-0.pt",
    "state": "state.json",
    "record": "critic/module.json",
    "manifest": "manifest.json",
}


@pytest.mark.parametrize("kind", DAMAGES)
async def test_auto_falls_back_to_the_newest_undamaged_one_and_says_so(
    base: Folder, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = a_store(base, keep=3)
    for step in (10, 20, 30):
        damage_me = await save_whole(store, state(step), SAVE)
    damage(damage_me, kind)
    with caplog.at_level(logging.INFO):
        assert await restored_step(a_store(base)) == 20
    assert f"step-30/{NAMED[kind.split()[1]]}" in caplog.text
    assert "step-20 (step 20), the newest that is not damaged" in caplog.text


@pytest.mark.parametrize("kind", DAMAGES)
async def test_if_all_are_damaged_the_run_does_not_silently_begin_anew(
    base: Folder, kind: str
) -> None:
    damage(await save_whole(a_store(base), state(10), SAVE), kind)
    with pytest.raises(
        InvalidConfig,
        match=rf"spec\.checkpoint\.resume: .*{NAMED[kind.split()[1]]}.* set Never to start over",
    ):
        await restored_step(a_store(base))


async def test_a_named_checkpoint_that_is_damaged_is_a_config_error_that_names_the_file(
    base: Folder,
) -> None:
    store = a_store(base)
    await save_whole(store, state(10), SAVE)
    second = await save_whole(store, state(20), SAVE)
    damage(second, "altered shard")
    with pytest.raises(
        InvalidConfig, match=r"step-20/critic/rank-0.pt was altered: its checksum is"
    ):
        await restored_step(store, second.folder)


async def test_a_checkpoint_of_another_format_is_refused_by_its_number(base: Folder) -> None:
    saved = await save_whole(a_store(base), state(10), SAVE)
    manifest = json.loads(Folder(saved.folder).read("manifest.json"))
    Folder(saved.folder).write("manifest.json", json.dumps({**manifest, "format": 99}).encode())
    with pytest.raises(InvalidConfig, match="has format 99; this version of AgenticRun reads 2"):
        await restored_step(a_store(base))


async def test_another_model_is_no_damage_and_no_reason_to_fall_back(base: Folder) -> None:
    store = a_store(base)
    await save_whole(store, state(10), SAVE)
    await save_whole(store, state(20), SAVE)

    async def other_model(folder: str) -> None:
        raise InvalidConfig("spec.checkpoint.resume", "another model")

    with pytest.raises(InvalidConfig, match="another model"):
        await store.restore("Auto", {"actor_train": other_model})


async def test_a_shard_that_vanishes_while_it_is_saved_publishes_nothing(base: Folder) -> None:
    async def vanishing(folder: str) -> None:
        await write_shard(folder)
        Folder(folder).remove("rank-0.pt")

    with pytest.raises(DamagedFile, match=r"actor_train/rank-0.pt is missing"):
        await save_whole(a_store(base), state(10), {"actor_train": vanishing})
    assert a_store(base).newest() is None


async def test_another_runs_checkpoint_is_taken_by_path_only(base: Folder) -> None:
    other = await save_whole(a_store(base), state(10), SAVE)
    store = a_store(base, "uid-2")
    assert await restored_step(store) is None
    assert await restored_step(store, "Never") is None
    assert await store.restore(other.folder, LOAD) == (other, state(10))


async def test_a_path_without_a_checkpoint_is_a_config_error(base: Folder) -> None:
    with pytest.raises(InvalidConfig, match=r"spec\.checkpoint\.resume.*no complete checkpoint"):
        await restored_step(a_store(base), f"{base}/nothing")


async def test_the_newest_ones_are_kept(base: Folder) -> None:
    store = a_store(base)
    for step in (9, 10, 100):
        await save_whole(store, state(step), SAVE)
    assert sorted(base.folders()) == ["step-10", "step-100"]


async def test_a_damaged_one_does_not_count_as_kept(base: Folder) -> None:
    store = a_store(base)
    first = await save_whole(store, state(10), SAVE)
    damage(await save_whole(store, state(20), SAVE), "short shard")
    await save_whole(store, state(30), SAVE)
    assert Folder(first.folder).exists("manifest.json")


async def test_half_written_ones_are_cleared_away_by_the_next_save(base: Folder) -> None:
    (base / "step-15").write("actor_train/rank-0.pt", b"half")
    (base / "step-35").write("actor_train/rank-0.pt", b"half")
    await save_whole(a_store(base), state(20), SAVE)
    assert base.folders() == ["step-20"]


async def test_other_runs_checkpoints_are_not_deleted(base: Folder) -> None:
    for uid, step in (("uid-1", 10), ("uid-3", 30), ("uid-2", 20)):
        await save_whole(a_store(base, uid, keep=1), state(step), SAVE)
    assert sorted(base.folders()) == ["step-10", "step-20", "step-30"]


async def test_saving_a_step_again_keeps_what_is_there(base: Folder) -> None:
    store = a_store(base)
    saved = await save_whole(store, state(10), SAVE)
    assert await save_whole(store, state(10), {"actor_train": must_not_run}) == saved
    resumed = a_store(base)
    await resumed.restore("Auto", LOAD)
    assert await save_whole(resumed, state(10), {"actor_train": must_not_run}) == saved


async def test_a_run_that_goes_on_from_before_replaces_what_lies_ahead(base: Folder) -> None:
    store = a_store(base, keep=5)
    saved = [await save_whole(store, state(step), SAVE) for step in (10, 20, 30)]
    resumed = a_store(base, keep=5)
    await resumed.restore(saved[0].folder, LOAD)
    await save_whole(resumed, replace(state(20), best_success=0.75), SAVE)
    assert sorted(base.folders()) == ["step-10", "step-20"]
    found = await a_store(base).restore("Auto", LOAD)
    assert found is not None
    assert found[1].best_success == 0.75


async def test_a_fresh_start_never_takes_an_older_attempts_checkpoint_for_its_own(
    base: Folder,
) -> None:
    await save_whole(a_store(base, keep=1), state(10), SAVE)
    fresh = a_store(base, keep=1)
    await fresh.restore("Never", LOAD)
    await save_whole(fresh, replace(state(10), best_success=0.75), SAVE)
    found = await a_store(base).restore("Auto", LOAD)
    assert found is not None
    assert found[1].best_success == 0.75


def test_every_field_of_the_drivers_state_survives() -> None:
    full = state(7)
    assert DriverState.from_bytes(full.to_bytes()) == full


def test_a_part_that_json_cannot_hold_is_refused_when_it_is_saved() -> None:
    with pytest.raises(TypeError):
        replace(state(7), parts={"guards": {1, 2}}).to_bytes()


def test_the_folder_of_a_run_tells_name_and_uid() -> None:
    assert folder_of("/checkpoints", "lake", "0123456789ab") == "/checkpoints/lake-01234567"
    assert folder_of("/checkpoints/", "lake", "0123456789ab") == "/checkpoints/lake-01234567"
    assert folder_of("file:///data", "lake", "") == "/data/lake-local"
    assert (
        folder_of("s3://bucket/prefix", "lake", "0123456789ab")
        == "s3://bucket/prefix/lake-01234567"
    )


@pytest.mark.parametrize(
    ("uri", "problem"),
    [("nope://x", "Protocol not known: nope"), ("missing://x", "install no-such-driver")],
)
def test_a_place_without_a_driver_is_a_config_error_that_says_what_to_do(
    uri: str, problem: str
) -> None:
    fsspec.register_implementation(
        "missing", "no_such_driver.FileSystem", clobber=True, errtxt="install no-such-driver"
    )
    with pytest.raises(
        InvalidConfig,
        match=rf"spec\.checkpoint\.uri: {uri}.*: {problem}; use a folder or s3://bucket/prefix",
    ):
        folder_of(uri, "lake", "")


async def test_a_place_that_cannot_be_written_is_known_before_training_begins(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match=r"spec\.checkpoint\.uri: .*name a folder, not a file"):
        await CheckpointStore(tmp_path / "file" / "checkpoints", "uid-1", keep=2).restore(
            "Never", LOAD
        )


async def saved_by(
    root: Folder, run: str, step: int, at: str, monkeypatch: pytest.MonkeyPatch
) -> Checkpoint:
    """A checkpoint that the run `<name>-<uid>` saved at this time."""
    monkeypatch.setattr(checkpoints, "rfc3339", lambda now: at)
    return await save_whole(a_store(root / run, run), state(step), SAVE)


async def test_a_run_goes_on_from_the_last_checkpoint_of_earlier_runs_of_its_name(
    base: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    await saved_by(base, "lake-00000001", 90, "2026-01-01T00:00:00Z", monkeypatch)
    await saved_by(base, "lake-00000002", 10, "2026-01-02T00:00:00Z", monkeypatch)
    last = await saved_by(base, "lake-00000002", 20, "2026-01-03T00:00:00Z", monkeypatch)
    for other in ("lake-b-00000003", "pond-00000004", "lake-00000005x", "lake-local"):
        await saved_by(base, other, 50, "2026-01-04T00:00:00Z", monkeypatch)
    (base / "lake-00000006" / "step-70").write("actor_train/rank-0.pt", b"half")
    mine = base / "lake-00000009"
    assert await a_store(mine, "new").restore("FromPreviousRun", LOAD) == (last, state(20))
    assert await restored_step(a_store(mine, "new")) is None
    damage(last, "short shard")
    assert await restored_step(a_store(mine, "new"), "FromPreviousRun") == 10


async def test_what_earlier_runs_saved_is_never_deleted(
    base: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = await saved_by(base, "lake-00000001", 10, "2026-01-01T00:00:00Z", monkeypatch)
    mine = a_store(base / "lake-00000002", "new", keep=1)
    await mine.restore("FromPreviousRun", LOAD)
    for step in (11, 12):
        await save_whole(mine, state(step), SAVE)
    assert await a_store(base / "lake-00000003", "third").restore(earlier.folder, LOAD) is not None


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_run_without_a_previous_one_does_not_silently_begin_anew(
    base: Folder, damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = r"no earlier run of this name has a complete checkpoint in .*: set Auto"
    if damaged:
        saved = await saved_by(base, "lake-00000001", 10, "2026-01-01T00:00:00Z", monkeypatch)
        damage(saved, "broken manifest")
        words = r"no checkpoint is undamaged: .*lake-00000001/step-10/manifest.json"
    with pytest.raises(InvalidConfig, match=rf"spec\.checkpoint\.resume: {words}"):
        await restored_step(a_store(base / "lake-00000002"), "FromPreviousRun")


@pytest.mark.parametrize("by", ["FromPreviousRun", "path"])
async def test_a_restart_resumes_from_the_runs_own_newest_else_as_the_first_attempt(
    base: Folder, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = await saved_by(base, "lake-00000001", 10, "2026-01-01T00:00:00Z", monkeypatch)
    resume = earlier.folder if by == "path" else by
    mine = base / "lake-00000002"
    found = await a_store(mine, "new").restore(resume, LOAD, restarted=True)
    assert found == (earlier, state(10))
    own = await save_whole(a_store(mine, "new"), state(11), SAVE)
    assert await a_store(mine, "new").restore(resume, LOAD, restarted=True) == (own, state(11))
    damage(own, "short shard")
    with pytest.raises(InvalidConfig, match="no checkpoint is undamaged"):
        await a_store(mine, "new").restore(resume, LOAD, restarted=True)


async def test_a_restart_of_a_run_that_never_resumes_goes_on_from_its_own(base: Folder) -> None:
    assert await a_store(base).restore("Never", LOAD, restarted=True) is None
    own = await save_whole(a_store(base), state(10), SAVE)
    assert await a_store(base).restore("Never", LOAD, restarted=True) == (own, state(10))


@pytest.mark.parametrize(
    ("storage", "output", "checkpoints"),
    [
        ({"uri": "/data"}, "/data/lake-01234567", "/data/lake-01234567"),
        ({"uri": "memory://data"}, f"{WORK_DIR}/lake", "memory://data/lake-01234567"),
        ({"none": True}, f"{WORK_DIR}/lake-01234567", f"{WORK_DIR}/lake-01234567"),
    ],
)
def test_the_output_lies_with_the_checkpoints_unless_those_are_in_object_storage(
    storage: dict[str, Any], output: str, checkpoints: str
) -> None:
    document = run_with(("spec.checkpoint", storage), name="lake")
    document["metadata"]["uid"] = "0123456789ab"
    assert cluster_folders(parse_run(document)) == (Path(output), checkpoints)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
async def test_a_full_disk_is_named_with_the_folder_and_earlier_checkpoints_stay(
    tmp_path: Path, error: Exception
) -> None:
    async def full(folder: str) -> None:
        raise error

    store = a_store(Folder(tmp_path))
    await save_whole(store, state(1), SAVE)
    with pytest.raises(CheckpointNotSaved) as caught:
        await save_whole(store, state(2), {"actor_train": full})
    message = str(caught.value)
    assert message.startswith(f"the checkpoint of step 2 cannot be written to {tmp_path}/step-2: ")
    assert "No space left on device" in message
    assert "MiB free). Make room or correct the place, then resume" in message
    assert report_of(caught.value, 2).message == f"in step 2: {message}"
    found = await a_store(Folder(tmp_path)).restore("Auto", LOAD)
    assert found is not None
    assert found[1].step == 1


async def test_other_errors_of_a_save_stay_as_they_are(tmp_path: Path) -> None:
    async def broken(folder: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await save_whole(a_store(Folder(tmp_path)), state(2), {"actor_train": broken})


class Ranks:
    """A module whose ranks write in the background, until `error` or the end of `writing`."""

    def __init__(self) -> None:
        self.writing = True
        self.error: Exception | None = None

    async def save(self, folder: str) -> IsDurable:
        Folder(folder).write("rank-0.pt", b"half")

        async def is_durable() -> bool:
            if self.error is not None:
                raise self.error
            if not self.writing:
                await write_shard(folder)
            return not self.writing

        return is_durable


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setattr(checkpoints, "LONGEST_POLL_SECONDS", 0.001)
    return Ranks()


async def test_a_checkpoint_is_published_when_the_ranks_have_written_it(
    base: Folder, ranks: Ranks
) -> None:
    store = a_store(base, keep=1)
    before = await save_whole(store, state(10), SAVE)
    saving = asyncio.create_task(await store.save(state(20), {"actor_train": ranks.save}))
    await asyncio.sleep(0.05)
    assert not saving.done()
    assert a_store(base).newest() == before
    assert await restored_step(a_store(base)) == 10
    ranks.writing = False
    assert (await saving).step == 20
    assert await a_store(base).restore("Auto", {"actor_train": read_shard}) == (
        await saving,
        state(20),
    )
    assert base.folders() == ["step-20"]


async def test_the_drivers_state_is_that_of_the_moment_when_the_ranks_copied_theirs(
    base: Folder, ranks: Ranks
) -> None:
    now = state(10)
    publishes = await a_store(base).save(now, {"actor_train": ranks.save})
    now.baselines["val/A/warmup_success"] = 1.0
    now.parts["kl"]["coef"] = 9.0
    ranks.writing = False
    assert (await publishes).driver_state() == state(10)


async def test_a_driver_that_dies_while_ranks_write_leaves_the_checkpoint_before(
    base: Folder, ranks: Ranks
) -> None:
    store = a_store(base, keep=1)
    before = await save_whole(store, state(10), SAVE)
    saving = asyncio.create_task(await store.save(state(20), {"actor_train": ranks.save}))
    await asyncio.sleep(0.05)
    saving.cancel()
    await asyncio.wait([saving])
    again = a_store(base, keep=1)
    assert await again.restore("Auto", LOAD) == (before, state(10))
    await save_whole(again, state(20), SAVE)
    assert base.folders() == ["step-20"]


async def test_a_write_that_fails_in_the_background_has_the_error_of_any_other(
    tmp_path: Path, ranks: Ranks
) -> None:
    store = a_store(Folder(tmp_path))
    before = await save_whole(store, state(1), SAVE)
    publishes = await store.save(state(2), {"actor_train": ranks.save})
    ranks.error = OSError(28, "No space left on device")
    with pytest.raises(CheckpointNotSaved, match=r"of step 2 .*No space left.*MiB free"):
        await publishes
    publishes = await store.save(state(3), {"actor_train": ranks.save})
    ranks.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        await publishes
    assert a_store(Folder(tmp_path)).newest() == before
