"""`make images REGISTRY=...` and `make image-list`: names, build arguments, digests."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

import images
import release
from agenticrun_api.version import __version__
from devcluster.recipes import ENGINES

ROOT = Path(__file__).resolve().parents[3]
MINE = "registry.example.org/agents"


class Docker:
    """Records commands; answers `inspect` with a digest made of the reference."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> str:
        self.commands.append(list(command))
        return json.dumps({"digest": f"sha256:{len(command[4])}"}) if "inspect" in command else ""


def run(*arguments: str, docker: Docker | None = None) -> int:
    return images.main(arguments, docker or Docker())


def test_the_list_has_every_image_of_an_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", f"{MINE}/") == 0
    listed = capsys.readouterr().out.splitlines()
    names = ("operator", "worker", "worker-sglang", "worker-vllm")
    assert listed[:-1] == [f"{MINE}/{name}:{__version__}" for name in names]
    assert re.fullmatch(r"quay\.io/kuberay/operator:v1\.\d+\.\d+", listed[-1])


def test_the_list_can_have_digests(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", MINE, "--tag", "7", "--engines", "", "--digests") == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0] == f"{MINE}/operator:7@sha256:{len(f'{MINE}/operator:7')}"
    assert len(listed) == 3
    assert all("@sha256:" in line for line in listed)


def test_a_build_makes_the_images_that_the_list_names(capsys: pytest.CaptureFixture[str]) -> None:
    docker = Docker()
    assert run("build", MINE, "--tag", "7", "--engines", "vllm", docker=docker) == 0
    operator, worker, vllm = docker.commands
    for command in docker.commands:
        assert command[:3] == ["docker", "build", "--file"]
        assert (ROOT / command[3]).is_file()
        assert command[-3:-1] == ["--tag", f"{MINE}/{command[-2].rpartition('/')[2]}"]
    assert [command[-2].rpartition("/")[2] for command in (operator, worker)] == [
        "operator:7",
        "worker:7",
    ]
    assert {"--build-arg=ENGINE=vllm", "--build-arg=ENGINE_LOCK=vllm"} <= set(vllm)
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == f"{MINE}/worker-vllm:7"
    assert f"--set registry={MINE} --set-string tag=7" in shown.err


def test_an_image_is_pushed_when_it_is_built() -> None:
    docker = Docker()
    assert run("build", MINE, "--engines", "", "--push", docker=docker) == 0
    assert [command[1] for command in docker.commands] == ["build", "push"] * 2
    assert docker.commands[1][-1] == docker.commands[0][-2]


def test_without_a_registry_nothing_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "registry", lambda: "")
    docker = Docker()
    assert run("build", docker=docker) == 1
    assert docker.commands == []
    assert "name the registry" in capsys.readouterr().err


def test_a_release_lists_its_own_images(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "registry", lambda: "ghcr.io/o/r")
    assert run("list") == 0
    assert capsys.readouterr().out.startswith(f"ghcr.io/o/r/operator:{__version__}\n")


def test_the_release_workflow_builds_the_images_of_the_list() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    built = {
        entry["image"]: (entry["file"], entry.get("engine", ""))
        for entry in workflow["jobs"]["image"]["strategy"]["matrix"]["include"]
    }
    assert built == {
        recipe.name: (recipe.dockerfile, recipe.arguments.get("ENGINE", ""))
        for recipe in images.recipes(ENGINES)
    }


def test_a_program_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(images.Refused, match="no-such-program is not installed"):
        images._run(["no-such-program", "inspect"])
    with pytest.raises(images.Refused, match="failed with 1"):
        images._run(["false"])
