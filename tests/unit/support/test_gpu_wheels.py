"""Wheels that no one can read fail the tests that need them, and say what to do."""

from __future__ import annotations

import urllib.error
from pathlib import Path

import pytest

import gpu_wheels
from gpu_wheels import NoIndex, Wheel, locked_wheel


@pytest.fixture(autouse=True)
def without_index_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(gpu_wheels, "CACHE", tmp_path)
    monkeypatch.setattr("urllib.request.urlopen", fail)
    locked_wheel.cache_clear()


def test_without_the_index_a_wheel_is_not_skipped_but_fails() -> None:
    with pytest.raises(NoIndex, match=r"cannot be read .*no route.*run it once where the package"):
        locked_wheel("sglang", "torch-memory-saver")


def test_what_the_cache_has_needs_no_index(tmp_path: Path) -> None:
    (tmp_path / "toy-1/files").mkdir(parents=True)
    (tmp_path / "toy-1/files/toy.py").write_text("x")
    wheel = Wheel("toy-1.whl", "https://nowhere/toy-1.whl", 1000)
    assert wheel.file("toy.py").read_text() == "x"
    with pytest.raises(NoIndex):
        wheel.file("other.py")


def test_a_package_that_the_lock_does_not_have_is_named() -> None:
    with pytest.raises(AssertionError, match=r"locks/sglang\.txt has no nothing"):
        locked_wheel("sglang", "nothing")
