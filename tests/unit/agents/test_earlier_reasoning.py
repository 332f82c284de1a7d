"""Reasoning of earlier turns: kept in one sequence, or dropped where the chat template drops it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agenticrun_api import Pipeline
from agenticrun_workers.agents import ChatFormat, ChatTemplateError, make_agent
from agenticrun_workers.agents.outside.session import Policy, Session
from agenticrun_workers.agents.registry import AgentConfigError
from agenticrun_workers.agents.turn_based import Exchange
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.rollout.env_worker import build_agents
from agenticrun_workers.types import (
    ChatSettings,
    FinishReason,
    Generation,
    GenerationRequest,
    StopReason,
    Trajectory,
)
from byte_level import byte_level_tokenizer
from outside_agents import CORPUS, EPISODE, LIMITS, Says, check_token_for_token, user
from template_tokenizers import template_tokenizer, templates

QWEN3 = templates()["qwen3"]
"""Writes the reasoning of answers after the last user message, and leaves out that before it."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "description": "Number."}},
            },
        },
    }
]
FOUR = "<think>\nTwo and two.\n</think>\n\n4."
CALL = (
    '<think>\nI add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
)


def made(template: str = QWEN3, *, drops: bool = True) -> Any:
    tokenizer = byte_level_tokenizer(CORPUS, template)
    tokenizer.chat_settings = ChatSettings(model="tiny", drops_reasoning=drops)
    return tokenizer


def session_of(policy: Says, template: str = QWEN3, *, drops: bool = True) -> Session:
    tokenizer = made(template, drops=drops)
    return Session(Policy(tokenizer, ChatFormat(tokenizer), LIMITS, "policy"), EPISODE, policy)


async def say(its: Session, messages: list[Any], **more: Any) -> dict[str, Any]:
    response = await its.chat({"model": "policy", "messages": messages, **more})
    message: dict[str, Any] = response.chat_body()["choices"][0]["message"]
    return message


def prompts(its: Session) -> list[list[str]]:
    shown = its.policy.chat.shown
    return [[shown(answer.sampled.prompt_T) for answer in b] for b in its.recorded.branches()]


@pytest.mark.parametrize("returns_reasoning", [True, False])
@pytest.mark.parametrize("drops", [True, False])
async def test_a_question_after_reasoning_begins_a_sequence_only_if_the_run_drops_it(
    drops: bool, returns_reasoning: bool
) -> None:
    its = session_of(Says([FOUR, "<think>\n\n</think>\n\nYes."]), drops=drops)
    answer = await say(its, [user("2 + 2?")])
    if not returns_reasoning:
        del answer["reasoning_content"]
    conversation = [user("2 + 2?"), answer, user("Sure?")]
    await say(its, conversation)
    begun = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    asked = "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    if drops:
        assert prompts(its) == [[begun], [f"{begun}4.{asked}"]]
        rendered = its.policy.chat.render(
            [user("2 + 2?"), {"role": "assistant", "content": "4."}, user("Sure?")], prompt=True
        )
        assert prompts(its)[1] == [rendered]
    else:
        assert prompts(its) == [[begun, f"{begun}{FOUR}{asked}"]]


async def test_reasoning_stays_until_the_next_question_where_the_template_keeps_it() -> None:
    policy = Says([CALL, FOUR, CALL, FOUR])
    its = session_of(policy)
    conversation: list[Any] = []
    for question in ("2 + 2?", "Again?"):
        call = await say(its, [*conversation, user(question)], tools=TOOLS)
        result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "4"}
        conversation += [user(question), call, result]
        conversation.append(await say(its, conversation, tools=TOOLS))
    (first, called), (second, again) = prompts(its)
    assert called.startswith(f"{first}{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n4")
    assert "I add." not in second
    assert "Two and two." not in second
    assert again.startswith(f"{second}{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n4")


async def test_answers_without_reasoning_stay_one_sequence() -> None:
    its = session_of(Says(["4.", "Yes."]))
    answer = await say(its, [user("2 + 2?")])
    await say(its, [user("2 + 2?"), answer, user("Sure?")])
    (branch,) = its.recorded.branches()
    assert len(branch) == 2


async def test_every_sampled_token_is_trained_once() -> None:
    policy = Says([CALL, FOUR, FOUR])
    its = session_of(policy)
    call = await say(its, [user("2 + 2?")], tools=TOOLS)
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "4"}
    talk = [user("2 + 2?"), call, result]
    talk.append(await say(its, talk, tools=TOOLS))
    await say(its, [*talk, user("Sure?")], tools=TOOLS)
    chat = its.policy.chat
    trajectories = [
        Trajectory(
            EPISODE.key,
            "outside",
            tuple(answer.sampled.turn(chat, 0.0) for answer in branch),
            StopReason.COMPLETED,
        )
        for branch in its.recorded.branches()
    ]
    check_token_for_token(trajectories, policy.asked)
    assert [len(each.turns) for each in trajectories] == [2, 1]


@pytest.mark.parametrize(
    ("name", "between_turns", "after_a_tool"),
    [
        ("qwen3", True, False),
        ("qwen3_instruct_2507", False, False),
        ("gptoss", True, False),
        ("glm4moe", True, False),
        ("muse_glimmer", False, False),
        ("deepseekv3", True, True),
    ],
)
def test_the_template_says_where_reasoning_is_dropped(
    name: str, between_turns: bool, after_a_tool: bool
) -> None:
    tokenizer = template_tokenizer(name, templates()[name])
    tokenizer.chat_settings = replace(tokenizer.chat_settings, drops_reasoning=True)
    chat = ChatFormat(tokenizer)
    assert chat.drops_between_turns is between_turns
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "add", "arguments": {"a": 1}},
    }
    result = {"role": "tool", "tool_call_id": "call00001", "content": "4"}
    if chat.shows_tools(TOOLS):
        assert chat.drops_reasoning([result], [call], TOOLS) is after_a_tool


class Counts:
    """An environment of three steps that says how many came before."""

    instruction = "Count."
    steps = 0

    def reset(self, seed: int, split: str) -> str:
        return "0?"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        self.steps += 1
        return f"{self.steps}?", float(self.steps), self.steps == 3, False, {}


def played(*, drops: bool) -> tuple[Trajectory, ChatFormat, Says]:
    tokenizer, policy = made(drops=drops), Says(["<think>\nOne.\n</think>\n\n1", "2", "3"])
    agent = make_agent("multi_turn", {}, tokenizer=tokenizer, limits=LIMITS)
    env: Any = Counts()
    episode = replace(EPISODE, item=None)
    found = asyncio.run(agent.collect_trajectory(episode, env, policy))
    assert isinstance(found, Trajectory)
    return found, ChatFormat(tokenizer), policy


def test_an_agent_of_many_turns_has_a_sample_for_each_turn() -> None:
    trajectory, chat, policy = played(drops=True)
    assert trajectory.stepwise
    talk: list[Any] = [{"role": "system", "content": "Count."}]
    for turn, (request, answer) in zip(trajectory.turns, policy.asked, strict=True):
        number = len(talk) // 2
        talk.append(user(f"{number}?"))
        assert chat.shown(turn.prompt_T) == chat.render(talk, prompt=True)
        assert turn.prompt_T.tolist() == request.prompt_tokens.tolist()
        assert turn.response_T.tolist() == answer.tokens_T.tolist()
        talk.append({"role": "assistant", "content": str(number + 1)})
    assert [turn.reward for turn in trajectory.turns] == [1.0, 2.0, 3.0]


def test_an_agent_of_many_turns_has_one_sample_if_the_run_keeps_reasoning() -> None:
    trajectory, chat, _ = played(drops=False)
    assert not trajectory.stepwise
    assert "One." in chat.shown(trajectory.tokens_T)


def test_tokens_that_continue_an_answer_are_refused() -> None:
    with pytest.raises(ChatTemplateError, match="earlierReasoning: Keep") as refused:
        ChatFormat(made()).next("Sure?", ended=True)
    assert "tiny" in str(refused.value)
    with pytest.raises(AgentConfigError, match="earlierReasoning: Keep"):
        make_agent("math_multi_turn", {}, tokenizer=made(), limits=LIMITS)


MALFORMED = [
    "<|channel|>final<|message|>1<|end|>x<|channel|>analysis<|message|>Hm.",
    "x<|channel|>analysis<|message|>Hm.",
    "<|channel|>analysis<|message|>a<|channel|>analysis<|message|>b<|end|>"
    "<|start|>assistant<|channel|>final<|message|>1",
    "x<|channel|>anal<|end|>ysis<|message|>Hm.<|chan<|end|>nel|>analysis<|message|>",
    "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add<|message|>{"a": 2}',
]


@pytest.mark.parametrize("malformed", MALFORMED)
def test_a_malformed_answer_can_be_followed_where_the_template_refuses_its_marks(
    malformed: str,
) -> None:
    tokenizer = template_tokenizer("gptoss", templates()["gptoss"])
    tokenizer.chat_settings = replace(tokenizer.chat_settings, drops_reasoning=True)
    agent: Any = make_agent("multi_turn", {}, tokenizer=tokenizer, limits=LIMITS)
    prompt_T = agent.prompt("Count.", [Exchange("0?", malformed, "1", True)], "1?")
    assert "1?" in agent.chat.shown(prompt_T)


async def test_a_malformed_answer_that_the_template_refuses_is_continued_as_sampled() -> None:
    tokenizer = template_tokenizer("gptoss", templates()["gptoss"])
    tokenizer.chat_settings = replace(tokenizer.chat_settings, drops_reasoning=True)
    chat = ChatFormat(tokenizer)
    texts = iter([MALFORMED[0], "<|channel|>final<|message|>Yes."])

    async def policy(request: GenerationRequest) -> Generation:
        tokens_T = chat.answer(next(texts))
        logprobs_T = np.zeros(len(tokens_T), np.float32)
        return Generation(tokens_T, logprobs_T, np.zeros_like(tokens_T), FinishReason.STOP)

    its = Session(Policy(tokenizer, chat, LIMITS, "policy"), EPISODE, policy)
    answer = await say(its, [user("2 + 2?")])
    await say(its, [user("2 + 2?"), answer, user("Sure?")])
    ((_, second),) = prompts(its)
    assert MALFORMED[0] in second
    assert [each.valid for each in its.recorded.answers] == [False, True]


@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("drops", [True, False])
def test_a_weight_of_observations_is_refused_where_each_turn_is_a_sample(
    drops: bool, weight: float
) -> None:
    pipeline = Pipeline.model_validate(
        {
            "maxSteps": 1,
            "rolloutBatchSize": 4,
            "valBatchSize": 4,
            "sequenceLength": 256,
            "envs": [{"tag": "A", "type": "frozen_lake", "maxSteps": 3, "maxTokensPerStep": 2}],
            "trainEnvs": {"groups": 2, "groupSize": 2, "tags": ["A"]},
            "valEnvs": {"groups": 2, "tags": ["A"]},
            "warmup": {"steps": 1, "observationWeight": weight},
        }
    )
    if drops and weight:
        with pytest.raises(InvalidConfig, match="earlierReasoning: Keep") as refused:
            build_agents(pipeline, made(drops=drops))
        assert refused.value.path == "spec.pipeline.warmup.observationWeight"
    else:
        assert build_agents(pipeline, made(drops=drops))
