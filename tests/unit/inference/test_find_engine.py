"""The Python interpreter of an engine's server, and the check of the engine's version."""

from __future__ import annotations

from pathlib import Path

import pytest

from agenticrun_workers.inference import server_process
from agenticrun_workers.inference.engine import EngineStartError
from agenticrun_workers.inference.server_process import find_engine


@pytest.fixture(autouse=True)
def no_engines_but_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTICRUN_ENGINES", raising=False)
    monkeypatch.setattr(server_process, "IMAGE_ENGINES", tmp_path / "image")
    monkeypatch.setattr(server_process, "CHECKOUT_ENGINES", tmp_path / "checkout")


def install(home: Path, package: str, version: str) -> Path:
    """An environment as pip leaves it, as far as anybody looks."""
    metadata = (
        home / "toy/lib/python3.11/site-packages" / f"{package}-{version}.dist-info" / "METADATA"
    )
    metadata.parent.mkdir(parents=True)
    metadata.write_text(
        f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {version}\n"
    )
    (home / "toy/bin").mkdir()
    (home / "toy/bin/python").touch()
    return home / "toy/bin/python"


def test_the_folder_that_the_variable_names_comes_first_then_the_images_then_the_checkouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, image, checkout = (
        install(tmp_path / where, "toy", "1.2.3") for where in ("named", "image", "checkout")
    )
    assert find_engine("toy", ["toy"], "==1.2.3") == image
    (tmp_path / "image/toy").rename(tmp_path / "image/other")
    assert find_engine("toy", ["toy"], "==1.2.3") == checkout
    monkeypatch.setenv("AGENTICRUN_ENGINES", str(tmp_path / "named"))
    assert find_engine("toy", ["toy"], "==1.2.3") == named


def test_a_checkout_has_a_build_for_each_kind_of_device(tmp_path: Path) -> None:
    cpu, gpu = (install(tmp_path / where, "toy", "1") for where in ("checkout", "checkout/gpu"))
    assert find_engine("toy", ["toy"], "==1") == cpu
    assert find_engine("toy", ["toy"], "==1", gpus=2) == gpu
    (tmp_path / "checkout/gpu").rename(tmp_path / "checkout/other")
    with pytest.raises(EngineStartError, match=r"checkout/gpu/toy.*run `make engines GPUS=1`"):
        find_engine("toy", ["toy"], "==1", gpus=2)


def test_any_of_the_packages_may_provide_the_engine(tmp_path: Path) -> None:
    python = install(tmp_path / "checkout", "toy_cpu", "1.2.3+cpu")
    assert find_engine("toy", ["toy", "toy-cpu"], "==1.2.*") == python


def test_a_missing_environment_says_what_to_do() -> None:
    with pytest.raises(
        EngineStartError, match=r"engine toy is not installed.*make engines.*AGENTICRUN_ENGINES"
    ):
        find_engine("toy", ["toy"], "==1")


def test_an_environment_without_the_package_says_so(tmp_path: Path) -> None:
    install(tmp_path / "checkout", "other", "1")
    with pytest.raises(EngineStartError, match="holds no package toy"):
        find_engine("toy", ["toy"], "==1")


def test_another_version_is_refused_with_both_versions(tmp_path: Path) -> None:
    install(tmp_path / "checkout", "toy", "1.2.4")
    with pytest.raises(
        EngineStartError, match=r"holds toy 1\.2\.4, but AgenticRun was tested with toy ==1\.2\.3"
    ):
        find_engine("toy", ["toy"], "==1.2.3")
