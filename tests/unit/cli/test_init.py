"""`agenticrun init`: the environment of the new folder works as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from agenticrun_api import load_run
from agenticrun_api.names import ExitCode
from agenticrun_workers.cli import app
from agenticrun_workers.cli.init import TEMPLATE
from agenticrun_workers.envs import EnvConfigError, make_env
from agenticrun_workers.envs.checking import check_env
from pages import ROOT, blocks


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["init", "word-game"])
    assert result.exit_code == 0, result.output
    assert "agenticrun check-env word_game:WordGame" in result.output
    return tmp_path / "word-game"


def test_the_header_of_its_run_is_aligned(made: Path) -> None:
    header = [
        line for line in (made / "agenticrun.yaml").read_text().splitlines() if "#   " in line
    ]
    assert len(header) == 4
    assert len({line.index("  (") for line in header}) == 1


def test_it_says_where_pytest_comes_from(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["init", "word-game", "-o", str(tmp_path / "new")]).output
    assert "pip install pytest" in said


def test_its_own_tests_pass(made: Path) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("--rootdir", str(made), "-c", os.devnull, "test_word_game.py"),
        ],
        cwd=made,
        env={
            **os.environ,
            "PYTEST_ADDOPTS": "",
            "PYTHONPATH": os.pathsep.join([str(made), os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, "2 passed" in ended.stdout) == (0, True), ended.stdout


def test_check_env_accepts_it(made: Path) -> None:
    command = ["check-env", "word_game:WordGame", "--seeds", "10"]
    ended = subprocess.run(
        [sys.executable, "-m", "agenticrun_workers.cli", *command],
        cwd=made,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "warning" not in ended.stdout


def test_its_run_plays_its_environment_with_its_code(made: Path) -> None:
    run = load_run(made / "agenticrun.yaml")
    (spec,) = run.spec.pipeline.envs
    assert (run.metadata.name, spec.type, spec.tag) == (
        "word-game",
        "word_game:WordGame",
        "WordGame",
    )
    (generated,) = yaml.safe_load((made / "kustomization.yaml").read_text())["configMapGenerator"]
    assert generated == {"name": "word-game", "files": ["word_game.py"]}
    assert run.spec.code is not None
    assert run.spec.code.config_map == "word-game"


def test_nothing_refers_to_the_template(made: Path) -> None:
    names = re.compile(r"treasure(\.py|:)|import treasure|from treasure|Treasure")
    assert [file.name for file in made.iterdir() if names.search(file.read_text())] == []
    assert sorted(file.name for file in made.iterdir()) == [
        "agenticrun.yaml",
        "kustomization.yaml",
        "test_word_game.py",
        "word_game.py",
    ]


def test_it_refuses_a_highest_that_leaves_validation_without_a_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(TEMPLATE)
    for highest in (1, 3):
        with pytest.raises(EnvConfigError, match="highest must be at least 4"):
            make_env("treasure:Treasure", {"highest": highest})
    check_env("treasure:Treasure", {"highest": 4}, seeds=10).assert_ok(warnings=False)


@pytest.mark.parametrize("page", ["template", "environments.md"])
def test_training_teaches_every_answer_that_validation_needs(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy learns not to give answers that only validation rewards: success stays 0 there."""
    if page == "template":
        monkeypatch.syspath_prepend(TEMPLATE)
        env: Any = make_env("treasure:Treasure", {"highest": 15})
        secret = "treasure"
    else:
        (code, *_) = blocks(ROOT / "docs" / page, "python")
        namespace: dict[str, Any] = {}
        exec(compile(code, "guess.py", "exec"), namespace)
        env, secret = namespace["Guess"](15), "secret"
    asked: dict[str, set[int]] = {"train": set(), "validation": set()}
    for split, numbers in asked.items():
        for seed in range(300):
            env.reset(seed, split)
            numbers.add(getattr(env, secret))
    assert asked["validation"] <= asked["train"]
    assert len(asked["train"]) >= 15


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Word", "lower-case"),
        ("9lives", "lower-case"),
        ("a b", "lower-case"),
        ("../up", "lower-case"),
        ("game-", "lower-case"),
        ("random", "Python's own"),
        ("class", "Python's own"),
        ("list", "Python's own"),
        ("x" * 46, "longer than 45"),
    ],
)
def test_a_name_that_cannot_be_a_module_and_a_run_is_refused(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["init", name])
    assert result.exit_code == ExitCode.INVALID_CONFIG
    assert why in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    result = CliRunner().invoke(app, ["init", "word-game", "-o", str(tmp_path)])
    assert result.exit_code == 2
    assert [file.name for file in tmp_path.iterdir()] == ["mine.py"]
