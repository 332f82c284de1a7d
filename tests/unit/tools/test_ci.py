"""tools/ci.py: stages, one after the other or one beside others."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from waiting import eventually


@pytest.fixture
def ci() -> ModuleType:
    return importlib.import_module("ci")


def shell(program: str) -> list[str]:
    return ["bash", "-c", program]


def test_a_stage_beside_others_shows_its_output_in_one_piece_when_it_ends(
    ci: ModuleType, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stages = ci.Stages()
    begun, done = tmp_path / "begun", tmp_path / "done"
    waits = f"until [ -e {begun} ]; do sleep 0.05; done; echo slow begins; sleep 0.2"
    beside = [("slow", shell(f"{waits}; echo slow ends; exit 3")), ("last", shell(f"touch {done}"))]
    with stages.beside(beside):
        ends = f"echo quick begins; touch {begun}; until [ -e {done} ]; do sleep 0.05; done"
        assert stages.run("quick", shell(f"{ends}; echo quick ends"))
    assert not stages.report()
    output = capfd.readouterr().out
    assert output.index("\nquick begins\n") < output.index("\nslow begins\nslow ends\n")
    assert output.index("\nslow ends\n") < output.index("\nquick ends\n")
    assert {name: ok for name, _, ok in stages.took} == {"quick": True, "slow": False, "last": True}


def test_a_test_that_fails_beside_others_is_shown_at_once(
    ci: ModuleType,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ci, "LOOK_SECONDS", 0.05)
    (tmp_path / "test_some.py").write_text(
        "import pathlib, time\n"
        "def test_good():\n    pass\n"
        "def test_bad():\n    assert 1 == 2\n"
        "def test_slow():\n"
        "    while not pathlib.Path('seen').exists():\n        time.sleep(0.05)\n"
    )
    stages, shown = ci.Stages(), ""

    def bad_was_shown() -> bool:
        nonlocal shown
        shown += capfd.readouterr().out
        return "\ntests: test_some.py::test_bad FAILED" in shown

    pytest_v = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", "/dev/null"]
    program = f"cd {tmp_path} && {' '.join(pytest_v)} --rootdir . test_some.py"
    with stages.beside([("tests", shell(program))]):
        eventually(bad_was_shown, 60, "the failure is shown while the stage still runs")
        assert "test_good" not in shown
        (tmp_path / "seen").touch()
    assert not stages.report()
    assert "assert 1 == 2" in capfd.readouterr().out


def test_a_stage_ends_even_if_what_runs_beside_it_cannot(ci: ModuleType) -> None:
    stages = ci.Stages()
    beside = [("slow", shell("sleep 0.2")), ("never begun", shell("true"))]
    with pytest.raises(FileNotFoundError), stages.beside(beside):
        stages.run("quick", ["/no/such/program"])
    assert [name for name, _, _ in stages.took] == ["slow"]


def test_stages_beside_others_follow_each_other(
    ci: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    stages = ci.Stages()
    with stages.beside([("first", shell("sleep 0.2; echo one")), ("second", shell("echo two"))]):
        pass
    assert stages.report()
    output = capfd.readouterr().out
    assert output.index("\none\n") < output.index("\ntwo\n")
    assert [name for name, _, _ in stages.took] == ["first", "second"]


class Recorded:
    """Stages that all succeed, by name."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def run(self, name: str, _command: list[str], _env: dict[str, str] | None = None) -> bool:
        self.names.append(name)
        return True

    @contextmanager
    def beside(
        self, stages: list[tuple[str, list[str]]], _env: dict[str, str] | None = None
    ) -> Iterator[None]:
        yield
        self.names += [name for name, _ in stages]


@pytest.mark.parametrize("own_cluster", [True, False])
def test_tests_run_beside_the_demos_operator_but_never_install_it_on_a_users_cluster(
    ci: ModuleType, monkeypatch: pytest.MonkeyPatch, own_cluster: bool
) -> None:
    answer = subprocess.CompletedProcess([], 0, stdout="/kubeconfig")
    monkeypatch.setattr(ci.subprocess, "run", lambda *_, **__: answer)
    stages = Recorded()
    ci.test(stages, own_cluster=own_cluster)
    operator = ["demo's operator"] if own_cluster else []
    assert [name for name in stages.names if name not in ("lint", "unit", "integration")] == [
        *("set-up", "cluster up", "images", *operator, "e2e", "cluster")
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stages_that_are_interrupted_clean_up(tmp_path: Path, number: signal.Signals) -> None:
    """Also in the background of a shell, which ignores SIGINT there."""
    stage = f"trap 'sleep 0.5; touch {tmp_path}/$0-cleaned; exit' INT; touch {tmp_path}/$0; "
    stage += "while :; do sleep 0.05; done"
    program = f"""
import ci
stages = ci.Stages()
stages.take_signals()
with stages.beside([("other", ["bash", "-c", {stage!r}, "other"])]):
    stages.run("one", ["bash", "-c", {stage!r}, "one"])
"""
    tools = Path(importlib.import_module("ci").__file__ or "").parent
    running = subprocess.Popen(
        ["bash", "-c", 'trap "" INT; exec "$@"', "shell", sys.executable, "-c", program],
        cwd=tools,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    begun = [tmp_path / "one", tmp_path / "other"]
    eventually(lambda: all(map(Path.exists, begun)), 60, "both stages run")
    if number is signal.SIGINT:
        os.killpg(running.pid, number)  # as a terminal does
    else:
        running.send_signal(number)
    assert running.wait(60) != 0
    assert {path.name for path in tmp_path.glob("*-cleaned")} == {"one-cleaned", "other-cleaned"}
