"""Answers with a format: what the client gets, and that every draw is trained as it was sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.agents import AgentLimits
from agenticrun_workers.agents.outside.messages import ApiError
from agenticrun_workers.agents.outside.session import MAX_DRAFTS
from agenticrun_workers.types import FinishReason, GenerationRequest
from outside_agents import (
    CHAT,
    TOKENIZER,
    Says,
    check_token_for_token,
    play,
    say,
    session,
    user,
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}, "why": {"type": "string"}},
    "required": ["sum", "why"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "subtract")
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "subtract"}}


def rest_of(text: str) -> Any:
    """A policy that goes on with this text from where the answer is."""

    def next(request: GenerationRequest) -> str:
        answer = CHAT.shown(request.prompt_tokens).rpartition("<|im_start|>assistant\n")[2]
        return text[len(answer) :]

    return next


def test_an_answer_in_the_format_is_one_draw_and_ends_where_the_value_ends(agent_of: Any) -> None:
    async def run(base_url: str, task: Any) -> float:
        answer = await say(base_url, [user("1+1?")], response_format=FORMAT, logprobs=True)
        choice = answer.choices[0]
        assert json.loads(choice.message.content) == {"sum": 2, "why": "so"}
        assert choice.finish_reason == "stop"
        past = [user("1+1?"), choice.message, user("sure?")]
        await say(base_url, past)
        return 1.0

    policy = Says(['{"sum": 2, "why": "so"} and more', "yes"])
    (trajectory,) = play(policy, run=agent_of(run))
    check_token_for_token([trajectory], policy.asked)
    assert '"so"}<|im_end|>\n<|im_start|>user\nsure?' in CHAT.shown(trajectory.tokens_T)


def test_a_draw_that_leaves_the_format_is_trained_and_what_follows_is_written(
    agent_of: Any,
) -> None:
    """The first draw lacks the key; the second one says what no integer is, three times."""

    async def run(base_url: str, task: Any) -> float:
        answer = await say(base_url, [user("?")], response_format=FORMAT, logprobs=True)
        choice = answer.choices[0]
        assert json.loads(choice.message.content) == {"sum": 0, "why": "x"}
        logprobs = [each.logprob for each in choice.logprobs.content]
        assert answer.usage.completion_tokens == len(logprobs)
        assert logprobs.count(0.0) == len(TOKENIZER.encode('um": 0, "why": '))
        await say(base_url, [user("?"), choice.message, user("sure?")])
        return 1.0

    policy = Says(['{"s": 2', "two", "three", "four", '"x"}', "yes"])
    trajectories = play(policy, run=agent_of(run))
    check_token_for_token(trajectories, policy.asked)
    ends = [CHAT.shown(each.turns[-1].response_T) for each in trajectories]
    assert ends == ['{"s"', "t", "t", "f", "yes<|im_end|>"]
    assert [each.turns[-1].valid for each in trajectories] == [False] * 4 + [True]
    assert [each.score for each in trajectories] == [1.0] * 5
    last = CHAT.shown(trajectories[-1].tokens_T)
    assert '{"sum": 0, "why": "x"}<|im_end|>\n<|im_start|>user\nsure?' in last


def test_an_answer_whose_end_is_written_has_only_drafts(agent_of: Any) -> None:
    """Nothing of its last part is sampled, so there is nothing of it to train."""

    async def run(base_url: str, task: Any) -> None:
        answer = await say(base_url, [user("?")], response_format=FORMAT)
        assert json.loads(answer.choices[0].message.content) == {"sum": 2, "why": "x"}
        async with openai.AsyncOpenAI(base_url=base_url, api_key="any") as http:
            body = {"reward": 0.5, "trajectory": answer.id}
            await http.post(task.reward_url, body=body, cast_to=object)

    policy = Says(['{"sum": 2, "why": "x"'])
    trajectories = play(policy, run=agent_of(run))
    check_token_for_token(trajectories, policy.asked)
    assert [(each.score, each.turns[0].valid) for each in trajectories] == [(0.5, False)]
    assert CHAT.shown(trajectories[0].turns[0].response_T).endswith('"x"<|im_end|>')


@given(st.lists(st.text('{}[]":, sumwhy12\\\n', max_size=9), min_size=1), st.integers(20, 300))
def test_whatever_is_sampled_the_answer_has_the_format_and_each_draw_is_trained_once(
    texts: list[str], longest: int
) -> None:
    async def ask() -> None:
        says: Iterator[str] = (texts[place % len(texts)] for place in range(10**6))
        policy = Says(says)
        limits = AgentLimits(max_turns=3, max_tokens_per_step=longest, sequence_length=4000)
        one = session(policy, limits)
        response = await one.chat(
            {"model": "policy", "messages": [user("?")], "response_format": FORMAT, "n": 2}
        )
        for choice in response.choices:
            assert len(choice.generation.tokens_T) <= longest
            if choice.finish_reason == "stop":
                jsonschema.validate(json.loads(choice.message.content), SCHEMA)
            else:
                assert choice.finish_reason == "length"
        answers = [answer for answer in one.recorded.answers if answer.sampled_any]
        assert len(one.recorded.answers) <= 2 * (MAX_DRAFTS + 1)
        trained = [answer for branch in one.recorded.branches() for answer in branch]
        assert {id(answer) for answer in trained} == {id(answer) for answer in answers}
        by_engine = {answer.sampled.generation.engine: answer.sampled for answer in answers}
        for request, made in policy.asked:
            sampled = by_engine.get(made.engine)
            if sampled is not None:
                size = len(sampled.generation.tokens_T)
                assert np.array_equal(sampled.prompt_T, request.prompt_tokens)
                assert np.array_equal(sampled.generation.tokens_T, made.tokens_T[:size])
                assert np.array_equal(sampled.generation.logprobs_T, made.logprobs_T[:size])

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("choice", "says", "name"),
    [
        ("required", 'add", "arguments": {"a": 1}}\n</tool_call> and more', "add"),
        ("required", 'divide", "arguments": {}}\n</tool_call>', "add"),
        (NAMED, '{"a": 1}}\n</tool_call>', "subtract"),
    ],
)
def test_a_call_that_the_client_demands_is_begun_by_the_endpoint(
    agent_of: Any, choice: Any, says: str, name: str
) -> None:
    async def run(base_url: str, task: Any) -> float:
        answer = await say(base_url, [user("?")], tools=TOOLS, tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == name
        assert answer.choices[0].finish_reason == "tool_calls"
        message = answer.choices[0].message
        result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        await say(base_url, [user("?"), message, result], tools=TOOLS)
        return 1.0

    draws = [says] * 3 + ["{}}\n</tool_call>"] if "divide" in says else [says]
    policy = Says([*draws, "done"])
    trajectories = play(policy, run=agent_of(run))
    check_token_for_token(trajectories, policy.asked)
    assert CHAT.shown(policy.asked[0][0].prompt_tokens).endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "'
        + ('subtract", "arguments": ' if choice is NAMED else "")
    )
    assert len(trajectories) == len(draws)


async def test_after_a_draft_the_policy_is_asked_for_few_tokens_that_grow() -> None:
    whole = json.dumps({"sum": 1, "why": "x" * 150})
    policy, first = Says(rest_of(whole)), Says(["Well"])

    async def generate(request: GenerationRequest) -> Any:
        return await (policy(request) if first.asked else first(request))

    one = session(generate)
    response = await one.chat(
        {"model": "policy", "messages": [user("?")], "response_format": FORMAT}
    )
    assert response.choices[0].message.content == whole
    sizes = [request.sampling.max_new_tokens for request, _ in policy.asked]
    assert sizes == [32, 64, 128]
    draft, answer = one.recorded.answers
    made = np.concatenate([generation.logprobs_T for _, generation in policy.asked])
    said = answer.sampled.generation
    assert said.logprobs_T.tolist() == made[: len(said.logprobs_T)].tolist()
    assert draft.draft_of is answer
    assert np.array_equal(answer.sampled.prompt_T, policy.asked[0][0].prompt_tokens)


async def test_bytes_that_are_no_character_leave_the_format() -> None:
    """A byte-level policy may sample the first byte of a character again and again."""
    (first, *_) = TOKENIZER.encode("\N{PILE OF POO}", add_special_tokens=False)
    policy = Says(['{"sum": 1, "why": "x"}'])

    async def generate(request: GenerationRequest) -> Any:
        if not policy.asked:
            made = await policy(request)
            return replace(
                made,
                tokens_T=np.full(30, first, np.int32),
                logprobs_T=np.zeros(30, np.float32),
                versions_T=np.zeros(30, np.int32),
                finish=FinishReason.LENGTH,
            )
        return await rest(request)

    rest = Says(rest_of('{"sum": 1, "why": "x"}'))
    one = session(generate)
    response = await one.chat(
        {"model": "policy", "messages": [user("?")], "response_format": FORMAT}
    )
    assert response.choices[0].message.content == '{"sum": 1, "why": "x"}'
    assert len(one.recorded.answers) == 2


def test_a_stop_text_ends_an_answer_before_its_format_does(agent_of: Any) -> None:
    """smolagents demands a call and sends stop texts, too."""

    async def run(base_url: str, task: Any) -> float:
        for says, ends in ((CALL, "tool_calls"), ('{"a": "Observation: 1"}', "stop")):
            answer = await say(
                base_url,
                [user(says)],
                tools=TOOLS[:1],
                tool_choice="required",
                stop=["Calling tools:", "Observation:"],
            )
            assert answer.choices[0].finish_reason == ends
        assert answer.choices[0].message.content.endswith('{"a": "')
        return 1.0

    policy = Says(['{"a": 1}}\n</tool_call>Observation:', '{"a": "Observation: 1"}'])
    trajectories = play(policy, run=agent_of(run))
    check_token_for_token(trajectories, policy.asked)
    assert CHAT.shown(trajectories[1].tokens_T).endswith('{"a": "Observation:')


def test_with_tools_and_a_format_the_policy_calls_or_answers(agent_of: Any) -> None:
    async def run(base_url: str, task: Any) -> float:
        messages: list[Any] = [user("?")]
        more: Any = {"tools": TOOLS, "response_format": FORMAT}
        answer = await say(base_url, messages, **more)
        (call,) = answer.choices[0].message.tool_calls
        messages += [
            answer.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "2"},
        ]
        answer = await say(base_url, messages, **more)
        assert json.loads(answer.choices[0].message.content) == {"sum": 2, "why": ""}
        return 1.0

    policy = Says([CALL, '{"sum": 2, "why": ""}'])
    trajectories = play(policy, run=agent_of(run))
    assert len(trajectories) == 1
    check_token_for_token(trajectories, policy.asked)


def test_without_parallel_calls_the_answer_ends_after_the_first(agent_of: Any) -> None:
    async def run(base_url: str, task: Any) -> float:
        for parallel, calls in ((True, 2), (False, 1)):
            answer = await say(base_url, [user("?")], tools=TOOLS, parallel_tool_calls=parallel)
            assert len(answer.choices[0].message.tool_calls) == calls
        return 1.0

    policy = Says(["I add. " + CALL + CALL] * 2)
    trajectories = play(policy, run=agent_of(run))
    check_token_for_token(trajectories, policy.asked)
    assert CHAT.shown(trajectories[1].turns[0].response_T) == "I add. " + CALL


async def test_the_arguments_of_a_strict_tool_follow_its_schema() -> None:
    tool = {"name": "add", "parameters": SCHEMA, "strict": True}
    policy = Says(
        rest_of('<tool_call>\n{"name": "add", "arguments": {"sum": 1, "why": ""}}\n</tool_call>')
    )
    response = await session(policy).chat(
        {
            "model": "policy",
            "messages": [user("?")],
            "tools": [{"type": "function", "function": tool}],
            "tool_choice": "required",
        }
    )
    (call,) = response.choices[0].message.tool_calls
    assert json.loads(call.arguments) == {"sum": 1, "why": ""}
    assert len(policy.asked) == 1


async def test_a_strict_tool_may_have_any_schema_where_no_call_is_demanded() -> None:
    bounded = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0}}}
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": bounded, "strict": True},
    }
    asked = {"model": "policy", "messages": [user("?")], "tools": [tool]}
    response = await session(Says([CALL])).chat(asked)
    assert response.choices[0].message.tool_calls[0].name == "add"
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        with pytest.raises(ApiError) as refused:
            await session(Says([])).chat(asked | {"tool_choice": choice})
        assert refused.value.param == "tools[0].function.parameters.properties.a.minimum"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": FORMAT, "max_tokens": 0}, "max_tokens"),
        ({"tool_choice": NAMED, "tools": TOOLS, "max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "strict": True}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS},
            "tool_choice",
        ),
    ],
)
async def test_formats_that_cannot_be_kept_are_refused(body: dict[str, Any], param: str) -> None:
    policy = Says(["a"])
    with pytest.raises(ApiError) as refused:
        await session(policy).chat({"model": "policy", "messages": [user("?")], **body})
    assert (refused.value.status, refused.value.param) == (400, param)
    assert not policy.asked
