"""Anthropic's Messages API: the same prompts and tokens as chat completions and responses."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientSession

from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.agents.outside.anthropic_messages import error_body
from agenticrun_workers.agents.outside.endpoint import serving
from agenticrun_workers.agents.outside.messages import ApiError
from agenticrun_workers.agents.outside.policy_endpoint import PolicyEndpoint
from agenticrun_workers.agents.outside.session import Policy, Session
from byte_level import byte_level_tokenizer
from outside_agents import (
    CHAT,
    CHATML_WITH_TOOLS,
    CORPUS,
    EPISODE,
    LIMITS,
    TOKENIZER,
    Says,
    session,
    user,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: dict[str, Any] = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
CALL = 'Let me add. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SAYS = [CALL, " It is 2. ", "Yes."]

THINKS = CHATML_WITH_TOOLS.replace(
    "<|im_start|>assistant\n' }}{% endif %}",
    "<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
)
"""As Qwen3: reasoning is on, and has a switch."""


def session_of(policy: Says, template: str) -> Session:
    made = byte_level_tokenizer(CORPUS, template)
    return Session(Policy(made, ChatFormat(made), LIMITS, "policy"), EPISODE, policy)


async def asked(its: Session, messages: Any, **more: Any) -> dict[str, Any]:
    body = {"model": "policy", "max_tokens": 200, "messages": messages, **more}
    return (await its.messages(body)).body()


async def by_chat(its: Session) -> None:
    function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
    past: list[Any] = [{"role": "system", "content": "Be brief."}, user("1+1?")]
    for question in ("2", "sure?", None):
        tools = [{"type": "function", "function": function}]
        response = await its.chat({"model": "policy", "messages": past, "tools": tools})
        message = response.chat_body()["choices"][0]["message"]
        past.append(message)
        if message.get("tool_calls"):
            (call,) = message["tool_calls"]
            past.append({"role": "tool", "tool_call_id": call["id"], "content": question})
        else:
            past.append(user(question or ""))


async def by_responses(its: Session) -> None:
    tool = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
    items: list[Any] = [user("1+1?")]
    for question in ("2", "sure?", None):
        body = {"instructions": "Be brief.", "input": items, "tools": [tool]}
        output = (await its.respond({"model": "policy", **body})).body()["output"]
        items += output
        if output[-1]["type"] == "function_call":
            call_id = output[-1]["call_id"]
            items.append({"type": "function_call_output", "call_id": call_id, "output": question})
        else:
            items.append(user(question or ""))


async def by_messages(its: Session) -> None:
    past: list[Any] = [user("1+1?")]
    for question in ("2", "sure?", None):
        message = await asked(its, past, system="Be brief.", tools=[TOOL])
        past.append({"role": "assistant", "content": message["content"]})
        blocks = [block for block in message["content"] if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": question}
            for block in blocks
        ]
        past.append({"role": "user", "content": results or question or ""})


DIALECTS: list[Callable[[Session], Awaitable[None]]] = [by_chat, by_responses, by_messages]


async def test_a_conversation_has_the_same_tokens_in_all_three_dialects() -> None:
    recorded = []
    for converse in DIALECTS:
        policy = Says(SAYS)
        its = session(policy)
        await converse(its)
        (branch,) = its.recorded.branches()
        prompts = [request.prompt_tokens.tolist() for request, _ in policy.asked]
        turns = [
            (answer.sampled.added_T.tolist(), answer.sampled.generation.tokens_T.tolist())
            for answer in branch
        ]
        assert len(turns) == 3
        recorded.append((prompts, turns))
    assert recorded[0] == recorded[1] == recorded[2]
    last = CHAT.shown(its.recorded.answers[-1].sampled.prompt_T)
    assert "<tool_response>\n2\n</tool_response>" in last
    assert "\n It is 2. <|im_end|>\n<|im_start|>user\nsure?" in last


async def test_a_conversation_may_change_its_dialect_at_each_turn() -> None:
    policy = Says(["2", "yes", "sure"])
    its = session(policy)
    past: list[Any] = [user("1+1?")]
    message = await asked(its, past)
    past += [{"role": "assistant", "content": message["content"][0]["text"]}, user("sure?")]
    chat = (await its.chat({"model": "policy", "messages": past})).chat_body()
    past += [chat["choices"][0]["message"], user("why?")]
    items = [{key: message[key] for key in ("role", "content")} for message in past]
    await its.respond({"model": "policy", "input": items})
    assert len(its.recorded.branches()) == 1


async def test_an_answer_has_its_reasoning_its_text_and_its_calls_as_blocks() -> None:
    its = session_of(Says([f"<think>\nHm.\n</think>\n\n{CALL}", "3"]), THINKS)
    first = await asked(its, [user("1+1?")], tools=[TOOL])
    thinking, text, call = first["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "Let me add."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
    assert (first["stop_reason"], first["stop_sequence"]) == ("tool_use", None)
    generation = its.recorded.answers[0].sampled.generation
    assert first["usage"]["output_tokens"] == len(generation.tokens_T)
    assert first["usage"]["input_tokens"] == len(its.recorded.answers[0].sampled.prompt_T)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [text]}
    count: dict[str, Any] = {"model": "policy"}
    for content in (first["content"], first["content"][1:]):  # clients may drop reasoning
        again = [user("1+1?"), {"role": "assistant", "content": content}]
        blocks = [result, {"type": "text", "text": "And"}, {"type": "text", "text": " now?"}]
        count["messages"] = [*again, {"role": "user", "content": blocks}]
        assert its.count_tokens(count | {"tools": [TOOL]}) > first["usage"]["input_tokens"]
    await asked(its, count["messages"], tools=[TOOL])
    (branch,) = its.recorded.branches()
    shown = its.policy.chat.shown(branch[1].sampled.added_T)
    assert shown.endswith(
        "<tool_response>\nLet me add.\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("says", "more", "reason", "sequence", "text"),
    [
        ("abc", {}, "end_turn", None, "abc"),
        ("abcdef", {"max_tokens": 2}, "max_tokens", None, "ab"),
        ("abXcYd", {"stop_sequences": ["Y", "X"]}, "stop_sequence", "X", "ab"),
        ("", {}, "end_turn", None, ""),
    ],
)
async def test_an_answer_says_why_it_ended(
    says: str, more: dict[str, Any], reason: str, sequence: str | None, text: str
) -> None:
    message = await asked(session(Says([says])), [user("?")], **more)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert message["content"] == [{"type": "text", "text": text}]


@pytest.mark.parametrize(
    ("choice", "says", "kinds"),
    [
        ({"type": "auto"}, CALL, ["text", "tool_use"]),
        ({"type": "none"}, CALL, ["text"]),
        ({"type": "any"}, '{"a": 1}}\n</tool_call>', ["tool_use"]),
        ({"type": "tool", "name": "add"}, '{"a": 1}}\n</tool_call>', ["tool_use"]),
        ({"type": "auto", "disable_parallel_tool_use": True}, CALL * 2, ["text", "tool_use"]),
    ],
)
async def test_the_choice_of_a_tool(choice: dict[str, Any], says: str, kinds: list[str]) -> None:
    its = session(Says([says]))
    message = await asked(its, [user("?")], tools=[TOOL], tool_choice=choice)
    assert [block["type"] for block in message["content"]] == kinds


async def test_an_answer_may_have_to_follow_a_schema() -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    config = {"format": {"type": "json_schema", "schema": schema | {"additionalProperties": False}}}
    message = await asked(session(Says(['{"sum": 2} so'])), [user("?")], output_config=config)
    assert message["content"] == [{"type": "text", "text": '{"sum": 2}'}]


async def test_thinking_is_switched_by_the_template() -> None:
    policy = Says(lambda _: "2")
    its = session_of(policy, THINKS)
    for kind, off in (("enabled", False), ("disabled", True), ("adaptive", False)):
        thinking = {"type": kind, "budget_tokens": 1024}
        await asked(its, [user("?")], thinking=thinking)
        prompt = its.policy.chat.shown(policy.asked[-1][0].prompt_tokens)
        assert prompt.endswith("</think>\n\n") is off
    with pytest.raises(ApiError, match="has no reasoning: leave it out") as refused:
        await asked(session(policy), [user("?")], thinking={"type": "enabled"})
    assert refused.value.param == "thinking"
    await asked(session(policy), [user("?")], thinking={"type": "disabled"})


async def test_a_stream_has_the_same_blocks_as_the_message() -> None:
    body = {"model": "policy", "max_tokens": 200, "messages": [user("?")], "tools": [TOOL]}
    says = f"<think>\nHm.\n</think>\n\n{CALL}"
    whole = (await session_of(Says([says]), THINKS).messages(body)).body()
    answered = await session_of(Says([says]), THINKS).messages(body | {"stream": True})
    assert answered.streams
    start, ping, *events = answered.events()
    assert (ping["type"], start["message"]["content"]) == ("ping", [])
    blocks: list[Any] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
            case "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "input_json_delta":
                        block["input"] = json.loads(delta["partial_json"])
    made, wanted = (
        [{k: v for k, v in block.items() if k != "id"} for block in each]
        for each in (blocks, whole["content"])
    )
    assert made == wanted
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"] == whole["usage"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "system", "content": "?"}]}, "messages[0]"),
    ({"messages": [user("?"), {"role": "assistant", "content": "So"}]}, "messages[1]"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "?", "name": "me"}]}, "messages[0].name"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "2"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c"}]}]},
        "messages[0].content[0].input",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
        "messages[0].content[0].type",
    ),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"system": 5}, "system"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"temperature": 0.3}, "temperature"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL | {"description": 5}]}, "tools[0].description"),
    ({"tools": [TOOL | {"input_examples": [{"a": 1}]}]}, "tools[0].input_examples"),
    (
        {
            "tools": [TOOL | {"strict": True, "input_schema": {"type": "string"}}],
            "tool_choice": {"type": "any"},
        },
        "tools[0].input_schema",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"thinking": {"type": "much"}}, "thinking"),
    ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "string"}}}},
        "output_config.format.schema",
    ),
    ({"context_management": {"edits": [{"type": "compact"}]}}, "context_management"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"n": 2}, "n"),
    ({"container": "x"}, "container"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=[param for _, param in REFUSED])
async def test_what_is_not_supported_is_refused_by_the_name_that_the_client_knows(
    body: dict[str, Any], param: str
) -> None:
    policy = Says(["a"])
    sent = {"model": "policy", "max_tokens": 9, "messages": [user("?")], **body}
    with pytest.raises(ApiError) as refused:
        await session(policy).messages(sent)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert str(refused.value).startswith(param)
    assert not policy.asked


async def test_parameters_that_ask_for_nothing_else_are_taken() -> None:
    policy = Says(["a"])
    cached = {"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}
    tool = TOOL | {"cache_control": {"type": "ephemeral"}, "type": "custom"}
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    more = {
        "system": [cached, cached | {"text": "T"}],
        "tools": [tool],
        "metadata": {"user_id": "me"},
        "temperature": 0.8,
        "service_tier": "auto",
        "context_management": kept,
    }
    await asked(session(policy), [{"role": "user", "content": [cached]}], **more)
    assert "<|im_start|>system\nST<|im_end|>" in CHAT.shown(policy.asked[0][0].prompt_tokens)


async def test_http_has_events_with_names_and_errors_in_anthropics_form() -> None:
    body = {"model": "policy", "max_tokens": 9, "messages": [user("?")]}
    async with serving(session(Says(["abc"]))) as address, ClientSession() as http:
        url = f"{address.url}/v1/messages"
        async with http.post(f"{url}?beta=true", json=body | {"stream": True}) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            lines = (await answer.text()).splitlines()
        names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
        data = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        assert names == [event["type"] for event in data]
        assert (names[0], names[-1]) == ("message_start", "message_stop")
        async with http.post(f"{url}/count_tokens", json=body) as answer:
            counted = (await answer.json())["input_tokens"]
            assert counted == data[0]["message"]["usage"]["input_tokens"]
        wrong = [
            (url, body | {"model": "x"}, 404, "not_found_error"),
            (url, body | {"top_k": -1}, 400, "invalid_request_error"),
            (f"{url}/batches", body, 404, "not_found_error"),
            (url.replace("/s/", "/s/x"), body, 404, "not_found_error"),
            (url.replace("/v1/", "/v1/v1/"), body, 404, "not_found_error"),
        ]
        for place, sent, status, kind in wrong:
            async with http.post(place, json=sent) as answer:
                assert answer.status == status
                said = await answer.json()
                assert (said["type"], said["error"]["type"]) == ("error", kind)
        assert "leave it out there" in said["error"]["message"]


def test_engines_that_fail_are_an_api_error() -> None:
    assert error_body(ApiError(503, "no answer"))["error"]["type"] == "api_error"


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("x-api-key", "secret", 200),
        ("Authorization", "Bearer secret", 200),
        ("x-api-key", "other", 401),
        ("Authorization", "Basic secret", 401),
    ],
)
async def test_a_key_may_be_sent_as_both_clients_do(header: str, value: str, status: int) -> None:
    body = {"model": "policy", "max_tokens": 9, "messages": [user("?")], "temperature": 0.5}
    policy = Says(["a"])
    endpoint = PolicyEndpoint(
        Policy(TOKENIZER, CHAT, LIMITS, "policy"), policy, "127.0.0.1", 0, "secret"
    )
    async with endpoint.listening() as url, ClientSession(headers={header: value}) as http:
        async with http.post(f"{url}/messages", json=body) as answer:
            assert answer.status == status
            said = await answer.json()
        if status == 200:
            assert policy.asked[0][0].sampling.temperature == 0.5
        else:
            assert said["error"]["type"] == "authentication_error"
