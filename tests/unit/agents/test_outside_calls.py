"""Tool calls and reasoning of other families than Hermes, at the endpoint."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession

from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.agents.outside.endpoint import serving
from agenticrun_workers.agents.outside.messages import ApiError
from agenticrun_workers.agents.outside.session import MAX_DRAFTS, Policy, Session
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest
from byte_level import byte_level_tokenizer
from outside_agents import (
    CHATML_WITH_TOOLS,
    CORPUS,
    EPISODE,
    LIMITS,
    Says,
    session,
    user,
)
from template_tokenizers import template_tokenizer, templates

QWEN_XML = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{% for k, v in c.function.arguments.items() %}"
    "{{ '<parameter=' + k + '>\n' + (v | string) + '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""As that of Qwen3.5: calls in XML, and each prompt begins the reasoning."""
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]
CALL = (
    "One and two.\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
)


def session_of(policy: Says, template: str = QWEN_XML) -> Session:
    made = byte_level_tokenizer(CORPUS, template)
    return Session(Policy(made, ChatFormat(made), LIMITS, "policy"), EPISODE, policy)


async def chat(its: Session, messages: list[Any], **more: Any) -> dict[str, Any]:
    response = await its.chat({"model": "policy", "messages": messages, **more})
    choice: dict[str, Any] = response.chat_body()["choices"][0]
    return choice


@pytest.mark.parametrize("keeps_reasoning", [True, False])
async def test_a_call_in_xml_is_called_and_the_conversation_stays_one_trajectory(
    keeps_reasoning: bool,
) -> None:
    policy = Says([CALL, "So.\n</think>\n\n3."])
    its = session_of(policy)
    choice = await chat(its, [user("1 + 2")], tools=TOOLS)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning_content"]) == (None, "One and two.")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    if not keeps_reasoning:
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    last = await chat(its, [user("1 + 2"), message, result], tools=TOOLS)
    assert last["message"]["content"] == "3."
    (branch,) = its.recorded.branches()
    assert [answer.valid for answer in branch] == [True, True]
    assert its.policy.chat.shown(branch[1].sampled.added_T) == (
        "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


async def test_a_malformed_call_is_an_invalid_answer() -> None:
    broken = "Hm.\n</think>\n\n<tool_call>\n<function=add英>\n</function>\n</tool_call>"
    its = session_of(Says([broken]))
    choice = await chat(its, [user("1 + 2")], tools=TOOLS)
    assert (choice["message"]["content"], choice["finish_reason"]) == (broken, "stop")
    assert not its.recorded.answers[0].valid


async def test_two_calls_are_invalid_where_one_is_asked_for() -> None:
    template = QWEN_XML.replace("<think>\n", "") + "{# <|tool_call_start|> #}"
    text = "<|tool_call_start|>[add(a=1), add(a=2)]<|tool_call_end|>"
    its = session_of(Says([text]), template.replace("<function=", ""))
    choice = await chat(its, [user("1 + 2")], tools=TOOLS, parallel_tool_calls=False)
    assert choice["message"]["content"] == text
    assert not its.recorded.answers[0].valid


async def test_the_first_call_ends_an_answer_without_parallel_calls() -> None:
    its = session_of(Says([CALL + CALL]))
    choice = await chat(its, [user("1 + 2")], tools=TOOLS, parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1


async def test_calls_cannot_be_demanded_in_a_syntax_of_their_own() -> None:
    template = QWEN_XML.replace("<function=", "") + "{# <|tool_call_start|> #}"
    with pytest.raises(ApiError, match="hermes, mistral, llama3, not in lfm2") as refused:
        await chat(session_of(Says([]), template), [user("?")], tools=TOOLS, tool_choice="required")
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize("strict", [True, False])
async def test_a_call_in_xml_may_be_demanded_after_the_reasoning(strict: bool) -> None:
    function = TOOLS[0]["function"] | {"strict": strict}
    its = session_of(policy := Says([CALL, "So.\n</think>\n\n3."]))
    tools = [{"type": "function", "function": function}]
    choice = await chat(its, [user("1 + 2")], tools=tools, tool_choice="required")
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    assert choice["message"]["reasoning_content"] == "One and two."
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    await chat(its, [user("1 + 2"), choice["message"], result], tools=tools)
    assert len(its.recorded.branches()) == 1
    assert len(policy.asked) == 2


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (QWEN_XML.replace("{% if tools %}", "{% if false %}"), "does not show tools"),
        (
            CHATML_WITH_TOOLS.replace("tool_call>", "call>"),
            "writes tool calls in a format that is not known: set spec.model.chatFormat",
        ),
    ],
)
async def test_tools_that_the_policy_cannot_use_are_refused(template: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        await chat(session_of(Says([]), template), [user("?")], tools=TOOLS)
    assert (refused.value.status, refused.value.param) == (400, "tools")


async def test_arguments_sent_as_an_object_are_json() -> None:
    """L5: an object used to enter the prompt as Python's repr."""
    hermes = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    policy = Says([hermes, "2"])
    its = session(policy)
    message = (await chat(its, [user("hi")], tools=TOOLS))["message"]
    message["tool_calls"][0]["function"]["arguments"] = {"a": 1}
    call_id = message["tool_calls"][0]["id"]
    result = {"role": "tool", "tool_call_id": call_id, "content": "2"}
    await chat(its, [user("hi"), message, result], tools=TOOLS)
    assert len(its.recorded.branches()) == 1
    await chat(session(again := Says(["2"])), [user("other"), message, result], tools=TOOLS)
    assert '"arguments": {"a": 1}}' in its.policy.chat.shown(again.asked[0][0].prompt_tokens)


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ({"id": "c", "function": {"name": "add", "arguments": None}}, ".function.arguments"),
        ({"id": "c", "function": {"name": None, "arguments": "{}"}}, ".function.name"),
        ({"id": 5, "function": {"name": "add", "arguments": "{}"}}, ".id"),
        ({"id": "c"}, ""),
    ],
)
async def test_a_call_without_texts_is_refused_by_place(call: Any, param: str) -> None:
    messages = [user("hi"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(ApiError) as refused:
        await chat(session(Says([])), messages)
    assert refused.value.param == f"messages[1].tool_calls[0]{param}"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": [user("hi"), user("\ud800")]}, r"messages[1].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a\udc00"}]}]},
            r"messages[0].content[0].text",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "add", "description": "\ud800"}}]},
            "tools[0].function.description",
        ),
    ],
)
async def test_half_of_a_surrogate_pair_is_refused_by_place(more: Any, param: str) -> None:
    with pytest.raises(ApiError, match="not valid unicode") as refused:
        await session(Says([])).chat({"model": "policy", "messages": [user("hi")], **more})
    assert refused.value.param == param


def test_json_that_is_nested_too_deep_is_a_bad_request() -> None:
    async def run() -> tuple[int, Any]:
        async with serving(session(Says([]))) as address, ClientSession() as http:
            url = f"{address.url}/v1/chat/completions"
            async with http.post(url, data="[" * 100_000 + "]" * 100_000) as answer:
                return answer.status, json.loads(await answer.text())

    status, body = asyncio.run(run())
    assert status == 400
    assert "nested too deep" in body["error"]["message"]


MAY_THINK = "{# <think> #}" + CHATML_WITH_TOOLS
THOUGHT = "<think>\nHm.\n</think>\n\n"


@pytest.mark.parametrize("thought", ["", THOUGHT])
async def test_an_answer_in_a_format_may_begin_with_reasoning(thought: str) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    its = session_of(policy := Says([thought + call, thought + '{"sum": 3}']), MAY_THINK)
    choice = await chat(its, [user("1 + 2")], tools=TOOLS, tool_choice="required")
    assert len(choice["message"]["tool_calls"]) == 1
    schema = {"type": "json_schema", "json_schema": {"schema": SUM}}
    choice = await chat(its, [user("1 + 2")], response_format=schema)
    assert choice["message"]["content"] == '{"sum": 3}'
    assert choice["message"].get("reasoning_content") == ("Hm." if thought else None)
    assert len(policy.asked) == 2


SUM: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("says", ['Hm.\n</think>\n\n{"sum": 3} so', "Hm."])
async def test_an_answer_in_a_format_may_reason_where_the_prompt_begins_it(says: str) -> None:
    its = session_of(policy := Says(lambda _: says))
    schema = {"type": "json_schema", "json_schema": {"schema": SUM}}
    message = (await chat(its, [user("1 + 2")], response_format=schema))["message"]
    assert [*json.loads(message["content"])] == ["sum"]
    assert message["reasoning_content"].startswith("Hm.")
    assert len(policy.asked) == (1 if "sum" in says else MAX_DRAFTS)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("gptoss", "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}"),
        ("llama3_1", '{"name": "add", "parameters": {}}'),
        ("qwen3", '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'),
    ],
)
async def test_a_call_may_be_demanded_of_each_family_that_writes_arguments_as_json(
    name: str, call: str
) -> None:
    tokenizer = template_tokenizer(name, templates()[name])
    its_chat = ChatFormat(tokenizer)

    async def policy(request: GenerationRequest) -> Generation:
        begun = its_chat.shown(request.prompt_tokens)
        rest = next(call[size:] for size in range(len(call), -1, -1) if begun.endswith(call[:size]))
        tokens_T = its_chat.answer(rest)
        return Generation(
            tokens_T, np.zeros(len(tokens_T), np.float32), tokens_T * 0, FinishReason.STOP
        )

    its = Session(Policy(tokenizer, its_chat, LIMITS, "policy"), EPISODE, policy)
    described = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": described | {"strict": False}}]
    choice = await chat(its, [user("?")], tools=tools, tool_choice="required")
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": "{}"}
    result = {"role": "tool", "tool_call_id": made["id"], "content": "RESULT 3"}
    await chat(its, [user("?"), choice["message"], result], tools=tools)
    (branch,) = its.recorded.branches()
    assert branch[0].valid
    assert "RESULT 3" in its_chat.shown(branch[1].sampled.added_T)


async def test_a_call_that_begins_as_json_does_is_not_demanded_beside_a_schema() -> None:
    tokenizer = template_tokenizer("llama3_1", templates()["llama3_1"])
    its = Session(Policy(tokenizer, ChatFormat(tokenizer), LIMITS, "policy"), EPISODE, Says([]))
    schema = {"type": "json_schema", "json_schema": {"schema": SUM}}
    with pytest.raises(ApiError, match="set tool_choice to required or none") as refused:
        await chat(its, [user("?")], tools=TOOLS, response_format=schema)
    assert refused.value.param == "response_format"
