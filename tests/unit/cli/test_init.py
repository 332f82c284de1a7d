"""`agenticrun init`: the environment of the new folder works as it is."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import product
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


def test_it_refuses_a_size_that_leaves_validation_without_a_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(TEMPLATE)
    for size in (0, 1):
        with pytest.raises(EnvConfigError, match="size must be at least 2"):
            make_env("treasure:Treasure", {"size": size})
    check_env("treasure:Treasure", {"size": 2}, seeds=10).assert_ok(warnings=False)


@pytest.fixture
def game(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The environment of the template, as its run configures it."""
    monkeypatch.syspath_prepend(TEMPLATE)
    (spec,) = load_run(TEMPLATE / "agenticrun.yaml").spec.pipeline.envs
    return make_env(spec.type, spec.config)


def success(game: Any, split: str, player: Callable[[str], str]) -> float:
    """Return the share of 200 episodes that a player of observations wins within the turn limit."""
    (spec,) = load_run(TEMPLATE / "agenticrun.yaml").spec.pipeline.envs
    won = 0.0
    for seed in range(200):
        observation = game.reset(seed, split)
        for _ in range(spec.max_steps):
            result = game.step(player(observation))
            observation = result.observation
            if result.terminated:
                break
        won += result.metrics["success"]
    return won / 200


def test_the_learning_of_its_run_can_be_seen(game: Any) -> None:
    """Random moves seldom win, and a player who reads the observation always does."""
    draw = random.Random(0)
    assert success(game, "validation", lambda _: draw.choice(game.valid_actions())) < 0.2
    for split in ("train", "validation"):
        assert success(game, split, lambda observation: observation.split()[-1]) == 1.0


def test_training_teaches_every_word_that_validation_needs(game: Any) -> None:
    """A policy learns not to give answers that only validation rewards: success stays 0 there."""
    levels, others = (
        {game.reset(seed, split) for seed in range(200)} for split in ("train", "validation")
    )
    assert not levels & others
    assert {word for level in others for word in level.split()} <= {
        word for level in levels for word in level.split()
    }


def test_the_page_about_environments_shows_the_same_game(game: Any) -> None:
    code, *_ = blocks(ROOT / "docs/environments.md", "python")
    namespace: dict[str, Any] = {}
    exec(compile(code, "treasure.py", "exec"), namespace)
    shown = namespace["Treasure"]()
    for seed, split in product(range(20), ("train", "validation")):
        assert shown.reset(seed, split) == game.reset(seed, split)
        for action in ["north", "east", "", "south", "south", "west", "west"]:
            assert shown.step(action) == game.step(action)


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
