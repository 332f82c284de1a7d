"""Set-up runs side by side: every line says of what, and a failure stops the rest at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from devcluster import prerequisites
from devcluster.clusters import ContextCluster, HostCluster
from devcluster.settings import Settings
from devcluster.shell import DevclusterError, NoClusterPossible
from processes import lives
from prometheus import fetch, refusal
from testcluster import ROOT
from waiting import eventually


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import prepare

    return prepare


def shell(line: str) -> tuple[str, str, str]:
    return ("bash", "-c", line)


def test_all_run_at_once_and_each_line_has_its_task(
    prepare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meet = "touch {0}/{1}; until [ -e {0}/{2} ]; do sleep 0.01; done; echo met {2}"
    commands = {
        "long-name": shell(meet.format(tmp_path, "a", "b")),
        "b": shell(meet.format(tmp_path, "b", "a")),
    }
    assert prepare.run_together(commands) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == [
        "b         | done in 0 s",
        "b         | met a",
        "long-name | done in 0 s",
        "long-name | met b",
    ]


def test_a_failure_stops_the_others_with_what_they_started_and_shows_its_own_output(
    prepare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = tmp_path / "pid"
    commands = {
        "sleeps": shell(f"sleep 600 & echo $! > {pid}.part; mv {pid}.part {pid}; wait"),
        "fails": shell(f"until [ -s {pid} ]; do sleep 0.01; done; echo disk is full >&2; exit 7"),
    }
    begun = time.monotonic()
    assert prepare.run_together(commands) == 7
    assert time.monotonic() - begun < 60
    out = capsys.readouterr().out
    assert out.rstrip().endswith("the end of its output:\ndisk is full")
    assert "sleeps | stopped" in out
    eventually(lambda: not lives(int(pid.read_text())), 60, "its child is gone")


def test_one_that_ignores_the_signal_is_killed(
    prepare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "STOP_SECONDS", 0.1)
    deaf = "import signal, time, pathlib; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    deaf += f"pathlib.Path({str(tmp_path / 'deaf')!r}).touch(); time.sleep(600)"
    commands = {
        "deaf": (sys.executable, "-c", deaf),
        "fails": shell(f"until [ -e {tmp_path}/deaf ]; do sleep 0.01; done; exit 1"),
    }
    assert prepare.run_together(commands) == 1


def test_a_silent_task_says_now_and_then_that_it_runs(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "SILENT_SECONDS", 0.2)
    assert prepare.run_together({"quiet": shell("sleep 1")}) == 0
    assert "quiet | running for" in capsys.readouterr().out


def test_a_task_that_leaves_a_process_behind_still_ends(
    prepare: ModuleType, tmp_path: Path
) -> None:
    assert prepare.run_together({"leaves": shell(f"sleep 600 & echo $! > {tmp_path}/pid")}) == 0
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_an_interrupt_stops_everything(tmp_path: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import prepare; sys.exit("
        "prepare.run_together({'s': ('bash', '-c', 'echo $$; exec sleep 600')}))"
    )
    command = [sys.executable, "-c", program, str(ROOT / "tools")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline().partition("| ")[2])
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    eventually(lambda: not lives(child), 60, "the child is gone")


def test_what_is_done_depends_on_the_cluster_of_the_machine(
    prepare: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = Settings(tmp_path, tmp_path / "cache", tmp_path / "state")

    def names(cluster: object, engines: bool = False) -> list[str]:
        return list(prepare.commands(settings, cluster, engines=engines))

    assert names(HostCluster(settings)) == ["environment", "programs", "images"]
    assert names(ContextCluster(settings)) == ["environment", "images"]
    monkeypatch.setattr(prepare, "refusal", lambda settings: None)
    assert names(ContextCluster(settings), engines=True) == ["environment", "images", "prometheus"]
    assert names(ContextCluster(settings)) == ["environment", "images"], "not for the demo"

    def none(settings: Settings) -> None:
        raise NoClusterPossible("not root")

    monkeypatch.setattr(prepare, "choose", none)
    assert prepare.chosen_cluster(settings) is None
    assert capsys.readouterr().out == "not root\n"
    only = prepare.commands(settings, None, engines=True)
    assert list(only) == ["environment"]
    assert only["environment"][-2:] == ("setup", "engines")


def test_debians_python_without_venv_gets_it_before_anything_needs_it(
    prepare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(tmp_path, tmp_path / "cache", tmp_path / "state")
    done: list[str] = []

    def install(settings: Settings) -> None:
        done.extend(name for name in prerequisites.missing_packages() if name.endswith("-venv"))

    monkeypatch.setattr(prerequisites, "install_packages", install)
    monkeypatch.setattr(prepare, "run_together", lambda commands: done.extend(commands))
    monkeypatch.setattr(prepare, "choose", lambda settings: HostCluster(settings))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["prepare.py"])
    prepare.commands(settings, HostCluster(settings), engines=False)
    assert not done, "to list what is to do does nothing"
    prepare.main()
    ours = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    assert done == [ours, "environment", "programs", "images"]
    (tmp_path / "ensurepip").mkdir()
    prepare.main()
    assert done.count(ours) == 1


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A machine with nothing on PATH, and nobody is root."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("prometheus.LISTS", tmp_path / "lists")
    return Settings(tmp_path, tmp_path / "cache", tmp_path / "state")


def program(file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("#!/bin/sh\nexit 100\n")
    file.chmod(0o755)


def test_prometheus_on_path_is_both_programs_in_one_folder(
    prepare: ModuleType,
    bare: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "other"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{other}")
    program(tmp_path / "promtool")
    program(other / "prometheus")
    assert "prometheus" not in prepare.commands(bare, ContextCluster(bare), engines=True)
    why = "put prometheus and promtool on PATH: there is no apt-get"
    assert f"the tests that need it will fail: {why}" in capsys.readouterr().out
    with pytest.raises(DevclusterError, match=why):
        fetch(bare)
    program(other / "promtool")
    assert "prometheus" in prepare.commands(bare, ContextCluster(bare), engines=True)
    assert fetch(bare) == other


def test_only_root_can_renew_the_lists_of_packages(bare: Settings, tmp_path: Path) -> None:
    program(tmp_path / "apt-get")
    advice = "put prometheus and promtool on PATH, or run `apt-get update` as root: "
    assert refusal(bare) == f"{advice}there are no lists of packages"
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists/deb_main_Packages.lz4").touch()
    assert refusal(bare) is None
    with pytest.raises(DevclusterError, match=f"{advice}apt-get download prometheus ended"):
        fetch(bare)
