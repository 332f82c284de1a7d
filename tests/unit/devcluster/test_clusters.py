"""Which cluster a machine gets, and what is said when it gets none."""

import json
import shutil
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from devcluster import cli, clusters, prerequisites
from devcluster.clusters import ContextCluster, HostCluster, KindCluster, choose
from devcluster.containerd import write_image
from devcluster.node import mounts_below
from devcluster.recipes import Recipe
from devcluster.settings import Settings
from devcluster.shell import DevclusterError, NoClusterPossible, write_if_changed


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without Docker where we are root."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(prerequisites, "host_refusal", lambda: None)
    return monkeypatch


def with_kind(machine: pytest.MonkeyPatch, *, docker_answers: bool) -> None:
    """Puts kind on PATH."""
    machine.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    machine.setattr(clusters, "succeeds", lambda argv: docker_answers)


def test_a_named_context_comes_first(settings: Settings, machine: pytest.MonkeyPatch) -> None:
    with_kind(machine, docker_answers=True)
    assert isinstance(choose(replace(settings, context="lab")), ContextCluster)


def test_kind_comes_before_the_host_where_docker_answers(
    settings: Settings, machine: pytest.MonkeyPatch
) -> None:
    with_kind(machine, docker_answers=True)
    assert isinstance(choose(settings), KindCluster)


def test_docker_that_does_not_answer_is_no_docker(
    settings: Settings, machine: pytest.MonkeyPatch
) -> None:
    with_kind(machine, docker_answers=False)
    assert isinstance(choose(settings), HostCluster)


def test_a_host_cluster_that_exists_stays_the_choice_when_docker_appears(
    settings: Settings, machine: pytest.MonkeyPatch
) -> None:
    settings.state.mkdir()
    with_kind(machine, docker_answers=True)
    assert isinstance(choose(settings), HostCluster)


def test_where_none_is_possible_one_line_says_why(
    settings: Settings, machine: pytest.MonkeyPatch
) -> None:
    machine.setattr(prerequisites, "host_refusal", lambda: "not root")
    with pytest.raises(NoClusterPossible, match="not root") as caught:
        choose(settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mask", "lacking"),
    [
        ("000001fffeffffff", []),
        ("00000000a80425fb", ["CAP_NET_ADMIN", "CAP_SYS_ADMIN"]),
        ("0000000000001000", ["CAP_SYS_ADMIN"]),
    ],
)
def test_a_container_without_the_rights_of_a_node_is_recognised(
    mask: str, lacking: list[str]
) -> None:
    assert prerequisites.lacking_capabilities(f"Name:\tx\nCapEff:\t{mask}\n") == lacking


def test_a_cluster_that_is_down_has_no_kubeconfig(settings: Settings) -> None:
    with pytest.raises(DevclusterError, match="down"):
        HostCluster(settings).kubeconfig()


def test_command_line_ends_with_3_where_no_cluster_is_possible(
    machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.delenv("CONTEXT", raising=False)
    machine.setenv("AGENTICRUN_DEVCLUSTER_STATE", "/nonexistent")
    machine.setattr(prerequisites, "host_refusal", lambda: "not root")
    assert cli.main(["up"]) == 3
    assert capsys.readouterr().err.count("\n") == 1


class Publishes:
    """A cluster that names the source tree as the reference of each image."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def publish(self, recipes: Sequence[Recipe]) -> dict[str, str]:
        return {recipe.name: str(self._settings.repository) for recipe in recipes}


@pytest.mark.parametrize("named", [True, False])
def test_images_are_built_from_the_source_tree_that_is_named(
    named: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "choose", Publishes)
    assert cli.main(["images", *(["--source", str(tmp_path)] if named else [])]) == 0
    root = tmp_path if named else Settings.from_environment({}).repository
    assert json.loads(capsys.readouterr().out) == {"operator": str(root), "worker": str(root)}


def test_a_folder_of_the_users_is_built_and_its_reference_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "choose", Publishes)
    folder = tmp_path / "games"
    folder.mkdir()
    with pytest.raises(SystemExit):
        cli.main(["image", str(folder)])
    assert f"there is no file {folder / 'Dockerfile'}" in capsys.readouterr().err
    (folder / "Dockerfile").write_text("FROM x")
    assert cli.main(["image", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"


def test_a_cluster_that_takes_no_images_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CONTEXT", "lab")
    monkeypatch.delenv("IMAGE_REGISTRY", raising=False)
    (tmp_path / "Dockerfile").write_text("FROM x")
    assert cli.main(["image", str(tmp_path)]) == 1
    assert "set IMAGE_REGISTRY" in capsys.readouterr().err


@dataclass
class Troubled:
    """A cluster that tells these problems, one look after the other, and none when all are told."""

    tells: list[list[str]]
    name: str = "troubled"

    def problems(self) -> list[str]:
        return self.tells.pop(0) if self.tells else []


def test_status_waits_for_problems_that_pass_if_told_so_but_not_for_a_cluster_that_is_down(
    machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def status(*tells: list[str], wait: str) -> int:
        machine.setattr(cli, "choose", lambda settings: Troubled(list(tells)))
        return cli.main(["status", "--wait", wait])

    machine.setattr(time, "sleep", lambda seconds: None)
    assert status(["the node is not Ready"], wait="60") == 0
    assert status(["the node is not Ready"], wait="0") == 1
    assert status(["down"], wait="60") == 1
    assert [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()] == [
        "up",
        "the node is not Ready",
        "down",
    ]


def test_settings_come_from_the_environment() -> None:
    settings = Settings.from_environment(
        {
            "HOME": "/home/x",
            "AGENTICRUN_CACHE": "/cache",
            "AGENTICRUN_DEVCLUSTER_STATE": "/state",
            "CONTEXT": "lab",
            "IMAGE_REGISTRY": "r/",
        }
    )
    assert (settings.cache, settings.state, settings.context, settings.image_registry) == (
        Path("/cache"),
        Path("/state"),
        "lab",
        "r",
    )
    assert Settings.from_environment({"HOME": "/home/x"}).cache == Path("/home/x/.cache/agenticrun")


def test_the_repository_is_found_from_the_tools_place() -> None:
    assert (Settings.from_environment({}).repository / "images" / "worker" / "Dockerfile").is_file()


def test_only_mounts_below_the_folder_are_ours(tmp_path: Path) -> None:
    table = tmp_path / "mounts"
    table.write_text(
        "a /state/x ext4\nb /state ext4\nc /state-other/y ext4\nd /state/with\\040space ext4\n"
    )
    assert mounts_below(Path("/state"), table) == ["/state/x", "/state/with space"]


def test_a_file_is_rewritten_only_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    assert write_if_changed(path, "a")
    stamp = path.stat().st_mtime_ns
    assert not write_if_changed(path, "a")
    assert path.stat().st_mtime_ns == stamp
    assert write_if_changed(path, "b")


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    def write(writer: int) -> None:
        for number in range(200):
            write_if_changed(tmp_path / "file", f"{writer}-{number}")

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(4)))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_static_image_holds_its_program_as_an_executable(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"ELF")
    target = tmp_path / "image.tar"
    write_image(target, "localhost/x:1", {"/manager": program}, ["/manager"])
    with tarfile.open(target) as image:
        manifest = json.load(image.extractfile("manifest.json") or pytest.fail("no manifest"))
        assert manifest[0]["RepoTags"] == ["localhost/x:1"]
        layer = image.extractfile(manifest[0]["Layers"][0])
        with tarfile.open(fileobj=layer) as files:
            assert files.getmember("manager").mode == 0o755


def test_parts_are_refused_where_the_cluster_is_not_ours(
    settings: Settings, machine: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DevclusterError, match="install these in context lab yourself"):
        ContextCluster(replace(settings, context="lab")).up(("kueue",))


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["up", "--with", "kueue,kwok"])
    assert "no part 'kwok': there are kueue, network-policy" in capsys.readouterr().err
