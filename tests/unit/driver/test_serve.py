"""Answers of `agenticrun serve` to requests that the engine refuses."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from agenticrun_workers.agents.outside.messages import ApiError
from agenticrun_workers.agents.outside.session import Policy, Session
from agenticrun_workers.driver.serve import _Generate
from agenticrun_workers.inference import InferenceEngine, InvalidRequest
from agenticrun_workers.inference.server_process import raise_refusal
from agenticrun_workers.types import Generation, GenerationRequest
from outside_agents import CHAT, EPISODE, LIMITS, SUM, TOKENIZER

POLICY = Policy(TOKENIZER, CHAT, LIMITS, "policy", enforces_formats=True)
MESSAGES: Any = {"model": "policy", "messages": [{"role": "user", "content": "The sum?"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SUM, "strict": True}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM}}


class Refuses:
    """An engine whose server refuses every request."""

    def __init__(self, body: str) -> None:
        self._body = body

    async def generate(self, request: GenerationRequest) -> Generation:
        raise_refusal("/generate", 400, self._body)


async def refusal(
    ask: Callable[[Session], Awaitable[object]],
    body: str = '{"error": {"message": "no such thing", "code": 400}}',
    policy: Policy = POLICY,
) -> ApiError:
    session = Session(policy, EPISODE, _Generate(cast(InferenceEngine, Refuses(body))))
    with pytest.raises(ApiError) as error:
        await ask(session)
    assert error.value.status == 400
    assert not session.failed.done(), "the engine is unharmed"
    return error.value


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"response_format": SCHEMA}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "add"}}}, "tools"),
    ],
)
async def test_a_format_that_the_engine_refuses_is_named(asked: dict[str, Any], param: str) -> None:
    error = await refusal(lambda session: session.chat(MESSAGES | asked))
    assert (error.param, str(error)) == (
        param,
        f"{param}: the engine cannot enforce it: no such thing. Simplify the schema",
    )


async def test_other_dialects_name_the_format_as_the_client_does() -> None:
    form = {"type": "json_schema", "schema": SUM}
    body = {"model": "policy", "input": "The sum?", "text": {"format": form | {"name": "sum"}}}
    error = await refusal(lambda session: session.respond(body))
    assert error.param == "text.format"
    assert str(error).startswith("text.format: the engine cannot enforce it")
    asked = MESSAGES | {"max_tokens": 4, "output_config": {"format": form}}
    error = await refusal(lambda session: session.messages(asked))
    assert error.param == "output_config.format"


REMEDY = "the engine refuses the request: no such thing. Shorten it, or ask for fewer tokens"


async def test_without_a_format_the_messages_or_the_prompt_are_named() -> None:
    error = await refusal(lambda session: session.chat(MESSAGES))
    assert (error.param, str(error)) == ("messages", f"messages: {REMEDY}")
    error = await refusal(lambda session: session.respond({"model": "policy", "input": "Sum?"}))
    assert (error.param, str(error)) == ("input", f"input: {REMEDY}")
    prompt = {"model": "policy", "prompt": "The sum"}
    error = await refusal(lambda session: session.complete(prompt))
    assert (error.param, str(error)) == ("prompt", f"prompt: {REMEDY}")


async def test_an_engine_without_formats_refuses_the_messages() -> None:
    """Its draws are of free text."""
    policy = replace(POLICY, enforces_formats=False)
    body = MESSAGES | {"response_format": SCHEMA}
    error = await refusal(lambda session: session.chat(body), policy=policy)
    assert error.param == "messages"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"error": {"message": "why", "type": "BadRequestError", "code": 400}}, "why"),
        ({"object": "error", "message": "why", "code": 400}, "why"),
        ("why", "why"),
        ({"message": "why\n  and where"}, "why and where"),
        ({"detail": "why"}, '{"detail": "why"}'),
        ({"error": "why"}, '{"error": "why"}'),
        ([], "[]"),
    ],
)
def test_the_reason_of_a_refusal_is_the_servers_message(body: Any, reason: str) -> None:
    """vLLM, SGLang and web frameworks each have a form of their own."""
    text = body if isinstance(body, str) else json.dumps(body)
    with pytest.raises(InvalidRequest, match=r"^/generate was answered 400: ") as refused:
        raise_refusal("/generate", 400, text)
    assert refused.value.reason == reason
    assert InvalidRequest("the prompt is empty").reason == "the prompt is empty"
