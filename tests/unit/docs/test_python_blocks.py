"""The Python that readers copy from the pages runs as printed, here and in no other process.

`tests/unit/agents/test_pages.py` plays the agents of the pages.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from agenticrun_workers.envs.checking import checklist, run_checks
from judging import episode
from pages import ROOT, blocks


def module(monkeypatch: pytest.MonkeyPatch, name: str, code: str) -> ModuleType:
    """A module that holds a block, under the name that the page gives it."""
    made = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, made)
    exec(compile(code, f"{name}.py", "exec"), vars(made))
    return made


def python(page: str) -> list[str]:
    return blocks(ROOT / f"docs/{page}.md", "python")


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """check-env's comparison with another process, which cannot import a block, is left out."""
    first = {name: check for name, check in checklist.FIRST.items() if name != "other process"}
    assert len(first) == len(checklist.FIRST) - 1
    monkeypatch.setattr(run_checks, "FIRST", first)


@pytest.mark.usefixtures("one_process")
def test_the_environment_passes_the_check_that_the_page_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment, its_test = python("environments")
    module(monkeypatch, "treasure", environment)
    module(monkeypatch, "test_treasure", its_test).test_treasure()


def test_the_environment_about_a_data_set_shows_its_item(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = python("datasets")
    quiz = module(monkeypatch, "quiz", code).Quiz()
    quiz.set_item({"question": "3 + 4 = ?"})
    assert quiz.reset(seed=1, split="train") == "3 + 4 = ?"


def test_the_judge_scores_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = python("rewards")
    right = module(monkeypatch, "my_rewards", code).right
    assert right(episode("7", item={"solution": "7"})) == 1.0
    assert right(episode("8", item={"solution": "7"}), partly=0.1) == 0.1


def test_sokoban_is_played(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = python("sokoban")
    module(monkeypatch, "play", code)
    *board, reward = capsys.readouterr().out.splitlines()
    assert board[0] == "######"
    assert float(reward) < 0


def test_the_sandbox_computes_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = python("tools")
    outcome = module(monkeypatch, "tool", code).outcome
    assert f"Outcome(stdout={outcome.stdout!r}, stderr='', end='finished'" in code
    assert outcome.end == "finished"


def test_the_wrapper_of_gem_separates_training_from_validation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a stand-in for gem, which is not installed: its `reset` returns text and info."""

    class Game:
        def __init__(self, id: str) -> None:
            self.id = id

        def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
            return str(seed), {"env_instruction": self.id}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return action, 1.0, True, False, {}

    gem = ModuleType("gem")
    gem.make = Game  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gem", gem)
    (code,) = python("migrate-from-roll")
    env = module(monkeypatch, "gem_env", code).GemEnv(id="game:GuessTheNumber-v0")
    seeds = {split: {env.reset(n, split)[0] for n in range(9)} for split in ("train", "validation")}
    assert not seeds["train"] & seeds["validation"]
