"""`agenticrun check-env`, as a user types it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agenticrun_api.names import ExitCode
from agenticrun_workers.cli import app

OWN = """
from agenticrun_workers.envs import EnvironmentService, StepResult


class Own:
    instruction = "Say the word."

    def __init__(self, word="hot"):
        self.word = word

    def reset(self, seed, split):
        return f"{self.word} {seed}"

    def step(self, action):
        if self.word == "broken":
            raise RuntimeError("the door is stuck")
        metrics = {"action_is_valid": float(action == self.word)}
        return StepResult("over", 1.0, True, metrics=metrics)

    def valid_actions(self):
        return [self.word]


class Judge(EnvironmentService):
    async def step(self, action):
        return None, 0.0, True, False, {}


class Repeats(Own):
    def set_item(self, item):
        self.word = item["word"]
"""

RUN = """
apiVersion: agenticrun.dev/v1alpha1
kind: AgenticRun
metadata: {name: own}
spec:
  model: {initialize: {}}
  pipeline:
    maxSteps: 1
    rolloutBatchSize: 8
    evalSteps: 0
    envs:
      - {tag: A, type: "own_env:Own", config: {word: cold}}
      - {tag: B, type: "own_env:Repeats", dataset: {path: WORDS}}
    trainEnvs: {groups: 4, groupSize: 2, tags: [A, B]}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_env.py").write_text(OWN)
    (tmp_path / "words.jsonl").write_text(
        "".join(f'{{"word": "w{number}"}}\n' for number in range(20))
    )
    (tmp_path / "run.yaml").write_text(RUN.replace("WORDS", str(tmp_path / "words.jsonl")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    yield tmp_path
    sys.modules.pop("own_env", None)


def check(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        app, ["check-env", "--seeds", "3", "--turns", "3", "--timeout", "120", *arguments]
    )
    return result.exit_code, result.output


def test_a_good_environment_ends_with_0_and_one_row_per_check() -> None:
    code, output = check("own_env:Own", "--config", "word=warm")
    assert (code, "FAILED" in output) == (0, False)
    assert "steps per second" in output


def test_a_broken_one_ends_with_1_and_says_what_and_where() -> None:
    code, output = check("own_env:Own", "-c", "word=broken")
    assert code == 1
    assert "RuntimeError: the door is stuck (own_env.py:" in output
    assert "FAILED" in output


def test_environments_of_a_run_are_checked_with_their_config_and_items() -> None:
    assert check("-f", "run.yaml")[0] == 0
    assert check("-f", "run.yaml", "--tag", "B")[0] == 0
    assert check("-f", "run.yaml", "--set", "pipeline.envs[0].config.word=broken")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "name an environment"),
        (("own_env:Own", "-f", "run.yaml"), 2, "name an environment"),
        (("own_env:Own", "-c", "word"), 2, "KEY=VALUE"),
        (("own_env:Own", "-c", "word={a: 1, a: 2}"), 2, "a is set"),
        (("own_env:Other",), ExitCode.INVALID_CONFIG, "own_env has no Other"),
        (("own_env:Own", "-c", "wort=3"), ExitCode.INVALID_CONFIG, "has no config key 'wort'"),
        (("nowhere",), ExitCode.INVALID_CONFIG, "no env is called 'nowhere'"),
        (
            ("-f", "run.yaml", "--tag", "C"),
            ExitCode.INVALID_CONFIG,
            "has no environment 'C'; it has A, B",
        ),
        (
            ("own_env:Judge",),
            ExitCode.INVALID_CONFIG,
            "own_env:Judge is an EnvironmentService and only its agent knows the actions",
        ),
        (("own_env:Repeats",), 0, "no items were given to play"),
    ],
)
def test_what_cannot_be_checked_is_told(
    arguments: tuple[str, ...], code: int, message: str
) -> None:
    found, output = check(*arguments)
    assert (found, message in output) == (code, True), output
