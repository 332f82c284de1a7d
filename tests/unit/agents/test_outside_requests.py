"""Extensions that servers of models have: template variables, reasoning, token ids, sessions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.agents.outside.messages import ApiError
from agenticrun_workers.agents.outside.session import Policy, Session
from agenticrun_workers.types import ChatSettings
from byte_level import byte_level_tokenizer
from outside_agents import (
    CHATML_WITH_TOOLS,
    CORPUS,
    EPISODE,
    LIMITS,
    Says,
    check_token_for_token,
    client,
    play,
    say,
    session,
    user,
)

HEAD = "{% set style = 'plain' %}"
SWITCHED = HEAD + CHATML_WITH_TOOLS.replace(
    "<|im_start|>assistant\n' }}{% endif %}",
    "<|im_start|>assistant\n[' + style + ' ' + (reasoning_effort or '') + ']' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
)
"""Has a style that the run has set, a switch of its reasoning, and an effort."""
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def session_of(policy: Says, template: str = SWITCHED) -> Session:
    made = byte_level_tokenizer(CORPUS, template)
    made.chat_settings = ChatSettings(head=HEAD)
    return Session(Policy(made, ChatFormat(made), LIMITS, "policy"), EPISODE, policy)


async def beginning(its: Session, **more: Any) -> str:
    """Return the text that the template writes at the beginning of an answer."""
    response = await its.chat({"model": "policy", "messages": [user("?")], **more})
    return its.policy.chat.shown(response.prompt_T).rpartition("assistant\n")[2]


@pytest.mark.parametrize(
    ("more", "begun"),
    [
        ({}, "[plain ]"),
        ({"chat_template_kwargs": {"style": "a 'b' {{"}}, "[a 'b' {{ ]"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "[plain ]<think>\n\n</think>\n\n"),
        ({"chat_template_kwargs": {"enable_thinking": True}, "tools": TOOLS}, "[plain ]"),
        ({"reasoning_effort": "high"}, "[plain high]"),
        ({"reasoning_effort": "none"}, "[plain ]<think>\n\n</think>\n\n"),
    ],
)
async def test_a_request_sets_variables_of_the_template(more: dict[str, Any], begun: str) -> None:
    assert await beginning(session_of(Says(["a"])), **more) == begun


async def test_the_reasoning_of_responses_is_that_of_chat_completions() -> None:
    its = session_of(policy := Says(["a"]))
    await its.respond({"model": "policy", "input": "?", "reasoning": {"effort": "low"}})
    assert its.policy.chat.shown(policy.asked[0][0].prompt_tokens).endswith("[plain low]")


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"chat_template_kwargs": {"tone": 1}}, "chat_template_kwargs.tone", "does not read this"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "leave it"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs.a b", "leave it out"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "an object"),
        ({"chat_template_kwargs": {"style": "\ud800"}}, "chat_template_kwargs.style", "unicode"),
        ({"chat_template_kwargs": {"style": 5}}, "chat_template_kwargs", "cannot be put"),
        ({"reasoning_effort": 5}, "reasoning_effort", "must be a text"),
    ],
)
async def test_variables_that_the_template_cannot_use_are_refused(
    more: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        await beginning(session_of(Says([])), **more)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("template", "effort", "message"),
    [
        (CHATML_WITH_TOOLS, "low", "cannot say how much to reason: leave it out"),
        (SWITCHED.replace("reasoning_effort", "other"), "low", "send none, or leave it out"),
        ("{# <think> #}" + CHATML_WITH_TOOLS, "none", "cannot turn reasoning off"),
        (CHATML_WITH_TOOLS, "none", None),
    ],
)
async def test_an_effort_that_the_template_cannot_express_is_refused(
    template: str, effort: str, message: str | None
) -> None:
    its = session_of(Says(["a"]), template)
    if message is None:
        await beginning(its, reasoning_effort=effort)
        return
    with pytest.raises(ApiError, match=message) as refused:
        await beginning(its, reasoning_effort=effort)
    assert refused.value.param == "reasoning_effort"


async def test_answers_are_continued_with_the_variables_that_they_had() -> None:
    its = session_of(policy := Says(["a", "b", "c"]))
    past: list[Any] = [user("?")]
    more = {"chat_template_kwargs": {"style": "curt"}}
    for text in ("a", "b"):
        await its.chat({"model": "policy", "messages": past, **more})
        past += [{"role": "assistant", "content": text}, user("And?")]
    assert its.policy.chat.shown(policy.asked[1][0].prompt_tokens).count("[curt ]") == 2
    await its.chat({"model": "policy", "messages": past})
    assert [len(branch) for branch in its.recorded.branches()] == [2, 1]


def test_the_tokens_of_prompt_and_answer_are_those_that_are_trained(agent_of: Any) -> None:
    async def run(base_url: str, task: Any) -> float:
        for stream in (False, True):
            messages: list[Any] = [user("é?")]
            async with client(base_url) as http:
                made: Any = await http.chat.completions.create(
                    model="policy",
                    messages=messages,
                    stream=stream,
                    extra_body={"return_token_ids": True},
                )
                first = await anext(aiter(made)) if stream else made
                text: Any = await http.completions.create(
                    model="policy", prompt="x", stream=stream, extra_body={"return_token_ids": True}
                )
                choice = (await anext(aiter(text)) if stream else text).choices[0]
            request, said = policy.asked[-2]
            assert first.prompt_token_ids == request.prompt_tokens.tolist()
            assert first.choices[0].token_ids == said.tokens_T.tolist()
            request, said = policy.asked[-1]
            assert choice.prompt_token_ids == request.prompt_tokens.tolist()
            assert choice.token_ids == said.tokens_T.tolist()
        plain = await say(base_url, [user("?")])
        assert not hasattr(plain, "prompt_token_ids")
        return 1.0

    policy = Says(["é", "a", "b", "c", "d"])
    trajectories = play(policy, run=agent_of(run))
    check_token_for_token(trajectories, policy.asked)


@pytest.mark.parametrize(
    ("options", "stream", "param"),
    [
        ({"include_usage": True}, False, "stream_options"),
        ({"include_usage": "yes"}, True, "stream_options.include_usage"),
        ({"continuous_usage_stats": True}, True, "stream_options.continuous_usage_stats"),
        ([], True, None),
        ({"include_obfuscation": True}, True, None),
    ],
)
async def test_options_of_streams(options: Any, stream: bool, param: str | None) -> None:
    body = {"model": "policy", "messages": [user("?")], "stream": stream}
    asking = session(Says(["a"])).chat(body | {"stream_options": options})
    if param is None:
        chunks = [json.dumps(chunk) for chunk in (await asking).chat_chunks()]
        assert not any("usage" in chunk for chunk in chunks)
        return
    with pytest.raises(ApiError) as refused:
        await asking
    assert refused.value.param == param


@pytest.mark.parametrize("named", [True, False])
def test_equal_conversations_with_names_are_trajectories_of_their_own(
    agent_of: Any, named: bool
) -> None:
    """Two agents ask and get the same; without names, both would continue the second answer."""

    async def run(base_url: str, task: Any) -> float:
        past: dict[str, list[Any]] = {"a": [user("1+1?")], "b": [user("1+1?")]}
        for _ in range(2):
            for name, messages in past.items():
                headers = {"X-Session-ID": name} if named else {}
                answer = await say(base_url, messages, extra_headers=headers)
                messages += [answer.choices[0].message, user("sure?")]
        return 1.0

    policy = Says(["2", "2", "yes", "no"])
    trajectories = play(policy, run=agent_of(run))
    check_token_for_token(trajectories, policy.asked)
    engines = [[turn.engine for turn in trajectory.turns] for trajectory in trajectories]
    assert engines == ([["e1", "e3"], ["e2", "e4"]] if named else [["e1"], ["e3"], ["e2", "e4"]])


async def test_texts_and_messages_have_conversations_with_names_too() -> None:
    its = session(policy := Says(["ab", "ab", "x", "y", "z"]))
    for name in ("a", "b"):
        await its.complete({"model": "policy", "prompt": "Q", "stop": "b"}, name)
    await its.complete({"model": "policy", "prompt": "Qab."}, "a")
    _, _, third = its.recorded.answers
    assert third.parent is its.recorded.answers[0]
    body = {"model": "policy", "max_tokens": 9, "messages": [user("?")]}
    await its.messages(body, "a")
    await its.respond({"model": "policy", "input": "?"}, "b")
    assert [answer.thread for answer in its.recorded.answers] == ["a", "b", "a", "a", "b"]
    assert len(policy.asked) == 5
