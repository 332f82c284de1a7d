"""The Responses API: the same answers as chat completions, for clients that speak it."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from pydantic import BaseModel

from agenticrun_workers.agents.outside.messages import ApiError
from outside_agents import (
    CHAT,
    Says,
    check_token_for_token,
    client,
    play,
    say,
    session,
    user,
)

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
CALL = 'Let me add. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def respond(base_url: str, **body: Any) -> Any:
    async with client(base_url) as http:
        return await http.responses.create(model="policy", **body)


def test_a_conversation_with_a_tool_is_one_trajectory(agent_of: Any) -> None:
    async def run(base_url: str, task: Any) -> float:
        first = await respond(base_url, input="1+1?", instructions="Be brief.", tools=[TOOL])
        text, call = first.output
        assert (first.status, first.output_text) == ("completed", "Let me add.")
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
        assert first.usage.output_tokens == len(policy.asked[0][1].tokens_T)
        items: list[Any] = [
            user("1+1?"),
            text.model_dump(),
            call.model_dump(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "2"},
        ]
        second = await respond(base_url, input=items, instructions="Be brief.", tools=[TOOL])
        assert second.output_text == "It is 2."
        items += [item.model_dump() for item in second.output]
        items += [{"role": "user", "content": [{"type": "input_text", "text": "sure?"}]}]
        await respond(base_url, input=items, instructions="Be brief.", tools=[TOOL])
        return 1.0

    policy = Says([CALL, "It is 2.", "Yes."])
    trajectories = play(policy, run=agent_of(run))
    assert len(trajectories) == 1
    check_token_for_token(trajectories, policy.asked)
    shown = CHAT.shown(trajectories[0].tokens_T)
    assert '"description": "Adds."' in shown
    assert "<tool_response>\n2\n</tool_response>" in shown


def test_a_conversation_may_go_on_with_the_other_api(agent_of: Any) -> None:
    async def run(base_url: str, task: Any) -> float:
        first = await respond(base_url, input="1+1?")
        past = [user("1+1?"), {"role": "assistant", "content": first.output_text}, user("sure?")]
        await say(base_url, past)
        return 1.0

    policy = Says(["2", "yes"])
    trajectories = play(policy, run=agent_of(run))
    assert len(trajectories) == 1
    check_token_for_token(trajectories, policy.asked)


def test_a_stream_says_the_same(agent_of: Any) -> None:
    async def run(base_url: str, task: Any) -> float:
        async with (
            client(base_url) as http,
            http.responses.stream(model="policy", input="?", tools=cast(Any, [TOOL])) as stream,
        ):
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert [event.sequence_number for event in events] == [*range(len(events))]
        assert [event.type for event in events if event.type.endswith("added")] == [
            "response.output_item.added",
            "response.content_part.added",
            "response.output_item.added",
        ]
        assert [each.delta for each in events if each.type == "response.output_text.delta"] == [
            "Let me add."
        ]
        assert events[-1].type == "response.completed"
        assert [item.type for item in final.output] == ["message", "function_call"]
        return 0.0

    (trajectory,) = play(Says([CALL]), run=agent_of(run))
    assert len(trajectory.turns) == 1


class Sum(BaseModel):
    sum: int


@pytest.mark.parametrize("says", ['{"sum": 2}', "2"])
def test_structured_output_and_a_demanded_call(agent_of: Any, says: str) -> None:
    async def run(base_url: str, task: Any) -> float:
        async with client(base_url) as http:
            parsed = await http.responses.parse(model="policy", input="?", text_format=Sum)
            assert parsed.output_parsed == Sum(sum=2)
            named: Any = {"type": "function", "name": "add"}
            called = await http.responses.create(
                model="policy",
                input="?",
                tools=cast(Any, [TOOL]),
                tool_choice=named,
            )
            assert [item.type for item in called.output] == ["function_call"]
        return 1.0

    draws = [says] if says.startswith("{") else [says, "2}"]
    policy = Says([*draws, '{"a": 1}}\n</tool_call>'])
    check_token_for_token(play(policy, run=agent_of(run)), policy.asked)


def test_an_answer_that_is_cut_is_incomplete(agent_of: Any) -> None:
    async def run(base_url: str, task: Any) -> float:
        cut = await respond(
            base_url, input="?", max_output_tokens=2, include=["message.output_text.logprobs"]
        )
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        (part,) = cut.output[0].content
        assert [each.logprob for each in part.logprobs] == policy.asked[0][1].logprobs_T.tolist()
        async with client(base_url) as http:
            body = {"reward": 0.5, "trajectory": cut.id}
            await http.post(task.reward_url, body=body, cast_to=object)
        return 1.0

    policy = Says(["abcdef"])
    (trajectory,) = play(policy, run=agent_of(run))
    assert trajectory.score == 0.5


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"conversation": "x"}, "conversation"),
        ({"temperature": 0.3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"reasoning": "low"}, "reasoning"),
        ({"chat_template_kwargs": {"no_such_thing": 1}}, "chat_template_kwargs.no_such_thing"),
        ({"include": ["web_search_call.results"]}, "include"),
        ({"include": 5}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "string"}}}},
            "text.format.schema",
        ),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "2"}]}, "input[0].call_id"),
        ({"input": [{"role": "robot", "content": "?"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "?", "name": "me"}]}, "input[0].name"),
    ],
)
async def test_what_is_not_supported_is_refused_by_the_name_that_the_client_knows(
    body: dict[str, Any], param: str
) -> None:
    policy = Says(["a"])
    with pytest.raises(ApiError) as refused:
        await session(policy).respond({"model": "policy", "input": "?", **body})
    assert (refused.value.status, refused.value.param) == (400, param)
    assert str(refused.value).startswith(param)
    assert not policy.asked


async def test_parameters_that_ask_for_nothing_else_are_taken() -> None:
    policy = Says(["a"])
    body = {
        "temperature": 0.8,
        "store": False,
        "background": False,
        "truncation": "disabled",
        "reasoning": {"effort": None},
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "previous_response_id": None,
    }
    responded = await session(policy).respond({"model": "policy", "input": "?", **body})
    assert responded.body()["metadata"] == {"a": "b"}
