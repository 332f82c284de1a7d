"""The step-wise agent: each prompt is complete.

It shows every past action and observation of its window.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.agents import (
    AgentConfigError,
    AgentLimits,
    Episode,
    StepWiseAgent,
    agent_texts,
    make_agent,
)
from agenticrun_workers.envs import FrozenLake, StepResult
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

ENV = FrozenLake()
WORDS = [
    word
    for text in (ENV.instruction, *agent_texts("step_wise", {}), "<a></a>jump", "now ")
    for word in words_of(text)
]
TOKENIZER = build_task_tokenizer([*ENV.vocabulary(), *WORDS], 1000)
EPISODE = Episode(EpisodeKey(Stream.TRAIN, 3, 1), "lake", env_seed=5, sampling_seed=9)
LIMITS = AgentLimits(max_turns=4, max_tokens_per_step=8, sequence_length=500)
MOVES = ("Left", "Right", "jump", "Up", "Down", "Left")


class Counting:
    """Shows how often it was stepped; `jump` is no action."""

    instruction = ""
    blocking = False

    def reset(self, seed: int, split: Stream) -> str:
        self.count = 0
        return "P"

    def step(self, action: str) -> StepResult:
        self.count += 1
        return StepResult(
            "_" * self.count, 0.5, False, metrics={"action_is_valid": float(action != "jump")}
        )

    def valid_actions(self) -> list[str]:
        return ["Left"]


def agent(limits: AgentLimits = LIMITS, **config: Any) -> StepWiseAgent:
    made = make_agent("step_wise", config, tokenizer=TOKENIZER, limits=limits)
    assert isinstance(made, StepWiseAgent)
    return made


def play(
    player: StepWiseAgent, answers: tuple[str, ...] = MOVES, env: Any = None
) -> tuple[Trajectory, list[GenerationRequest]]:
    requests: list[GenerationRequest] = []

    async def say(request: GenerationRequest) -> Generation:
        text = answers[len(requests)]
        requests.append(request)
        tokens = player.chat.answer(text) if text else np.zeros(0, np.int32)
        return Generation(
            tokens,
            np.full(len(tokens), -1.0, np.float32),
            np.zeros(len(tokens), np.int32),
            FinishReason.STOP,
        )

    return asyncio.run(player.collect_trajectory(EPISODE, env or Counting(), say)), requests


def shown(request: GenerationRequest) -> str:
    return str(TOKENIZER.decode(request.prompt_tokens.tolist()))


@given(
    st.integers(0, 6), st.lists(st.sampled_from(["Left", "Right", "jump"]), min_size=6, max_size=6)
)
def test_the_prompt_lists_the_newest_past_actions_and_observations_valid_or_not(
    length: int, answers: list[str]
) -> None:
    player = agent(
        AgentLimits(6, 8, 500),
        historyLength=length,
        systemTemplate="",
        agentTemplate="{step_count}:{history}now {observation}{turns_left}{history_length}",
        historyTemplate="[{turn}]{observation}-> {action}",
    )
    _, requests = play(player, tuple(answers))
    seen = ["P", *("_" * count for count in range(1, 7))]
    for turn, request in enumerate(requests):
        past = [f"[{n + 1}]{seen[n]}-> {answers[n]}" for n in range(turn)][max(0, turn - length) :]
        expected = (
            f"<|user|>{turn}:{''.join(past)}now {seen[turn]}{6 - turn}{len(past)}<|end|>"
            "<|assistant|>"
        )
        assert shown(request) == expected
    assert len(requests) == 6


def test_the_tokens_are_the_chat_template_s_own_rendering_of_each_prompt() -> None:
    player = agent(historyLength=3)
    trajectory, requests = play(player, env=FrozenLake())
    for turn, request in zip(trajectory.turns, requests, strict=True):
        text = shown(request)
        system, user = (
            part.removesuffix("<|end|>")
            for part in text.removeprefix("<|system|>").split("<|user|>")
        )
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": user.removesuffix("<|end|><|assistant|>")},
        ]
        rendered = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert system == ENV.instruction
        assert request.prompt_tokens.tolist() == turn.prompt_T.tolist() == rendered


def test_every_turn_is_a_sample_of_its_own_with_its_state_reward_and_validity() -> None:
    trajectory, _ = play(agent())
    assert trajectory.stepwise
    assert trajectory.sample_lengths == [
        len(turn.prompt_T) + len(turn.response_T) for turn in trajectory.turns
    ]
    assert [turn.valid for turn in trajectory.turns] == [True, True, False, True]
    assert [turn.reward for turn in trajectory.turns] == [0.5] * 4
    assert [turn.action for turn in trajectory.turns] == ["Left", "Right", "jump", "Up"]
    assert [turn.state for turn in trajectory.turns] == [
        hashlib.sha256(o.encode()).digest() for o in ("P", "_", "__", "___")
    ]


def test_requests_of_an_episode_are_one_session_with_a_seed_per_turn() -> None:
    _, requests = play(agent())
    assert {request.session for request in requests} == {"train-3-1"}
    assert len({request.seed for request in requests}) == 4


def test_the_token_limit_bounds_one_turn_and_not_the_episode() -> None:
    trajectory, requests = play(agent(AgentLimits(6, 8, 40), historyLength=1, systemTemplate=""))
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert trajectory.num_tokens > 40
    assert all(len(r.prompt_tokens) + r.sampling.max_new_tokens <= 40 for r in requests)


def test_a_first_prompt_that_is_too_long_is_a_context_overflow() -> None:
    trajectory, requests = play(agent(AgentLimits(4, 8, 5)))
    assert (trajectory.stop_reason, trajectory.turns, requests) == (
        StopReason.CONTEXT_OVERFLOW,
        (),
        [],
    )


def test_an_empty_response_is_a_parse_error() -> None:
    trajectory, _ = play(agent(), ("Left", ""))
    assert trajectory.stop_reason is StopReason.PARSE_ERROR
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize(
    ("policy", "reason", "turns"), [("continue", "max_turns", 4), ("stop", "parse_error", 1)]
)
def test_an_answer_without_an_action_is_invalid_or_the_end(
    policy: str, reason: str, turns: int
) -> None:
    player = agent(actionPattern="<a>(.*)</a>", onParseError=policy)
    trajectory, requests = play(player, ("Left", "<a>Up</a>", "Down", "Left"))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (reason, turns)
    assert not trajectory.turns[0].valid
    if policy == "continue":
        assert [turn.action for turn in trajectory.turns] == [None, "Up", None, None]
        assert "-> Left" in shown(requests[1])
        assert "-> Up" in shown(requests[2])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"agentTemplate": "{state}"}, "state.*known fields"),
        ({"historyTemplate": "{history}"}, "history.*known fields"),
        ({"historyLength": -1}, "historyLength"),
        ({"onParseError": "explode"}, "onParseError"),
    ],
)
def test_a_wrong_config_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(AgentConfigError, match=message):
        agent(**config)


def test_an_agents_texts_are_its_templates_without_placeholders_and_digits_where_it_counts() -> (
    None
):
    assert agent_texts("multi_turn", {}) == ["", ""]
    assert agent_texts(
        "multi_turn", {"agentTemplate": "see {observation}", "actionPattern": "<a>"}
    ) == ["", "see ", "<a>"]
    assert set("0123456789") <= set(agent_texts("multi_turn", {"agentTemplate": "{turn}"}))
