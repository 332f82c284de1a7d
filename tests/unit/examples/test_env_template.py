"""The template for users' environments: its own tests pass unchanged, and its run is valid."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agenticrun_api import load_run
from agenticrun_workers.envs import EnvConfigError, make_env
from agenticrun_workers.envs.checking import check_env

FOLDER = Path(__file__).parents[3] / "examples/env-template"


def test_its_own_tests_pass() -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(FOLDER),
            "-c",
            os.devnull,
            "test_treasure.py",
        ],
        cwd=FOLDER,
        env={
            **os.environ,
            "PYTEST_ADDOPTS": "",
            "PYTHONPATH": str(FOLDER),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, "2 passed" in ended.stdout) == (0, True), ended.stdout


def test_it_refuses_a_highest_that_leaves_validation_without_a_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    for highest in (1, 4):
        with pytest.raises(EnvConfigError, match="highest must be at least 5"):
            make_env("treasure:Treasure", {"highest": highest})
    check_env("treasure:Treasure", {"highest": 5}, seeds=10).assert_ok(warnings=False)


def test_its_run_plays_the_environment_of_the_folder() -> None:
    (spec,) = load_run(FOLDER / "agenticrun.yaml").spec.pipeline.envs
    assert spec.type == "treasure:Treasure"
