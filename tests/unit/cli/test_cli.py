"""`agenticrun validate` and `version`, as a user types them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from agenticrun_api.names import ExitCode
from agenticrun_workers.cli import app

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


def validate(folder: Path, text: str) -> tuple[int, str]:
    file = folder / "run.yaml"
    file.write_text(text)
    result = CliRunner().invoke(app, ["validate", "-f", str(file)])
    return result.exit_code, result.output


def test_a_good_run_is_valid(tmp_path: Path) -> None:
    assert validate(tmp_path, GOOD) == (0, f"{tmp_path / 'run.yaml'}: AgenticRun lake is valid\n")


def test_all_errors_are_told_with_their_fields(tmp_path: Path) -> None:
    code, output = validate(tmp_path, GOOD.replace("maxSteps: 10", "maxSteps: 0\n    colour: red"))
    assert code == ExitCode.INVALID_CONFIG
    assert "spec.pipeline.maxSteps:" in output
    assert "spec.pipeline.colour: unknown field" in output


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("type: frozen_lakes", "spec.pipeline.envs[0].type: no env is called 'frozen_lakes'"),
        ("type: frozen_lake, config: {sise: 4}", "spec.pipeline.envs[0].config: env 'frozen_lake' has no config key 'sise'"),
        ("type: 'mine:Env'", "ModuleNotFoundError: No module named 'not_installed'"),
    ],
)
def test_environments_are_opened(tmp_path: Path, change: str, expected: str) -> None:
    (tmp_path / "mine.py").write_text("import not_installed\n")
    code, output = validate(tmp_path, GOOD.replace("type: frozen_lake, config: {size: 4}", change))
    assert code == ExitCode.INVALID_CONFIG
    assert expected in output


def test_an_environment_beside_the_yaml_is_found(tmp_path: Path) -> None:
    (tmp_path / "own_lake.py").write_text("from agenticrun_workers.envs import FrozenLake\n\nclass Mine(FrozenLake): ...\n")
    assert validate(tmp_path, GOOD.replace("type: frozen_lake", "type: 'own_lake:Mine'"))[0] == 0


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["validate", "-f", str(tmp_path / "nothing.yaml")])
    assert result.exit_code == 2


def test_help_and_version() -> None:
    assert "validate" in CliRunner().invoke(app, ["--help"]).output
    assert CliRunner().invoke(app, ["version"]).output.strip()
