"""Anthropic's own client at the endpoint."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from outside_agents import CHAT, Says, check_token_for_token, play, user

TOOL: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = 'Let me add. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def client(base_url: str) -> Any:
    root = base_url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=root, api_key="any", max_retries=0)


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_with_a_tool_is_one_trajectory(agent_of: Any, streams: bool) -> None:
    async def ask(http: Any, messages: list[Any]) -> Any:
        asked: Any = {
            "model": "policy",
            "max_tokens": 200,
            "system": "Be brief.",
            "messages": messages,
            "tools": [TOOL],
        }
        if not streams:
            return await http.messages.create(**asked)
        async with http.messages.stream(**asked) as stream:
            texts = "".join([text async for text in stream.text_stream])
            message = await stream.get_final_message()
        assert texts == "".join(block.text for block in message.content if block.type == "text")
        return message

    async def run(base_url: str, task: Any) -> float:
        messages: list[Any] = [user("1+1?")]
        async with client(base_url) as http:
            first = await ask(http, messages)
            text, call = first.content
            assert (first.stop_reason, text.type, call.type) == ("tool_use", "text", "tool_use")
            assert (call.name, call.input) == ("add", {"a": 1})
            assert first.usage.output_tokens == len(policy.asked[0][1].tokens_T)
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
            messages += [
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [result]},
            ]
            counted = await http.messages.count_tokens(
                model="policy", system="Be brief.", messages=messages, tools=[TOOL]
            )
            second = await ask(http, messages)
            assert counted.input_tokens == second.usage.input_tokens
            assert second.stop_reason == "end_turn"
            messages += [{"role": "assistant", "content": second.content}, user("sure?")]
            await ask(http, messages)
            body = {"reward": 0.5, "trajectory": second.id}
            await http.post(task.reward_url, body=body, cast_to=object)
        return 1.0

    policy = Says([CALL, "It is 2.", "Yes."])
    trajectories = play(policy, run=agent_of(run))
    assert [[turn.reward for turn in each.turns] for each in trajectories] == [[0, 0.5, 1.0]]
    check_token_for_token(trajectories, policy.asked)
    assert "<tool_response>\n2\n</tool_response>" in CHAT.shown(trajectories[0].tokens_T)


class Sum(BaseModel):
    sum: int


def test_structured_output_and_a_demanded_call(agent_of: Any) -> None:
    async def run(base_url: str, task: Any) -> float:
        async with client(base_url) as http:
            asked: Any = {"model": "policy", "max_tokens": 200, "messages": [user("?")]}
            parsed = await http.messages.parse(**asked, output_format=Sum)
            assert parsed.parsed_output == Sum(sum=2)
            called = await http.messages.create(
                **asked, tools=[TOOL], tool_choice={"type": "tool", "name": "add"}
            )
            assert [(block.type, block.input) for block in called.content] == [
                ("tool_use", {"a": 1})
            ]
        return 1.0

    policy = Says(['{"sum": 2}', '{"a": 1}}\n</tool_call>'])
    check_token_for_token(play(policy, run=agent_of(run)), policy.asked)


def test_errors_are_those_of_the_client(agent_of: Any) -> None:
    async def run(base_url: str, task: Any) -> float:
        asked: Any = {"max_tokens": 9, "messages": [user("?")]}
        async with client(base_url) as http:
            with pytest.raises(anthropic.NotFoundError, match="'x' is not served"):
                await http.messages.create(model="x", **asked)
            with pytest.raises(anthropic.BadRequestError, match="top_k: is 5") as refused:
                await http.messages.create(model="policy", top_k=5, **asked)
            assert refused.value.body["error"]["type"] == "invalid_request_error"
            await http.messages.create(model="policy", **asked)
        async with client(f"{base_url}/v1") as http:  # base_url as OpenAI's clients get it
            with pytest.raises(anthropic.NotFoundError, match="leave it out there"):
                await http.messages.create(model="policy", **asked)
        return 1.0

    play(Says(["a"]), run=agent_of(run))
