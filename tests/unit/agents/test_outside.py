"""Outside agents: what a client may ask, what the engine is asked, and what becomes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from agenticrun_workers.agents import AgentLimits, OutsideAgent
from agenticrun_workers.agents.outside.messages import ApiError
from agenticrun_workers.types import StopReason, Trajectory
from outside_agents import (
    CHAT,
    EPISODE,
    LIMITS,
    TOKENIZER,
    Says,
    check_token_for_token,
    client,
    complete,
    play,
    say,
    session,
    user,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
CALL = 'Let me add. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'


def test_a_conversation_is_one_trajectory_token_for_token(agent_of: Any) -> None:
    def run(base_url: str, task: Any) -> float:
        messages: list[Any] = task.messages
        for text in ("and 2+2?", "why?", None):
            with OpenAI(base_url=base_url, api_key="any") as http:
                answer = http.chat.completions.create(model=task.model, messages=messages)
            messages.append(answer.choices[0].message)
            messages.append(user(text or ""))
        return 0.5

    policy = Says(["The sum is 2.", " 4 ", "Because."])
    (trajectory,) = play(policy, run=agent_of(run))
    check_token_for_token([trajectory], policy.asked)
    assert [turn.reward for turn in trajectory.turns] == [0, 0, 0.5]
    assert trajectory.stop_reason is StopReason.COMPLETED
    shown = CHAT.shown(policy.asked[2][0].prompt_tokens)
    assert shown == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\nThe sum is 2.<|im_end|>\n"
        "<|im_start|>user\nand 2+2?<|im_end|>\n<|im_start|>assistant\n 4 <|im_end|>\n"
        "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tool_calls_and_their_results(agent_of: Any) -> None:
    async def run(base_url: str, task: Any) -> float:
        messages: list[Any] = [user("1+1?")]
        answer = await say(base_url, messages, tools=TOOLS)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me add."
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "add",
            {"a": 1, "b": 1},
        )
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "two"}, user("so?")]
        answer = await say(base_url, messages, tools=TOOLS)
        assert answer.choices[0].message.content == "The sum is 2."
        assert answer.choices[0].message.tool_calls is None
        return 1.0

    policy = Says([CALL, "The sum is 2."])
    trajectories = play(policy, run=agent_of(run))
    assert len(trajectories) == 1
    check_token_for_token(trajectories, policy.asked)
    added = CHAT.shown(trajectories[0].turns[1].prompt_T)
    assert added == (
        "\n<|im_start|>user\n<tool_response>\n2\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>{"name": </tool_call>',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"nam": "a"}</tool_call>',
    ],
)
def test_a_call_that_cannot_be_read_stays_text_and_is_not_valid(agent_of: Any, broken: str) -> None:
    async def run(base_url: str, task: Any) -> float:
        answer = await say(base_url, [user("?")], tools=TOOLS)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
            broken,
            "stop",
        )
        return 0.0

    (trajectory,) = play(Says([broken]), run=agent_of(run))
    assert [turn.valid for turn in trajectory.turns] == [False]


def test_a_retry_and_a_fork_are_branches_and_shared_answers_are_trained_once_in_the_latest(
    agent_of: Any,
) -> None:
    async def run(base_url: str, task: Any) -> float:
        first = await say(base_url, [user("1+1?")])
        past = [user("1+1?"), first.choices[0].message]
        await say(base_url, [*past, user("sure?")])
        await say(base_url, [*past, user("sure?")])
        await say(base_url, [*past, user("why?")])
        await say(base_url, [user("2+2?")])
        return 1.0

    policy = Says(["2", "yes", "no", "because", "4"])
    trajectories = play(policy, run=agent_of(run))
    check_token_for_token(trajectories, policy.asked)
    assert [[turn.action for turn in trajectory.turns] for trajectory in trajectories] == [
        ["yes"],
        ["no"],
        ["2", "because"],
        ["4"],
    ]
    assert [trajectory.score for trajectory in trajectories] == [1, 1, 1, 1]


def test_the_n_answers_of_a_request_have_rewards_of_their_own(agent_of: Any) -> None:
    async def run(base_url: str, task: Any) -> None:
        both = await say(base_url, [user("?")], n=2)
        assert [choice.message.content for choice in both.choices] == ["a", "b"]
        async with client(base_url) as http:
            for choice in (0, 1):
                body = {"reward": choice + 0.5, "trajectory": both.id, "choice": choice}
                await http.post(task.reward_url, body=body, cast_to=object)

    policy = Says(["a", "b"])
    trajectories = play(policy, run=agent_of(run))
    check_token_for_token(trajectories, policy.asked)
    assert [trajectory.score for trajectory in trajectories] == [0.5, 1.5]
    assert len({request.seed for request, _ in policy.asked}) == 2


def test_a_stream_says_the_same(agent_of: Any) -> None:
    async def run(base_url: str, task: Any) -> float:
        async with client(base_url) as http:
            stream = await http.chat.completions.create(
                model="policy",
                messages=[user("?")],
                tools=cast(Any, TOOLS),
                stream=True,
                stream_options={"include_usage": True},
                logprobs=True,
            )
            chunks: list[Any] = [chunk async for chunk in stream]
            text = await http.completions.create(model="policy", prompt="x", stream=True)
            assert "".join([chunk.choices[0].text async for chunk in text]) == "y"
        assert [choice.finish_reason for chunk in chunks for choice in chunk.choices] == [
            None,
            "tool_calls",
        ]
        delta = chunks[0].choices[0].delta
        assert (delta.role, delta.content, delta.tool_calls[0].function.name) == (
            "assistant",
            "Let me add.",
            "add",
        )
        size = len(policy.asked[0][1].tokens_T)
        assert (
            chunks[-1].usage.completion_tokens == len(chunks[0].choices[0].logprobs.content) == size
        )
        return 0.0

    policy = Says([CALL, "y"])
    assert len(play(policy, run=agent_of(run))) == 2


def test_bytes_of_log_probs_are_the_answer(agent_of: Any) -> None:
    """Each character of several tokens has its bytes in these tokens."""
    text, end = "é🙂x天", "<|im_end|>"
    split = [[195], [169], [240], [159], [153], [130], [120], [229], [164], [169], [*end.encode()]]

    def check(tokens: Sequence[Any]) -> None:
        assert [token.bytes for token in tokens] == split
        assert b"".join(bytes(token.bytes) for token in tokens).decode() == text + end

    async def run(base_url: str, task: Any) -> float:
        check((await say(base_url, [user("?")], logprobs=True)).choices[0].logprobs.content)
        async with client(base_url) as http:
            stream: Any = await http.chat.completions.create(
                model="policy", messages=[user("?")], stream=True, logprobs=True
            )
            chunks = [chunk async for chunk in stream]
            check(chunks[0].choices[0].logprobs.content)
            responded = await http.responses.create(
                model="policy", input="?", include=["message.output_text.logprobs"]
            )
            output: Any = responded.output[0]
            check(output.content[0].logprobs)
        completed = await complete(base_url, "Q", logprobs=0)
        found = completed.choices[0].logprobs
        assert found.text_offset == [0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 4]
        assert found.tokens[6] == "x"
        assert found.tokens[-1] == end
        return 0.0

    play(Says([text] * 4), run=agent_of(run))


def test_texts_go_on_from_recorded_tokens_and_stop_texts_cut(agent_of: Any) -> None:
    """As agents that write `Observation:` themselves do."""

    async def run(base_url: str, task: Any) -> float:
        one = await complete(base_url, "Q: 1+1\n", stop=["\nObservation:"], logprobs=0)
        assert (one.choices[0].text, one.choices[0].finish_reason) == ("Act", "stop")
        assert one.choices[0].logprobs is not None
        assert (
            one.choices[0].logprobs.token_logprobs
            == policy.asked[0][1].logprobs_T[: len("Act\nObservation:")].tolist()
        )
        await complete(base_url, "Q: 1+1\nAct\nObservation: 2\n")
        return 1.0

    policy = Says(["Act\nObservation: never seen", "done"])
    (trajectory,) = play(policy, run=agent_of(run))
    check_token_for_token([trajectory], policy.asked)
    assert CHAT.shown(trajectory.tokens_T) == "Q: 1+1\nAct\nObservation: 2\ndone<|im_end|>"


@given(
    said=st.text("aß€😀 \n", max_size=12),
    kept=st.integers(0, 12),
    more=st.text("aß€😀", max_size=3),
    stop=st.sampled_from([None, "a", "€😀"]),
)
def test_a_text_is_tokenised_only_from_where_it_leaves_what_was_sampled(
    said: str, kept: int, more: str, stop: str | None
) -> None:
    """Check which part of a text is recorded and which is tokenised again.

    The tokens show it, because the policy samples byte by byte.
    """

    async def ask() -> None:
        policy = Says([said, "x"])
        one = session(policy)
        await one.complete({"model": "policy", "prompt": "Q", "stop": stop})
        (tokens,) = (answer.sampled.generation.tokens_T.tolist() for answer in one.recorded.answers)
        whole = CHAT.text(np.array(tokens, np.int32))
        expected = (
            said if stop is None or stop not in said else said[: said.index(stop) + len(stop)]
        )
        assert whole == expected
        text = whole[:kept] + more
        await one.complete({"model": "policy", "prompt": "Q" + text})
        shared = next(
            (place for place, (a, b) in enumerate(zip(whole, text, strict=False)) if a != b),
            min(len(whole), len(text)),
        )
        recorded = sum(
            len(TOKENIZER.encode(letter, add_special_tokens=False)) for letter in whole[:shared]
        )
        rest = TOKENIZER.encode(text[shared:], add_special_tokens=False)
        first_T = policy.asked[0][0].prompt_tokens
        assert policy.asked[1][0].prompt_tokens.tolist() == [
            *first_T.tolist(),
            *tokens[:recorded],
            *rest,
        ]

    asyncio.run(ask())


def test_tokens_may_be_the_prompt(agent_of: Any) -> None:
    async def run(base_url: str, task: Any) -> float:
        await complete(base_url, [5, 6, 7])
        more = [5, 6, 7, *policy.asked[0][1].tokens_T.tolist(), 9]
        await complete(base_url, more)
        return 1.0

    policy = Says(["ab", "c"])
    (trajectory,) = play(policy, run=agent_of(run))
    check_token_for_token([trajectory], policy.asked)


REFUSED: list[tuple[str, Any]] = [
    ("temperature", 0.3),
    ("top_p", 0.9),
    ("n", 0),
    ("max_tokens", 0),
    ("stop", [""]),
    ("seed", 1.5),
    ("frequency_penalty", 0.1),
    ("presence_penalty", 1),
    ("logit_bias", {"5": 1}),
    ("top_logprobs", 2),
    ("response_format", {"type": "grammar"}),
    ("response_format", "json"),
    ("tool_choice", "required"),
    ("tool_choice", "always"),
    ("tool_choice", {"type": "function", "function": {"name": "add"}}),
    ("parallel_tool_calls", "yes"),
    ("store", True),
    ("service_tier", "flex"),
    ("functions", []),
    ("reasoning_effort", "low"),
    ("echo", False),
    ("no_such_thing", 1),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[name for name, _ in REFUSED])
async def test_what_is_not_supported_is_refused_by_name(name: str, value: Any) -> None:
    policy = Says(["a"])
    with pytest.raises(ApiError) as refused:
        await session(policy).chat({"model": "policy", "messages": [user("?")], name: value})
    assert (refused.value.status, refused.value.param) == (400, name)
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert name in str(refused.value)
    assert not policy.asked


async def test_parameters_that_ask_for_nothing_else_are_taken() -> None:
    policy = Says(["a"])
    body = {
        "temperature": 0.8,
        "top_p": 1,
        "frequency_penalty": 0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "user": "me",
    }
    await session(policy).chat(
        {
            "model": "policy",
            "messages": [user("?")],
            "max_completion_tokens": 7,
            "top_logprobs": None,
            **body,
        }
    )
    assert policy.asked[0][0].sampling.max_new_tokens == 7
    assert policy.asked[0][0].sampling.temperature == 0.8


MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ([{"role": "robot", "content": ""}], "messages[0]"),
    ([user("?"), {"role": "user"}], "messages[1].content"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        "messages[0].content[0]",
    ),
    ([{"role": "user", "content": "?", "name": "me"}], "messages[0].name"),
    ([{"role": "user", "content": "?", "own": {"name": "me"}}], "messages[0].own"),
    ([{"role": "tool", "content": "2"}], "messages[0].tool_call_id"),
    ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0]"),
]


@pytest.mark.parametrize(("messages", "param"), MESSAGES, ids=[param for _, param in MESSAGES])
async def test_messages_that_cannot_be_read_are_refused_by_place(messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        await session(Says([])).chat({"model": "policy", "messages": messages})
    assert (refused.value.status, refused.value.param) == (400, param)


async def test_parts_of_text_and_developers_are_understood() -> None:
    policy = Says(["a"])
    messages = [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("x", "y")]},
    ]
    await session(policy).chat({"model": "policy", "messages": messages})
    assert "<|im_start|>system\nD<|im_end|>\n<|im_start|>user\nxy<|im_end|>" in CHAT.shown(
        policy.asked[0][0].prompt_tokens
    )


async def test_what_a_client_adds_to_a_received_message_may_be_empty() -> None:
    """litellm gives it `provider_specific_fields`, and agents send it back."""
    added = {"function_call": None, "provider_specific_fields": {"refusal": None}}
    said = {"role": "assistant", "content": "a", **added}
    policy = Says(["b"])
    await session(policy).chat({"model": "policy", "messages": [user("?"), said, user("So?")]})
    assert "assistant\na<|im_end|>" in CHAT.shown(policy.asked[0][0].prompt_tokens)


async def test_a_seed_gives_the_same_answer_again_but_not_to_another_member() -> None:
    policy = Says(lambda request: "a")
    one = session(policy)
    for seed in (7, 7, None, None):
        await one.chat({"model": "policy", "messages": [user("?")], "seed": seed})
    seeds = [request.seed for request, _ in policy.asked]
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 3


ADDED = [user("x"), user(""), {"role": "tool", "tool_call_id": "c", "content": "1"}]


@given(st.data())
def test_whatever_is_asked_each_answer_is_trained_once_after_what_the_engine_saw(
    data: st.DataObject,
) -> None:
    """Go on from any conversation, cut it, change it, ask it again, with tools or without."""

    async def ask() -> None:
        policy = Says(
            lambda request: data.draw(
                st.sampled_from(["a", " sum ", "The sum", CALL, "<tool_call>x</tool_call>"])
            )
        )
        one = session(
            policy, AgentLimits(max_turns=100, max_tokens_per_step=90, sequence_length=4000)
        )
        known: list[list[Any]] = [[user("sum?")]]
        sampled: list[tuple[list[Any], list[Any], list[int]]] = []  # conversation, tools, tokens
        for _ in range(data.draw(st.integers(1, 6))):
            messages = list(data.draw(st.sampled_from(known)))
            match data.draw(st.sampled_from(["again", "add", "cut", "insert"])):
                case "add":
                    messages.append(
                        data.draw(
                            st.sampled_from(
                                [
                                    user("x"),
                                    user(""),
                                    {"role": "tool", "tool_call_id": "c", "content": "1"},
                                ]
                            )
                        )
                    )
                case "cut" if len(messages) > 1:
                    messages.pop()
                case "insert":
                    messages += [{"role": "assistant", "content": "sum"}, user("z")]
            n = data.draw(st.integers(1, 2))
            tools = data.draw(st.sampled_from([[], TOOLS]))
            response = await one.chat(
                {"model": "policy", "messages": messages, "n": n, "tools": tools}
            )
            prompt = policy.asked[-1][0].prompt_tokens.tolist()
            repeated = [
                (len(said), tokens)
                for said, shown, tokens in sampled
                if (messages[: len(said)], tools) == (said, shown)
            ]
            longest = [tokens for size, tokens in repeated if size == max(repeated)[0]]
            assert not repeated or any(prompt[: len(tokens)] == tokens for tokens in longest)
            for choice, (_, made) in zip(
                response.chat_body()["choices"], policy.asked[-n:], strict=True
            ):
                known.append([*messages, json.loads(json.dumps(choice["message"]))])
                sampled.append((known[-1], tools, prompt + made.tokens_T.tolist()))
        branches = one.recorded.branches()
        answers = [answer for branch in branches for answer in branch]
        assert sorted(map(id, answers)) == sorted(map(id, one.recorded.answers))
        agent = OutsideAgent(tokenizer=TOKENIZER, limits=LIMITS, run="json:dumps")
        turns = [agent._turns(one, branch, 1.0) for branch in branches]
        check_token_for_token(
            [Trajectory(EPISODE.key, "t", each, StopReason.COMPLETED) for each in turns],
            policy.asked,
        )

    asyncio.run(ask())
