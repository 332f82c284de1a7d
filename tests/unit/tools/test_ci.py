"""tools/ci.py: stages, one after the other or one beside others."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def ci() -> ModuleType:
    return importlib.import_module("ci")


def shell(program: str) -> list[str]:
    return ["bash", "-c", program]


def test_a_stage_beside_others_shows_its_output_after_theirs(
    ci: ModuleType, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stages = ci.Stages()
    done = f"{tmp_path}/done"
    waits = f"echo slow begins; until [ -e {done} ]; do sleep 0.05; done; echo slow ends; exit 3"
    with stages.beside([("slow", shell(waits))]):
        assert stages.run("quick", [sys.executable, "-c", f"open({done!r}, 'w'); print('quick')"])
    assert not stages.report()
    output = capfd.readouterr().out
    assert output.index("\nquick\n") < output.index("slow begins\nslow ends\n")
    assert {name: ok for name, _, ok in stages.took} == {"quick": True, "slow": False}


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
