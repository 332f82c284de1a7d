"""The endpoint of `agenticrun serve`: any client, any sampling, and nothing kept."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession
from openai import AsyncOpenAI, AuthenticationError, BadRequestError

from agenticrun_workers.agents.outside.policy_endpoint import PolicyEndpoint
from agenticrun_workers.agents.outside.session import Policy, Session
from agenticrun_workers.types import Generation, GenerationRequest
from outside_agents import CHAT, LIMITS, TOKENIZER, Says
from outside_agents import SUM as SCHEMA

POLICY = Policy(TOKENIZER, CHAT, LIMITS, "lake")
SUM: list[Any] = [{"role": "user", "content": "The sum?"}]


@asynccontextmanager
async def served(
    generate: Callable[[GenerationRequest], Awaitable[Generation]],
    *,
    key: str | None = None,
    sent: str = "any",
    policy: Policy = POLICY,
) -> AsyncIterator[AsyncOpenAI]:
    async with (
        PolicyEndpoint(policy, generate, "127.0.0.1", 0, key).listening() as url,
        AsyncOpenAI(base_url=url, api_key=sent, max_retries=0) as client,
    ):
        yield client


async def test_a_request_chooses_its_sampling_and_others_have_the_defaults() -> None:
    policy = Says(["The sum is 2.", "4"])
    async with served(policy) as client:
        answer = await client.chat.completions.create(
            model="lake", messages=SUM, temperature=0, top_p=0.5, extra_body={"top_k": 3}
        )
        await client.chat.completions.create(model="lake", messages=SUM)
    assert answer.choices[0].message.content == "The sum is 2."
    chosen, default = (request.sampling for request, _ in policy.asked)
    assert (chosen.temperature, chosen.top_p, chosen.top_k) == (0, 0.5, 3)
    assert (default.temperature, default.top_p, default.top_k) == (0.8, 1.0, 0)


async def test_equal_seeds_ask_the_engine_for_equal_answers_and_ids_differ() -> None:
    policy = Says(lambda _: "2")
    async with served(policy) as client:
        for seed in (7, 7, 8, None, None):
            extra: Any = {} if seed is None else {"seed": seed}
            await client.chat.completions.create(model="lake", messages=SUM, **extra)
    asked = [request for request, _ in policy.asked]
    assert asked[0].seed == asked[1].seed
    assert len({request.seed for request in asked}) == 4
    assert len({request.request_id for request in asked}) == 5


async def test_every_dialect_is_served_and_no_reward_is_taken() -> None:
    async with served(Says(lambda _: "2")) as client:
        assert [model.id async for model in client.models.list()] == ["lake"]
        text = await client.completions.create(model="lake", prompt="The sum", max_tokens=1)
        assert text.choices[0].text == "2"
        response = await client.responses.create(model="lake", input="The sum?")
        assert response.output_text == "2"
        streamed = await client.chat.completions.create(model="lake", messages=SUM, stream=True)
        parts = [c.choices[0].delta.content or "" async for c in streamed if c.choices]
        assert "".join(parts) == "2"
        async with ClientSession() as http:
            answer = await http.post(str(client.base_url).removesuffix("v1/") + "reward", json={})
            assert answer.status == 404


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"temperature": -1}, "temperature: must be a number from 0 to 10, not -1"),
        ({"top_p": 0}, "top_p: must be a number"),
        ({"extra_body": {"top_k": 1.5}}, "top_k: must be a whole number"),
        ({"extra_body": {"min_p": "much"}}, "min_p: must be a number from 0 to 1, not 'much'"),
    ],
)
async def test_a_sampling_that_does_not_exist_is_refused(
    options: dict[str, Any], problem: str
) -> None:
    async with served(Says(())) as client:
        with pytest.raises(BadRequestError, match=problem):
            await client.chat.completions.create(model="lake", messages=SUM, **options)


FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": SCHEMA, "strict": True},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"sum": 2}}\n</tool_call>'


async def test_an_engine_that_enforces_formats_is_asked_once_and_for_the_format() -> None:
    """Nothing is drafted, written or drawn again."""
    policy = Says(['{"sum": 2}', CALL, "Well."])
    async with served(policy, policy=replace(POLICY, enforces_formats=True)) as client:
        create = client.chat.completions.create
        answer = await create(model="lake", messages=SUM, response_format=FORMAT)
        called = await create(model="lake", messages=SUM, tools=[TOOL], tool_choice="required")
        await create(model="lake", messages=SUM)
    assert json.loads(answer.choices[0].message.content or "") == {"sum": 2}
    assert called.choices[0].finish_reason == "tool_calls"
    tags = [request.sampling.structural_tag for request, _ in policy.asked]
    (value, begins, ends) = (
        {"type": "json_schema", "json_schema": SCHEMA, "style": "json", "max_whitespace_cnt": 40},
        {"type": "const_string", "value": '<tool_call>\n{"name": "add", "arguments": '},
        {"type": "const_string", "value": "}\n</tool_call>"},
    )
    call = {"type": "sequence", "elements": [begins, value, ends]}
    for tag, option in zip(tags, (value, call), strict=False):
        assert json.loads(tag or "") == {
            "type": "structural_tag",
            "format": {"type": "or", "elements": [option]},
        }
    assert tags[2:] == [None]
    prompts = [CHAT.shown(request.prompt_tokens) for request, _ in policy.asked]
    assert all(prompt.endswith("<|im_start|>assistant\n") for prompt in prompts)


async def test_an_engine_without_formats_is_asked_for_text() -> None:
    policy = Says(['{"sum": 2}'])
    async with served(policy) as client:
        await client.chat.completions.create(model="lake", messages=SUM, response_format=FORMAT)
    assert [request.sampling.structural_tag for request, _ in policy.asked] == [None]


async def test_with_an_api_key_other_clients_get_no_answer() -> None:
    async with served(Says(["2"]), key="secret", sent="secret") as client:
        await client.chat.completions.create(model="lake", messages=SUM)
    async with served(Says(["2"]), key="secret") as client:
        with pytest.raises(AuthenticationError, match="not that of this server"):
            await client.chat.completions.create(model="lake", messages=SUM)


async def test_nothing_is_kept_of_an_answered_request() -> None:
    async with served(Says(lambda _: "2")) as client:
        for _ in range(3):
            await client.chat.completions.create(model="lake", messages=SUM)
        await asyncio.sleep(0)
        gc.collect()
        assert [one for one in gc.get_objects() if isinstance(one, Session)] == []


async def test_a_client_that_leaves_ends_its_request_in_the_engine() -> None:
    policy = Says(["2"], delay=30)
    async with served(policy) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.chat.completions.create(model="lake", messages=SUM), 0.3)
        for _ in range(100):
            await asyncio.sleep(0.02)
            if policy.given_up:
                break
    assert policy.given_up == 1
