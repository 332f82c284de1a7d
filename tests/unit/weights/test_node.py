"""Versions in a folder: complete or not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agenticrun_workers.storage import DamagedFile, Folder
from agenticrun_workers.weights.node import publish_bucket, read_version, seal_version


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
