"""A node's memory: freed with its process; versions on disk: complete or not there."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.launch import ActorHandle, ActorOptions
from agenticrun_workers.launch.in_process import InProcessLauncher
from agenticrun_workers.storage import DamagedFile, Folder
from agenticrun_workers.weights.buckets import Bucket, TensorSpec, buckets_of
from agenticrun_workers.weights.node import (
    PREFIX,
    NodeWeights,
    SharedFolder,
    publish_bucket,
    read_version,
    seal_version,
)
from agenticrun_workers.weights.sync import FileSync
from waiting import eventually


def payload(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=1000, dtype=np.uint8)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_sealed_version_comes_back(tmp_path: Path, scheme: str) -> None:
    folder = Folder(str(tmp_path / "v1") if scheme == "file" else "memory://weights/v1")
    files = [publish_bucket(folder, index, payload(index), delta=index == 1) for index in range(3)]
    with pytest.raises(FileNotFoundError):
        list(read_version(folder))
    seal_version(folder, files)
    fetched = list(read_version(folder))
    assert [(found.index, found.delta) for found, _ in fetched] == [
        (0, False),
        (1, True),
        (2, False),
    ]
    for found, content in fetched:
        np.testing.assert_array_equal(content, payload(found.index))


def test_an_altered_file_is_found_out(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    seal_version(folder, [publish_bucket(folder, 0, payload(0), delta=False)])
    (tmp_path / "bucket-00000.data").write_bytes(payload(1).tobytes())
    with pytest.raises(DamagedFile, match=r"bucket-00000\.data was altered"):
        list(read_version(folder))


PROGRAM = """
import sys, time
from agenticrun_workers.weights.node import SharedFolder
folder = SharedFolder("drill")
(folder.path / "bucket").write_bytes(bytes(1000))
print(folder.path, flush=True)
time.sleep(600)
"""


def gone(path: Path) -> bool:
    return eventually(lambda: not path.exists(), 60, f"{path} is removed")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_killed_process(number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        assert path.name.startswith(f"{PREFIX}drill-")
        assert (path / "bucket").stat().st_size == 1000
        os.killpg(owner.pid, number)
        owner.wait()
        assert gone(path)


def test_a_deleted_folder_is_gone_at_once_and_may_be_deleted_again() -> None:
    folder = SharedFolder("drill")
    assert folder.path.is_dir()
    folder.delete()
    assert not folder.path.exists()
    folder.delete()


async def test_a_node_without_room_ends_the_run_with_the_field_to_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a constructor, the error would arrive as the death of the actor, and be retried."""

    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    launcher = InProcessLauncher()
    nodes: list[ActorHandle[NodeWeights]] = []

    def spawn(node_id: str, run: str, buckets: tuple[Bucket, ...]) -> ActorHandle[NodeWeights]:
        nodes.append(launcher.start(ActorOptions(max_concurrency=2), NodeWeights, run, buckets))
        return nodes[-1]

    sync = FileSync("run", [], "home", spawn, bucket_bytes=1, delta=False)
    sync._buckets = buckets_of([TensorSpec("a", "F32", (4,))], 100)
    try:
        for place in ("home", "away"):
            with pytest.raises(InvalidConfig, match="raise shmSize"):
                await sync._nodes_of([place])
    finally:
        launcher.close()
