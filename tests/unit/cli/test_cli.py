"""`agenticrun validate` and `version`, as a user types them, and where a run's output goes."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agenticrun_api import parse_run
from agenticrun_api.names import ExitCode
from agenticrun_workers.cli import app
from agenticrun_workers.cli.common import new_folder
from agenticrun_workers.cli.run_notes import code_notes
from runs import run_with

GOOD = """
apiVersion: agenticrun.dev/v1alpha1
kind: AgenticRun
metadata: {name: lake}
spec:
  model: {initialize: {}}
  pipeline:
    maxSteps: 10
    rolloutBatchSize: 8
    evalSteps: 0
    envs: [{tag: A, type: frozen_lake, config: {size: 4}}]
    trainEnvs: {groups: 4, groupSize: 2, tags: [A]}
"""


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands add the folder of their file to it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")


def validate(folder: Path, text: str, *options: str) -> tuple[int, str]:
    file = folder / "run.yaml"
    file.write_text(text)
    result = CliRunner().invoke(app, ["validate", "-f", str(file), *options])
    return result.exit_code, result.output


def test_a_good_run_is_valid(tmp_path: Path) -> None:
    assert validate(tmp_path, GOOD) == (0, f"{tmp_path / 'run.yaml'}: AgenticRun lake is valid\n")


def test_equal_keys_are_refused_as_kubectl_refuses_them(tmp_path: Path) -> None:
    text = GOOD.replace("maxSteps: 10", "maxSteps: 10\n    seed: 1\n    maxSteps: 11")
    code, output = validate(tmp_path, text)
    assert code == ExitCode.INVALID_CONFIG
    assert "line 10: maxSteps is set twice (line 8)" in output


def test_all_errors_are_told_with_their_fields(tmp_path: Path) -> None:
    code, output = validate(tmp_path, GOOD.replace("maxSteps: 10", "maxSteps: 0\n    colour: red"))
    assert code == ExitCode.INVALID_CONFIG
    assert "spec.pipeline.maxSteps:" in output
    assert "spec.pipeline.colour: unknown field" in output


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            "type: frozen_lakes",
            "spec.pipeline.envs[0].type: no env is called 'frozen_lakes' (did you mean frozen_lake",
        ),
        (
            "type: frozen_lake, config: {sise: 4}",
            "spec.pipeline.envs[0].config: env 'frozen_lake' has no config key 'sise'",
        ),
        ("type: 'needs_more:Env'", "ModuleNotFoundError: No module named 'not_installed'"),
    ],
)
def test_environments_are_opened(tmp_path: Path, change: str, expected: str) -> None:
    (tmp_path / "needs_more.py").write_text("import not_installed\n")
    code, output = validate(tmp_path, GOOD.replace("type: frozen_lake, config: {size: 4}", change))
    assert code == ExitCode.INVALID_CONFIG
    assert expected in output


def test_an_environment_beside_the_yaml_is_found(tmp_path: Path) -> None:
    (tmp_path / "own_lake.py").write_text(
        "from agenticrun_workers.envs import FrozenLake\n\nclass Mine(FrozenLake): ...\n"
    )
    assert validate(tmp_path, GOOD.replace("type: frozen_lake", "type: 'own_lake:Mine'"))[0] == 0


def test_changes_are_made_before_the_run_is_checked(tmp_path: Path) -> None:
    assert (
        validate(
            tmp_path,
            GOOD,
            "--set",
            "pipeline.rolloutBatchSize=4",
            "--set",
            "pipeline.trainEnvs.groupSize=4",
        )[0]
        == 0
    )
    code, output = validate(tmp_path, GOOD, "--set", "pipeline.envs[0].config.sise=3")
    assert code == ExitCode.INVALID_CONFIG
    assert "spec.pipeline.envs[0].config: env 'frozen_lake' has no config key 'sise'" in output


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    now = datetime(2026, 11, 21, 10, 45, tzinfo=UTC)
    with ThreadPoolExecutor(8) as threads:
        folders = list(threads.map(lambda _: new_folder(tmp_path / "runs" / "lake", now), range(8)))
    assert len({str(folder) for folder in folders}) == 8
    assert {"20261121-104500", "20261121-104500-2"} <= {folder.name for folder in folders}


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["validate", "-f", str(tmp_path / "nothing.yaml")])
    assert result.exit_code == 2


def test_help_and_version() -> None:
    assert "validate" in CliRunner().invoke(app, ["--help"]).output
    assert CliRunner().invoke(app, ["--version"]).output.strip()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ({"configMap": "mine"}, []),
        ({"git": {"url": "https://host.example/mine"}}, ["not https://host.example/mine; modules"]),
        ({"image": {"reference": "mine:1"}}, ["not mine:1; modules"]),
        ({"pip": {"requirements": ["emoji"]}}, ["spec.code.pip: nothing is installed"]),
    ],
)
def test_a_local_run_says_what_stands_in_for_code_of_a_cluster(
    code: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    notes = code_notes(parse_run(run_with(("spec.code", code))), tmp_path)
    assert [part in note for part, note in zip(said, notes, strict=True)] == [True] * len(said)
