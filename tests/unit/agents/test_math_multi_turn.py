"""The math agent of the guide: turns, feedback and rewards."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.agents import (
    AgentConfigError,
    AgentLimits,
    ChatFormat,
    Episode,
    MathMultiTurnAgent,
    QueuedAgent,
    make_agent,
)
from agenticrun_workers.envs import MathSingleStep
from agenticrun_workers.models.tokenizer import build_task_tokenizer, words_of
from agenticrun_workers.types import (
    EpisodeKey,
    FinishReason,
    Generation,
    GenerationRequest,
    StopReason,
    Stream,
    Trajectory,
)

WRONG = "Unfortunately your answer is wrong. Let's try again."
TOKENIZER = build_task_tokenizer([*map(str, range(19)), "+", "=", *words_of(WRONG)], 1000)
CHAT = ChatFormat(TOKENIZER)
EPISODE = Episode(
    EpisodeKey(Stream.TRAIN, 3, 1), "m", 5, 9, {"question": "3+4=", "answer": "#### 7"}
)
LIMITS = AgentLimits(max_turns=5, max_tokens_per_step=2, sequence_length=500)


def play(answers: list[str], limits: AgentLimits = LIMITS, **config: Any) -> list[Trajectory]:
    said = [CHAT.answer(answer)[:2] for answer in answers]
    number = 0

    async def generate(request: GenerationRequest) -> Generation:
        nonlocal number
        tokens = said[number]
        number += 1
        finish = FinishReason.STOP if tokens[-1] == CHAT.end_of_turn else FinishReason.LENGTH
        return Generation(
            tokens,
            np.full(len(tokens), -number, np.float32),
            np.full(len(tokens), number, np.int32),
            finish,
        )

    agent = make_agent("math_multi_turn", config, tokenizer=TOKENIZER, limits=limits)
    assert isinstance(agent, QueuedAgent)
    return asyncio.run(agent.collect_trajectory(EPISODE, MathSingleStep(instruction=""), generate))


def shown(trajectory: Trajectory) -> str:
    text: str = TOKENIZER.decode(trajectory.tokens_T.tolist())
    return text


def test_each_answer_is_a_trajectory_with_all_before_it_as_its_prompt() -> None:
    first, second = play(["8", "7", "1"])
    assert shown(first) == "<|user|>3+4=<|end|><|assistant|>8<|end|>"
    assert shown(second) == f"{shown(first)}<|user|>{WRONG}<|end|><|assistant|>7<|end|>"
    assert [TOKENIZER.decode(t.tokens_T[t.response_mask_T].tolist()) for t in (first, second)] == [
        "8<|end|>",
        "7<|end|>",
    ]
    assert [t.versions_T[t.response_mask_T].tolist() for t in (first, second)] == [[1, 1], [2, 2]]
    assert [(t.score, t.metrics) for t in (first, second)] == [
        (0.0, {"success": 1.0, "num_answers": 2.0}),
        (1.0, {"success": 1.0, "num_answers": 2.0}),
    ]


def test_the_feedback_follows_an_answer_that_was_cut() -> None:
    first, second = play(["12+5", "7"])
    assert shown(second).startswith(f"{shown(first)}<|end|><|user|>{WRONG}")


@given(
    st.lists(st.just("8"), max_size=4),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.5, 1.0]),
    st.sampled_from([0.0, 0.25]),
)
def test_rewards_are_those_of_the_guide(
    wrong: list[str], discount: float, scaling: float, bias: float
) -> None:
    config: dict[str, Any] = {
        "turnLevelDiscount": discount,
        "rewardScaling": scaling,
        "rewardBias": bias,
    }
    trajectories = play([*wrong, "7"], **config)
    each = [((right - 0.5) * 2 - bias) * scaling for right in [*[0.0] * len(wrong), 1.0]]
    expected = [
        sum(reward * discount**later for later, reward in enumerate(each[k:]))
        for k in range(len(each))
    ]
    assert [t.score for t in trajectories] == pytest.approx(expected)


def test_it_gives_up_after_num_turns() -> None:
    trajectories = play(["8"] * 9, numTurns=2)
    assert [(t.score, t.metrics["success"], t.stop_reason) for t in trajectories] == [
        (-2.0, 0.0, "completed"),
        (-1.0, 0.0, "completed"),
    ]


@pytest.mark.parametrize(
    ("limits", "reason", "count"),
    [
        (
            AgentLimits(max_turns=1, max_tokens_per_step=2, sequence_length=500),
            StopReason.MAX_TURNS,
            1,
        ),
        (
            AgentLimits(max_turns=9, max_tokens_per_step=2, sequence_length=20),
            StopReason.CONTEXT_OVERFLOW,
            1,
        ),
    ],
)
def test_the_limits_of_the_run_end_it_before(
    limits: AgentLimits, reason: StopReason, count: int
) -> None:
    assert [t.stop_reason for t in play(["8"] * 9, limits=limits)] == [reason] * count


def test_a_question_that_leaves_no_room_is_lost() -> None:
    (lost,) = play(["8"], limits=AgentLimits(max_turns=9, max_tokens_per_step=2, sequence_length=6))
    assert (lost.stop_reason, lost.turns) == (StopReason.CONTEXT_OVERFLOW, ())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"numTurns": 0}, "numTurns must be"),
        ({"turnLevelDiscount": 1.5}, "turnLevelDiscount must be"),
        ({"turns": 3}, "no config key 'turns'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(AgentConfigError, match=message):
        make_agent("math_multi_turn", config, tokenizer=TOKENIZER, limits=LIMITS)


def test_it_is_an_agent_with_queues() -> None:
    made = make_agent("math_multi_turn", {"gconfig": {"n": 4}}, tokenizer=TOKENIZER, limits=LIMITS)
    assert isinstance(made, QueuedAgent)
    assert isinstance(made.user, MathMultiTurnAgent)
    assert made.user.gconfig.n == 1
