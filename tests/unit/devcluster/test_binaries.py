"""Programs are cached by what they are made of, and built from committed, pinned modules."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import devcluster
from devcluster.binaries import (
    KWOK,
    MINIMUM_GO,
    PARTS,
    PROGRAMS,
    Binaries,
    GoProgram,
    module_key,
    recent_enough,
)
from devcluster.settings import (
    HELM_VERSION,
    KUBERAY_VERSION,
    KUBERNETES_VERSION,
    KUEUE_VERSION,
    Settings,
)

_GO = Path(devcluster.__file__).parent / "go"
_PROGRAM = GoProgram("tool", 1)
_ALL = (*PROGRAMS, *PARTS.values(), KWOK)


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """A Go module with one source file."""
    (tmp_path / "main.go").write_text("package main")
    (tmp_path / "go.mod").write_text("module x")
    return tmp_path


def test_key_is_stable_and_changes_with_the_source(module: Path) -> None:
    before = module_key(_PROGRAM, module)
    assert module_key(_PROGRAM, module) == before
    (module / "main.go").write_text("package main // changed")
    assert module_key(_PROGRAM, module) != before


def test_key_changes_with_the_build_flags(module: Path) -> None:
    assert module_key(_PROGRAM, module) != module_key(
        replace(_PROGRAM, variables=("version=2",)), module
    )


def test_key_tells_a_renamed_file(module: Path) -> None:
    before = module_key(_PROGRAM, module)
    (module / "main.go").rename(module / "other.go")
    assert module_key(_PROGRAM, module) != before


def test_every_program_has_its_committed_module() -> None:
    assert {program.name for program in _ALL} == {path.name for path in _GO.iterdir()}
    for program in _ALL:
        assert (_GO / program.name / "go.mod").is_file()
        if program.name != "pause":  # it needs the standard library only
            assert (_GO / program.name / "go.sum").is_file()


@pytest.mark.parametrize(
    ("program", "module", "version"),
    [
        ("kube-all", "k8s.io/kubernetes", KUBERNETES_VERSION),
        ("kuberay-operator", "github.com/ray-project/kuberay/ray-operator", KUBERAY_VERSION),
        ("helm", "helm.sh/helm/v3", HELM_VERSION),
        ("kueue", "sigs.k8s.io/kueue", KUEUE_VERSION),
    ],
)
def test_modules_pin_the_versions_that_the_settings_name(
    program: str, module: str, version: str
) -> None:
    assert re.search(
        rf"\b{re.escape(module)} {re.escape(version)}\b", (_GO / program / "go.mod").read_text()
    )


def test_modules_need_no_newer_go_than_the_tool_asks_for() -> None:
    for program in _ALL:
        needed = re.search(
            r"^go (\d+)\.(\d+)", (_GO / program.name / "go.mod").read_text(), re.MULTILINE
        )
        assert needed is not None
        assert (int(needed[1]), int(needed[2])) <= MINIMUM_GO


@pytest.mark.parametrize(
    ("version", "enough"),
    [
        ("go1.26.8", True),
        ("go1.26", True),
        ("go1.25.9", False),
        ("go2.0", True),
        ("devel go1.27-abc", True),
        ("", False),
    ],
)
def test_go_release_is_compared_by_number(version: str, enough: bool) -> None:
    assert recent_enough(version) is enough


def test_kubernetes_commands_are_names_of_one_file(settings: Settings) -> None:
    paths = Binaries(settings).paths()
    assert paths["kubelet"].parent == paths["kubectl"].parent == paths["kube-all"].parent


def test_kueue_image_tag_in_the_kustomization_is_the_pinned_version() -> None:
    text = (Path(devcluster.__file__).parent / "manifests/kueue/kustomization.yaml").read_text()
    assert f"newTag: {KUEUE_VERSION}" in text


def test_kuberay_image_tag_in_the_kustomization_is_the_pinned_version() -> None:
    text = (Path(devcluster.__file__).parent / "manifests/kuberay/kustomization.yaml").read_text()
    assert f"newTag: {KUBERAY_VERSION}" in text
