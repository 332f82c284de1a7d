"""The math environments: what is asked, said and rewarded."""

from __future__ import annotations

import asyncio
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from agenticrun_workers.envs import (
    EnvCalls,
    EnvConfigError,
    MathEnv,
    MathSingleStep,
    StepResult,
    make_env,
)
from agenticrun_workers.envs.math.math_env import RIGHT, WRONG
from agenticrun_workers.envs.service import ServiceCalls
from agenticrun_workers.types import Stream

ITEM = {"question": "What is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"}
EXAMPLE = Path(__file__).parents[3] / "examples/math"


def conversation(env: Any, *answers: str, item: dict[str, Any] = ITEM) -> list[StepResult]:
    async def play() -> list[StepResult]:
        calls = EnvCalls()
        start = await calls.reset(env, 0, Stream.TRAIN, item)
        assert start.observation == str(item["question"])
        return [await calls.step(env, answer) for answer in answers]

    return asyncio.run(play())


def test_a_wrong_answer_is_told_and_may_be_tried_again() -> None:
    wrong, unreadable, right = conversation(
        make_env("math", {"turnDiscount": 0.5}), r"\boxed{8}", "", r"So \boxed{7}."
    )
    assert [(r.observation, r.reward, r.terminated) for r in (wrong, unreadable, right)] == [
        (WRONG, 0.0, False),
        (WRONG, 0.0, False),
        (RIGHT, 0.25, True),
    ]
    assert [r.metrics["action_is_valid"] for r in (wrong, unreadable, right)] == [1.0, 0.0, 1.0]
    assert [r.metrics["success"] for r in (wrong, unreadable, right)] == [0.0, 0.0, 1.0]


def test_rewards_and_texts_are_settings() -> None:
    config = {
        "rightReward": 2.0,
        "wrongReward": -1.0,
        "rightFeedback": "yes",
        "wrongFeedback": "no",
    }
    env = make_env("math", config)
    assert [(r.observation, r.reward) for r in conversation(env, "8", "7")] == [
        ("no", -1.0),
        ("yes", 2.0),
    ]
    assert env.vocabulary() == ["yes", "no"]  # type: ignore[attr-defined]


def test_an_instance_plays_one_problem_after_another() -> None:
    env = make_env("math", {"turnDiscount": 0.5})
    conversation(env, "8", "8")
    (result,) = conversation(env, "5", item={"question": "2 + 3", "answer": 5})
    assert result.reward == 1.0


@pytest.mark.parametrize(
    ("type", "config", "message"),
    [
        ("math", {"turnDiscount": 2}, "turnDiscount must be in"),
        ("math", {"verifySeconds": 0}, "verifySeconds must be more than 0"),
        ("math_single_step", {"verifySeconds": -1}, "verifySeconds must be more than 0"),
        ("math_single_step", {"turnDiscount": 1}, "has no config key 'turnDiscount'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    type: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(EnvConfigError, match=message):
        make_env(type, config)


def test_an_item_without_a_question_says_how_to_name_its_column() -> None:
    with pytest.raises(
        ValueError, match=r"no 'answer': give the column's name in dataset\.columns"
    ):
        MathEnv().set_item({"question": "?", "solution": "1"})


def test_the_stateless_environment_judges_several_answers_at_once() -> None:
    async def play() -> Any:
        calls, env = ServiceCalls(), MathSingleStep(instruction="Add.")
        question = await calls.begin(env, 0, Stream.TRAIN, ITEM)
        assert question == ITEM["question"]
        return await calls.act(env, ("q", ["7", r"\boxed{8}", "$7.0$"]))

    _, success, terminated, truncated, _ = asyncio.run(play())
    assert (success, terminated, truncated) == ([1.0, 0.0, 1.0], True, False)


def test_many_environments_are_verified_side_by_side() -> None:
    async def play(number: int) -> bool:
        calls, env = EnvCalls(), MathEnv()
        await calls.reset(
            env, 0, Stream.TRAIN, {"question": "?", "answer": f"\\frac{{{number}}}{{7}}"}
        )
        said = await asyncio.gather(
            *(calls.step(env, f"\\boxed{{{n}/7}}") for n in (number, number + 1))
        )
        return [result.terminated for result in said] == [True, False]

    async def many() -> list[bool]:
        return await asyncio.gather(*map(play, range(1, 41)))

    assert all(asyncio.run(many()))


def test_without_random_answers_there_is_no_random_policy() -> None:
    async def ask(env: Any) -> Any:
        return await EnvCalls().valid_actions(env)

    assert asyncio.run(ask(MathEnv(random_answers=["1", "2"]))) == ["1", "2"]
    assert asyncio.run(ask(MathEnv())) == [], "which random play refuses"


def test_the_sums_of_the_example_are_what_its_script_writes_and_right() -> None:
    items = [json.loads(line) for line in (EXAMPLE / "sums.jsonl").read_text().splitlines()]
    assert items == list(runpy.run_path(str(EXAMPLE / "make_sums.py"))["sums"]())
    for item in items:
        (result,) = conversation(MathEnv(), str(eval(item["question"].rstrip("="))), item=item)
        assert result.terminated
