"""fresh.sh lists what it will remove and asks.

It touches nothing while one of our processes is alive.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from devcluster import prerequisites
from devcluster.settings import Settings
from devcluster.shell import CommandFailed, DevclusterError
from testcluster import ROOT


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The tool, with a /tmp of its own and without Docker, kind and live processes."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    import fresh

    monkeypatch.setattr(fresh, "TMP", tmp_path / "tmp")
    monkeypatch.setenv("AGENTICRUN_DEVCLUSTER_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(fresh, "alive_processes", lambda name: [])
    return fresh


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with our cache and those of Go, uv and pip, each with a file of 200 kB."""
    home = tmp_path / "home"
    for name in ("agenticrun/bin", "go-build", "uv", "pip"):
        (home / ".cache" / name).mkdir(parents=True)
        (home / ".cache" / name / "file").write_bytes(os.urandom(200_000))
    return home


@pytest.fixture
def settings(tmp_path: Path, home: Path) -> Settings:
    """A clone with an environment, outputs of runs and a link to engines of another clone."""
    clone = tmp_path / "clone"
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / "runs").mkdir()
    (tmp_path / "shared-engines" / "vllm").mkdir(parents=True)
    (clone / ".engines").symlink_to(tmp_path / "shared-engines")
    (tmp_path / "tmp" / "arun-17-x").mkdir(parents=True)
    (tmp_path / "tmp" / "other").mkdir()
    return Settings(clone, home / ".cache" / "agenticrun", tmp_path / "state")


def names(fresh: ModuleType, settings: Settings, home: Path) -> list[str]:
    return [item.name.split()[0] for item in fresh.listing(settings, {"HOME": str(home)})]


def test_a_dry_run_lists_everything_with_its_size_and_removes_nothing(
    tmp_path: Path, home: Path
) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "AGENTICRUN_DEVCLUSTER_STATE": str(tmp_path / "state"),
    }
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "tools", clone / "tools", ignore=shutil.ignore_patterns("go", "docs"))
    (clone / "runs").mkdir()
    done = subprocess.run(
        [clone / "tools/fresh.sh", "--dry-run"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = {line.split()[2]: line for line in done.stdout.splitlines() if " MB  /" in line}
    assert "0.2 MB" in lines[f"{home}/.cache/agenticrun"]
    assert "shared with other projects" in lines[f"{home}/.cache/uv"]
    assert "shared with other projects" not in lines[f"{home}/.cache/agenticrun"]
    assert f"{clone}/runs (runs of this clone)" in done.stdout
    assert len(list((home / ".cache").iterdir())) == 4


def test_the_listing_has_what_is_there_and_nothing_else(
    fresh: ModuleType, settings: Settings, home: Path, tmp_path: Path
) -> None:
    found = names(fresh, settings, home)
    expected = [
        settings.cache,
        *(settings.repository / name for name in (".venv", ".engines", "runs")),
    ]
    expected += [tmp_path / "tmp" / "arun-17-x"]
    expected += [home / ".cache" / name for name in ("go-build", "uv", "pip")]
    assert [name for name in found if name != "/var/lib/containers/cache"] == list(
        map(str, expected)
    )


def test_with_yes_all_of_it_goes_but_never_what_a_link_leads_to_and_again_is_no_error(
    fresh: ModuleType,
    settings: Settings,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    listing = fresh.listing
    monkeypatch.setattr(
        fresh,
        "listing",
        lambda *ignored: [
            item for item in listing(settings, {"HOME": str(home)}) if str(tmp_path) in item.name
        ],
    )
    assert fresh.main(["--yes"]) == 0
    assert names(fresh, settings, home) in ([], ["/var/lib/containers/cache"])
    assert (tmp_path / "shared-engines" / "vllm").is_dir()
    assert (tmp_path / "tmp" / "other").is_dir()
    assert fresh.main(["--yes"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_caches_of_other_projects_can_be_kept(
    fresh: ModuleType, settings: Settings, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [
        item for item in fresh.listing(settings, {"HOME": str(home)}) if str(home) in item.name
    ]
    monkeypatch.setattr(fresh, "listing", lambda *ignored: items)
    assert fresh.main(["--yes", "--keep-shared"]) == 0
    assert sorted(path.name for path in (home / ".cache").iterdir()) == ["go-build", "pip", "uv"]


def test_caches_are_where_the_environment_says(fresh: ModuleType, tmp_path: Path) -> None:
    environment = {"GOPATH": "/a:/b", "GOCACHE": "/c", "UV_CACHE_DIR": "/d", "XDG_CACHE_HOME": "/x"}
    places = fresh.shared_caches(environment, tmp_path)
    assert [str(place) for place in places.values()] == ["/a/pkg/mod", "/c", "/d", "/x/pip"]


@pytest.mark.parametrize("answer", ["", "n", "no"])
def test_without_a_yes_nothing_goes(
    fresh: ModuleType, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    def remove() -> None:
        raise AssertionError("removed")

    monkeypatch.setattr(fresh, "listing", lambda *ignored: [fresh.Item("thing", 1, remove)])
    monkeypatch.setattr(fresh.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: answer)
    assert fresh.main([]) == 1


def test_without_a_terminal_it_does_not_ask(
    fresh: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh, "listing", lambda *ignored: [fresh.Item("thing", 1, print)])
    monkeypatch.setattr(fresh.sys.stdin, "isatty", lambda: False, raising=False)
    with pytest.raises(SystemExit, match="2"):
        fresh.main([])


def test_nothing_is_touched_while_a_run_is_alive(
    fresh: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fresh, "alive_processes", lambda name: ["process 7: agenticrun run"])
    monkeypatch.setattr(fresh, "listing", lambda *ignored: pytest.fail("not even looked at"))
    assert fresh.main(["--yes"]) == 1
    assert "process 7" in capsys.readouterr().out


def test_live_processes_are_found_by_what_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import fresh

    (tmp_path / "clone/tools/devcluster").mkdir(parents=True)
    proc = tmp_path / "proc"

    def process(
        pid: int, *command: str, where: str = "clone", parent: int = 1, pod: str = ""
    ) -> None:
        folder = proc / str(pid)
        folder.mkdir(parents=True)
        (folder / "cmdline").write_bytes("\0".join(command).encode())
        (folder / "stat").write_text(f"{pid} (a b) S {parent} 0")
        (folder / "cgroup").write_text(f"1:cpu:/{pod}\n")
        (folder / "cwd").symlink_to(tmp_path / where)

    process(10, "python3", "/x/tools/devcluster", "up")
    process(11, "python3", "tools/fresh.py", parent=10)
    monkeypatch.setattr(os, "getpid", lambda: 11)
    process(20, "/x/.venv/bin/python", "/x/.venv/bin/agenticrun", "run", "-f", "a.yaml")
    process(21, "python", "-m", "agenticrun_workers.driver", where="elsewhere")
    process(22, "python", "-m", "agenticrun_workers.driver", pod="agenticrun/kubepods/pod1")
    process(23, "python", ".venv/bin/pytest", "tests/unit")
    process(24, "python", "-m", "pytest", where="elsewhere")
    process(25, "vim", "docs/agenticrun.md")
    process(26, "python3", "tools/demo.py")
    (proc / "27").mkdir()  # it has just ended
    (proc / "self").mkdir()
    found = fresh.alive_processes("agenticrun", proc)
    assert [line.partition(":")[0].split()[1] for line in found] == ["20", "21", "23", "26"]


def test_a_run_in_the_cluster_that_has_not_finished_is_alive(
    fresh: ModuleType, settings: Settings
) -> None:
    kubectl = settings.cache / "bin" / "current" / "kubectl"
    kubectl.parent.mkdir(parents=True)
    runs = [
        f'{{"metadata": {{"namespace": "n", "name": "{phase}"}}, "status": {{"phase": "{phase}"}}}}'
        for phase in ("Running", "Succeeded", "Failed", "Pending")
    ]
    kubectl.write_text(f"#!/bin/sh\necho '{{\"items\": [{', '.join(runs)}]}}'\n")
    kubectl.chmod(0o755)
    assert fresh.alive_runs(settings) == []
    settings.state.mkdir()
    settings.kubeconfig.touch()
    assert [line.split()[1] for line in fresh.alive_runs(settings)] == ["n/Running", "n/Pending"]


@pytest.mark.parametrize("variable", ["AGENTICRUN_CACHE", "GOCACHE"])
def test_a_folder_that_holds_the_home_or_the_clone_is_refused(
    fresh: ModuleType, settings: Settings, home: Path, variable: str
) -> None:
    environment = {"HOME": str(home), variable: str(home)}
    if variable == "AGENTICRUN_CACHE":
        settings = Settings(settings.repository, home, settings.state)
    with pytest.raises(DevclusterError, match="more than ours"):
        fresh.listing(settings, environment)


class Debian:
    """dpkg and apt-get of a small machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.depends = {"bash": set[str](), "libc": set[str]()}
        self.archive = {
            "buildah": {"libgpg", "runc"},
            "runc": set[str](),
            "libgpg": {"libc"},
            "docker": {"runc"},
        }
        monkeypatch.setattr(prerequisites, "run", self.run)

    def run(self, argv: Sequence[str], env: object = None, log: object = None) -> str:
        words = [word for word in argv if not word.startswith("-")]
        if words[0] == "dpkg-query":
            field = "Essential" if "Essential" in argv[-1] else "Status"
            value = {"Essential": "yes", "Status": "installed"}[field]
            others = {"Essential": "no", "Status": "installed"}[field]
            return "".join(
                f"{name} {value if name == 'bash' else others}\n" for name in self.depends
            )
        if words[1] == "install":
            for name in words[2:]:
                self.install(name)
        if words[1] == "purge":
            going = self.with_dependents(set(words[2:]))
            if "--simulate" not in argv:
                self.depends = {
                    name: needs for name, needs in self.depends.items() if name not in going
                }
            return "Reading package lists...\n" + "".join(f"Purg {name} [1.0]\n" for name in going)
        return ""

    def install(self, name: str) -> None:
        self.depends[name] = self.archive[name]
        for needed in self.archive[name] - set(self.depends):
            self.install(needed)

    def with_dependents(self, names: set[str]) -> set[str]:
        more = {name for name, needs in self.depends.items() if needs & names}
        return names if more <= names else self.with_dependents(names | more)


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch) -> Debian:
    debian = Debian(monkeypatch)
    wanted = ["buildah"]
    monkeypatch.setattr(
        prerequisites,
        "missing_packages",
        lambda: [name for name in wanted if name not in debian.depends],
    )
    return debian


def test_up_records_the_packages_that_it_installs_with_what_they_bring_and_no_others(
    settings: Settings, debian: Debian
) -> None:
    prerequisites.install_packages(settings)
    assert settings.installed_packages.read_text().split() == ["buildah", "libgpg", "runc"]
    prerequisites.install_packages(settings)
    assert settings.installed_packages.read_text().split() == ["buildah", "libgpg", "runc"]


def test_exactly_the_recorded_packages_are_purged_and_the_record_goes_with_them(
    fresh: ModuleType, settings: Settings, debian: Debian
) -> None:
    prerequisites.install_packages(settings)
    (item,) = fresh.packages(settings)
    item.remove()
    assert set(debian.depends) == {"bash", "libc"}
    assert fresh.packages(settings) == []


def test_a_package_that_another_one_needs_by_now_stays(
    fresh: ModuleType, settings: Settings, debian: Debian
) -> None:
    prerequisites.install_packages(settings)
    debian.install("docker")
    (item,) = fresh.packages(settings)
    assert "others need them: runc" in item.name
    item.remove()
    assert set(debian.depends) == {"bash", "libc", "docker", "runc"}


def test_what_the_system_cannot_do_without_is_never_purged(debian: Debian) -> None:
    assert prerequisites.purgeable(["bash", "gone"]) == []


def test_a_package_that_apt_cannot_see_how_to_remove_stays(
    debian: Debian, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(argv: Sequence[str], env: object = None, log: object = None) -> str:
        if "--simulate" in argv and "libc" in argv:
            raise CommandFailed("unmet dependencies")
        return debian.run(argv)

    debian.install("runc")
    monkeypatch.setattr(prerequisites, "run", refuse)
    assert prerequisites.purgeable(["libc", "runc"]) == ["runc"]
