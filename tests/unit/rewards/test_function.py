"""A user's function as a judge."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time

import numpy as np
import pytest

from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.models.tokenizer import build_task_tokenizer
from agenticrun_workers.rollout.rewards import (
    JudgeConfigError,
    JudgedEpisode,
    JudgedTurn,
    JudgeFailed,
    judged_episode,
    make_judge,
)
from agenticrun_workers.types import EpisodeKey, StopReason, Stream, Trajectory, Turn
from judging import episode


def length(episode: JudgedEpisode, *, per_word: float = 1.0) -> float:
    assert threading.current_thread() is not threading.main_thread()
    return per_word * len(episode.answer.split())


side_by_side = [0, 0]
"""Calls of `overlap` now, and at most."""


async def overlap(episode: JudgedEpisode) -> float:
    side_by_side[0] += 1
    side_by_side[1] = max(side_by_side)
    await asyncio.sleep(0.05)
    side_by_side[0] -= 1
    return float(episode.answer == episode.item["solution"])


def picky(episode: JudgedEpisode) -> float:
    return 1 / len(episode.answer)


def quits(episode: JudgedEpisode) -> float:
    sys.exit(2)


async def quits_later(episode: JudgedEpisode) -> float:
    sys.exit(2)


async def is_cancelled(episode: JudgedEpisode) -> float:
    raise asyncio.CancelledError("inner")


def hangs(episode: JudgedEpisode) -> float:
    while episode.answer == "":
        time.sleep(0.01)
    return 1.0


def place(name: str) -> str:
    """Return file and line of the last line of a judge above."""
    lines, first = inspect.getsourcelines(globals()[name])
    return f"test_function.py:{first + len(lines) - 1}"


class Constant:
    """A judge of its own."""

    episodes_per_call = None
    calls_at_once = 1

    def __init__(self, value: float) -> None:
        self._value = value

    async def judge(self, episodes: list[JudgedEpisode]) -> list[float]:
        return [self._value] * len(episodes)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_rewards", sys.modules[__name__])


async def test_a_plain_function_runs_in_a_thread_with_its_config() -> None:
    judge = make_judge("my_rewards:length", {"perWord": 0.5})
    assert await judge.judge([episode("one two three"), episode("one")]) == [1.5, 0.5]


async def test_an_async_function_scores_episodes_side_by_side() -> None:
    judge = make_judge("my_rewards:overlap", {})
    scores = await judge.judge([episode(str(n), item={"solution": "3"}) for n in range(10)])
    assert scores == [float(n == 3) for n in range(10)]
    assert side_by_side == [0, 10]


async def test_what_a_function_raises_fails_one_episode() -> None:
    good, bad = await make_judge("my_rewards:picky", {}).judge([episode("yes"), episode("")])
    assert good == pytest.approx(1 / 3)
    assert isinstance(bad, JudgeFailed)
    assert str(bad) == f"ZeroDivisionError: division by zero ({place('picky')})"


@pytest.mark.parametrize(
    ("type", "message"),
    [
        ("quits", "SystemExit: 2"),
        ("quits_later", "SystemExit: 2"),
        ("is_cancelled", "CancelledError: inner"),
    ],
)
async def test_a_function_ends_neither_the_process_nor_the_call(type: str, message: str) -> None:
    judgements = await make_judge(f"my_rewards:{type}", {}).judge([episode(), episode()])
    reasons = [str(judgement) for judgement in judgements]
    assert reasons == [f"{message} ({place(type)})"] * 2


async def test_calls_that_hang_do_not_stand_in_the_way_of_later_ones() -> None:
    judge = make_judge("my_rewards:hangs", {})
    for _ in range(2 * judge.calls_at_once):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(judge.judge([episode("")]), 0.02)
    assert await asyncio.wait_for(judge.judge([episode("yes")]), 30) == [1.0]


async def test_a_class_that_judges_is_used_as_it_is() -> None:
    assert await make_judge("my_rewards:Constant", {"value": 2.0}).judge(
        [episode(), episode()]
    ) == [2.0, 2.0]


@pytest.mark.parametrize("type", ["my_rewards:length", "my_rewards:Constant"])
def test_a_config_key_that_the_code_does_not_know_is_refused(type: str) -> None:
    with pytest.raises(JudgeConfigError, match="colour"):
        make_judge(type, {"colour": "red"})


def test_a_trajectory_is_shown_as_the_policy_saw_it() -> None:
    tokenizer = build_task_tokenizer(["hot?", "cold", " "], 100)
    chat = ChatFormat(tokenizer)
    prompt_T, answer_T = chat.first("", "hot?"), chat.answer("cold")
    zeros = np.zeros(len(answer_T), np.float32)
    turn = Turn(
        prompt_T, answer_T, zeros, zeros.astype(np.int32), reward=0.5, valid=False, action="cold"
    )
    found = judged_episode(
        Trajectory(EpisodeKey(Stream.TRAIN, 0, 0), "A", (turn,), StopReason.COMPLETED),
        chat,
        {"n": 1},
    )
    assert found.turns == (
        JudgedTurn("<|user|>hot?<|end|><|assistant|>", "cold", 0.5, valid=False, action="cold"),
    )
    assert (found.tag, found.item, found.score) == ("A", {"n": 1}, 0.5)


def test_templates_are_filled_with_what_an_episode_has() -> None:
    turns = (JudgedTurn("Q1?", "A1", 0.25), JudgedTurn("Q2?", "A2 {x}", 0.5))
    whole = JudgedEpisode("quiz", turns, {"solution": "42"}, {"success": 1.0})
    template = "{transcript}|{prompt}|{answer}|{score}|{tag}|{item[solution]}|{metrics[success]}"
    assert whole.fill(template) == "Q1?A1Q2?A2 {x}|Q1?|A2 {x}|0.75|quiz|42|1.0"
