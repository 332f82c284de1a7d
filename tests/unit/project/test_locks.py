"""Versions that must agree: across the locks, and within one."""

from __future__ import annotations

import pytest

from gpu_wheels import locked_versions

NCCL = "nvidia-nccl-cu13"


@pytest.mark.parametrize("lock", ["workers", "sglang", "vllm", "trl"])
def test_trainers_and_engines_have_one_nccl(lock: str) -> None:
    """They form one communicator, for which NCCL refuses two versions."""
    assert locked_versions(lock)[NCCL] == locked_versions("dev")[NCCL]


def test_the_compiler_of_sglang_is_of_the_release_of_its_headers_and_its_runtime() -> None:
    versions = locked_versions("sglang")
    toolkit = ("runtime", "nvcc", "crt", "cccl", "nvrtc")
    names = [*(f"nvidia-cuda-{part}" for part in toolkit), "nvidia-nvvm"]
    releases = {name: versions[name].rpartition(".")[0] for name in names}
    assert set(releases.values()) == {"13.0"}, releases


def test_sglang_is_the_same_package_on_cpus_and_gpus() -> None:
    """Its tests run on CPUs; those of vLLM on another build, which is compared file by file."""
    assert locked_versions("sglang")["sglang"] == locked_versions("sglang-cpu")["sglang"]
