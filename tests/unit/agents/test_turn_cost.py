"""The work of the endpoint in one turn does not grow with the conversation before it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from agenticrun_workers.agents import AgentLimits
from agenticrun_workers.agents.outside.messages import ChatMessage
from agenticrun_workers.agents.sampled_tree import Sampled
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, IntArray
from outside_agents import CHAT, TOKENIZER, session, user

ANSWER_T = CHAT.answer('<tool_call>\n{"name": "run", "arguments": {"a": [1, 2]}}\n</tool_call>')
TEXT_T = CHAT.encode("answer, please. ")
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
]
LIMITS = AgentLimits(max_turns=100, max_tokens_per_step=100, sequence_length=100_000)
RESULT = "The sum is what you get. "


def sampled(tokens_T: IntArray, finish: FinishReason) -> Generation:
    size = len(tokens_T)
    return Generation(tokens_T, np.zeros(size, np.float32), np.zeros(size, np.int32), finish)


async def calls(_: GenerationRequest) -> Generation:
    return sampled(ANSWER_T, FinishReason.STOP)


async def writes(_: GenerationRequest) -> Generation:
    return sampled(TEXT_T, FinishReason.LENGTH)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count characters tokenised, tokens decoded, comparisons with sequences, and identities made.

    Not counted are single passes over the client's bytes: to parse the request, to compare its
    messages with equal ones, and to copy the tokens of the prompt.
    """
    work: Counter[str] = Counter()

    def counting(name: str, call: Callable[..., Any], size: Callable[..., int]) -> Any:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            work[name] += size(*arguments)
            return call(*arguments, **options)

        return wrapped

    identity, begins = ChatMessage.identity, Sampled.begins
    assert isinstance(identity, property)
    with monkeypatch.context() as patch:
        patch.setattr(TOKENIZER, "encode", counting("encoded", TOKENIZER.encode, len))
        patch.setattr(TOKENIZER, "decode", counting("decoded", TOKENIZER.decode, len))
        patch.setattr(Sampled, "begins", counting("compared", begins, lambda *_: 1))
        patch.setattr(
            ChatMessage,
            "identity",
            property(counting("identities", identity.fget, lambda _: 1)),
        )
        yield work


async def test_a_turn_of_a_chat_costs_the_same_after_4_turns_and_after_40(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    its, messages = session(calls, LIMITS), list[Any]([user("1+1?")])
    work: dict[int, Counter[str]] = {}
    for turn in range(41):
        sent = json.loads(json.dumps(messages))  # a client's messages are never the same objects
        with counted(monkeypatch) as work[turn]:
            response = await its.chat({"model": "policy", "messages": sent, "tools": TOOLS})
        message = response.chat_body()["choices"][0]["message"]
        call = message["tool_calls"][0]["id"]
        messages += [message, {"role": "tool", "tool_call_id": call, "content": RESULT}]
    assert work[40] == work[4]
    assert work[4].keys() == {"encoded", "decoded", "identities"}
    assert len(its.recorded.branches()) == 1


async def test_a_turn_of_completions_costs_the_same_after_4_turns_and_after_40(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    its, text = session(writes, LIMITS), RESULT
    work: dict[int, Counter[str]] = {}
    for turn in range(41):
        with counted(monkeypatch) as work[turn]:
            response = await its.complete({"model": "policy", "prompt": text})
        text += response.choices[0].message.content + RESULT
    assert work[40] == work[4]
    assert work[4]["compared"] == 1
    assert len(its.recorded.branches()) == 1


async def test_a_fork_and_what_follows_it_are_found() -> None:
    """Two conversations with one beginning take turns."""
    its = session(calls, LIMITS)
    talks: list[list[Any]] = [[user("1+1?")], [user("1+1?")]]
    for _ in range(4):
        for number, talk in enumerate(talks):
            response = await its.chat({"model": "policy", "messages": talk, "tools": TOOLS})
            message = response.chat_body()["choices"][0]["message"]
            call = message["tool_calls"][0]["id"]
            talk += [message, {"role": "tool", "tool_call_id": call, "content": f"{number}"}]
    branches = its.recorded.branches()
    assert [len(branch) for branch in branches] == [4, 4]
    for number, branch in enumerate(branches):
        text = CHAT.shown(branch[-1].sampled.prompt_T)
        assert text.count(f"<tool_response>\n{number}\n") == 3
