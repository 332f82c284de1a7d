"""Variables of servers on GPUs: where the loader finds CUDA, and where compiled kernels stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from agenticrun_workers.inference import server_process
from agenticrun_workers.inference.server_process import KERNEL_CACHES, gpu_environment, inherited


@pytest.fixture(autouse=True)
def no_variables_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*KERNEL_CACHES, "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(server_process, "WORK_DIR", str(tmp_path / "scratch"))


@pytest.fixture
def python(tmp_path: Path) -> Path:
    (tmp_path / "toy/lib/python3.11/site-packages/nvidia/cu13/lib").mkdir(parents=True)
    return tmp_path / "toy/bin/python"


def test_libraries_of_the_engines_own_packages_come_before_those_of_the_image(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = str(python.parents[1] / "lib/python3.11/site-packages/nvidia/cu13/lib")
    assert gpu_environment(python)["LD_LIBRARY_PATH"] == ours
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64")
    assert gpu_environment(python)["LD_LIBRARY_PATH"] == f"{ours}:/usr/local/nvidia/lib64"


def test_an_engine_without_packages_of_cuda_has_the_libraries_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "LD_LIBRARY_PATH" not in gpu_environment(tmp_path / "none/bin/python")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64")
    found = gpu_environment(tmp_path / "none/bin/python")
    assert found["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"


def test_kernels_outlive_the_server_on_the_scratch_volume_of_its_pod(
    python: Path, tmp_path: Path
) -> None:
    folders = {gpu_environment(python)[name] for name in KERNEL_CACHES}
    assert len(folders) == len(KERNEL_CACHES)
    assert all(folder.startswith(f"{tmp_path}/home/.cache/agenticrun/") for folder in folders)
    (tmp_path / "scratch").mkdir()
    folders = {gpu_environment(python)[name] for name in KERNEL_CACHES}
    assert all(folder.startswith(f"{tmp_path}/scratch/kernels/") for folder in folders)


def test_a_cache_of_the_user_is_kept(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/cache/triton")
    assert "TRITON_CACHE_DIR" not in gpu_environment(python)
    assert inherited({"TRITON_CACHE_DIR": "/cache/triton"})["TRITON_CACHE_DIR"] == "/cache/triton"
