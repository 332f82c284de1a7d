"""Check examples/judged.

The environment takes items, and the reward function does what its docstring says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agenticrun_api import Pipeline, load_run
from agenticrun_workers.envs import make_env
from agenticrun_workers.envs.env import TakesItem
from agenticrun_workers.rollout.datasets import EpisodeItems
from agenticrun_workers.rollout.rewards import JudgePanel
from agenticrun_workers.types import Stream
from judging import episode, trajectory

FOLDER = Path(__file__).parents[3] / "examples/judged"


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    """The example's, with its modules and files where the run would find them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    yield load_run(FOLDER / "agenticrun.yaml").spec.pipeline
    sys.modules.pop("judged", None)


def test_every_item_is_a_question_with_a_valid_answer(pipeline: Pipeline) -> None:
    items = EpisodeItems(pipeline)
    made = make_env(pipeline.envs[0].type, pipeline.envs[0].config)
    assert isinstance(made, TakesItem)
    env: Any = made
    asked = set()
    for group in range(6):
        item = items.of("Quiz", Stream.TRAIN, group)
        assert item is not None
        env.set_item(item)
        asked.add(env.reset(0, Stream.TRAIN))
        result = env.step(item["solution"])
        assert (result.reward, result.terminated, result.metrics["success"]) == (0.0, True, 1.0)
        assert item["solution"] in env.valid_actions()
    assert len(asked) == 6


@pytest.mark.parametrize(("answer", "reward"), [("cold", 1.0), ("night", 0.05), ("banana", 0.0)])
async def test_the_reward_function_pays_for_the_solution(
    pipeline: Pipeline, answer: str, reward: float
) -> None:
    judged = await JudgePanel.of(pipeline).apply(
        trajectory(0.0, tag="Quiz"), episode(answer, tag="Quiz", item={"solution": "cold"})
    )
    assert judged.turns[-1].reward == reward
