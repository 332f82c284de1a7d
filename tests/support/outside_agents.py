"""A tokenizer with tools in its chat template, and a scripted policy, for agents over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionUserMessageParam
from transformers import PreTrainedModel

from agenticrun_workers.agents import AgentLimits, ChatFormat, Episode, OutsideAgent
from agenticrun_workers.agents.outside.session import Policy, Session
from agenticrun_workers.envs import Env
from agenticrun_workers.inference import InferenceEngine, InvalidRequest
from agenticrun_workers.models.tokenizer import build_task_tokenizer
from agenticrun_workers.types import (
    EpisodeKey,
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParams,
    StopReason,
    Stream,
    Trajectory,
)
from byte_level import byte_level_tokenizer
from tiny_model import CONTEXT, plain_logprobs

CHATML_WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\nTools:' }}"
    "{% for t in tools %}{{ '\n' + (t | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \''
    " + (c.function.arguments | tojson) + '}\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As Qwen's: tool responses that follow each other share one user turn."""

CORPUS = (
    "system\nuser\nassistant\nThe sum is what you get: answer, please. "
    "tool_response tool_call name arguments\n"
)

TOKENIZER = byte_level_tokenizer(CORPUS, CHATML_WITH_TOOLS)
CHAT = ChatFormat(TOKENIZER)
EPISODE = Episode(
    EpisodeKey(Stream.TRAIN, 3, 1), "outside", env_seed=5, sampling_seed=9, item={"question": "1+1"}
)
LIMITS = AgentLimits(max_turns=12, max_tokens_per_step=300, sequence_length=4000, temperature=0.8)


class Question:
    """An environment of one step: the reward is the answer's length in tenths."""

    instruction = "Be brief."
    blocking = False

    def set_item(self, item: object) -> None: ...

    def reset(self, seed: int, split: str) -> str:
        return "1+1?"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        return "", len(action) / 10, True, False, {"metrics": {"success": 1.0}}


class Says:
    """A policy that says one text after another, or a function's of the prompt.

    It samples letter by letter, unlike any tokenizer, so that a caller that tokenises the text
    again gets other tokens.
    """

    def __init__(
        self, texts: Iterable[str] | Callable[[GenerationRequest], str], delay: float = 0.0
    ) -> None:
        rest = iter(()) if callable(texts) else iter(texts)
        self._next = texts if callable(texts) else lambda request: next(rest)
        self.delay = delay
        self.asked: list[tuple[GenerationRequest, Generation]] = []
        """Every request that was answered."""
        self.begun = 0
        self.given_up = 0

    async def __call__(self, request: GenerationRequest) -> Generation:
        self.begun += 1
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        text = self._next(request)
        tokens = [
            token for letter in text for token in TOKENIZER.encode(letter, add_special_tokens=False)
        ]
        tokens_T = np.array([*tokens, CHAT.end_of_turn], np.int32)[
            : request.sampling.max_new_tokens
        ]
        size, number = len(tokens_T), len(self.asked) + 1
        finish = FinishReason.STOP if tokens_T[-1] == CHAT.end_of_turn else FinishReason.LENGTH
        logprobs_T = -np.arange(1, size + 1, dtype=np.float32) - 1000 * number
        made = Generation(
            tokens_T, logprobs_T, np.full(size, number, np.int32), finish, engine=f"e{number}"
        )
        self.asked.append((request, made))
        return made


def client(base_url: str) -> AsyncOpenAI:
    """A client; use it in an `async with`, which closes its connections."""
    return AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0)


def user(text: str) -> ChatCompletionUserMessageParam:
    return {"role": "user", "content": text}


async def say(base_url: str, messages: list[Any], **more: Any) -> Any:
    async with client(base_url) as http:
        return await http.chat.completions.create(model="policy", messages=messages, **more)


async def complete(base_url: str, prompt: Any, **more: Any) -> Any:
    async with client(base_url) as http:
        return await http.completions.create(model="policy", prompt=prompt, **more)


def session(policy: Any, limits: AgentLimits = LIMITS) -> Session:
    return Session(
        Policy(TOKENIZER, CHAT, limits, "policy"),
        EPISODE,
        policy,
    )


def play(
    policy: Says, env: object | None = None, limits: AgentLimits = LIMITS, **config: Any
) -> list[Trajectory]:
    """The trajectories of one episode of an outside agent with this config."""
    agent = OutsideAgent(tokenizer=TOKENIZER, limits=limits, **config)
    played = cast(Env, env or Question())  # also with gymnasium's signatures
    return asyncio.run(asyncio.wait_for(agent.collect_trajectory(EPISODE, played, policy), 60))


def check_token_for_token(
    trajectories: list[Trajectory], asked: list[tuple[GenerationRequest, Generation]]
) -> None:
    """Check that every answer is trained in exactly one place, with its own numbers.

    The tokens before it are exactly those of the request to the engine.
    """
    unseen = list(asked)
    for trajectory in trajectories:
        before: list[int] = []
        for turn in trajectory.turns:
            before += turn.prompt_T.tolist()
            request, said = next(pair for pair in unseen if pair[1].engine == turn.engine)
            unseen = [pair for pair in unseen if pair[1] is not said]
            assert before == request.prompt_tokens.tolist()
            size = len(turn.response_T)
            assert turn.response_T.tolist() == said.tokens_T[:size].tolist()
            assert turn.logprobs_T.tolist() == said.logprobs_T[:size].tolist()
            assert turn.versions_T.tolist() == said.versions_T[:size].tolist()
            before += turn.response_T.tolist()
        assert trajectory.tokens_T.tolist() == before
        assert trajectory.response_mask_T.sum() == sum(
            len(turn.response_T) for turn in trajectory.turns
        )
    assert not unseen


FORMAT_WORDS = (
    *("<tool_call>", "</tool_call>", "name", "arguments", "add", "sum"),
    *'\n{}":, ()?0123456789',
)
"""As many words as those of `tiny_model`, so that its engine can serve this vocabulary."""
SUM: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}


async def ask_for_formats(base_url: str, task: Any) -> float:
    """Ask for a JSON schema and for a call of a tool, check both, and go on after the call."""
    add: Any = {
        "type": "function",
        "function": {"name": "add", "parameters": SUM, "strict": True},
    }
    schema: Any = {"name": "sum", "schema": SUM, "strict": True}
    response_format = {"type": "json_schema", "json_schema": schema}
    said = await say(base_url, [user("?")], response_format=response_format, n=2, logprobs=True)
    assert len(said.choices) == 2
    for choice in said.choices:
        if choice.finish_reason == "stop":
            assert [*json.loads(choice.message.content)] == ["sum"]
        assert choice.logprobs.content
    called = await say(base_url, [user("?")], tools=[add], tool_choice="required")
    (call,) = called.choices[0].message.tool_calls
    assert isinstance(json.loads(call.function.arguments)["sum"], int)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    await say(base_url, [user("?"), called.choices[0].message, result], tools=[add])
    return 1.0


async def formats_on(engine: InferenceEngine, temperature: float = 0.8) -> list[Trajectory]:
    """Return what an engine's answers to `ask_for_formats` become."""
    limits = AgentLimits(
        max_turns=8, max_tokens_per_step=48, sequence_length=CONTEXT, temperature=temperature
    )
    agent = OutsideAgent(
        tokenizer=build_task_tokenizer(FORMAT_WORDS, CONTEXT),
        limits=limits,
        run="outside_agents:ask_for_formats",
    )
    return await agent.collect_trajectory(EPISODE, cast(Env, Question()), engine.generate)


async def check_enforced_formats(engine: InferenceEngine) -> None:
    """Ask an engine with `FORMAT_WORDS` for a JSON schema and for a call, and check both."""
    limits = AgentLimits(max_turns=8, max_tokens_per_step=64, sequence_length=CONTEXT)
    tokenizer = build_task_tokenizer(FORMAT_WORDS, CONTEXT)
    policy = Policy(tokenizer, ChatFormat(tokenizer), limits, "policy", enforces_formats=True)
    its = Session(policy, EPISODE, engine.generate)
    body: dict[str, Any] = {"model": "policy", "messages": [user("?")], "n": 8}
    schema = {"name": "sum", "schema": SUM}
    response_format = {"type": "json_schema", "json_schema": schema}
    said = await its.chat(body | {"response_format": response_format})
    ended = [each for each in said.choices if each.finish_reason == "stop"]
    assert ended, "no answer has so many digits"
    assert all([*json.loads(each.message.content)] == ["sum"] for each in ended)
    add = {"type": "function", "function": {"name": "add", "parameters": SUM, "strict": True}}
    called = await its.chat(body | {"tools": [add], "tool_choice": "required"})
    ended = [each for each in called.choices if each.finish_reason != "length"]
    assert ended
    for each in ended:
        (call,) = each.message.tool_calls
        assert isinstance(json.loads(call.arguments)["sum"], int)
    assert len(its.recorded.answers) == 16, "without drafts"
    no_tag = SamplingParams(4, structural_tag='{"type": "structural_tag", "format": 5}')
    with pytest.raises(InvalidRequest):
        await engine.generate(GenerationRequest("r", "s", np.array([1], np.int32), no_tag))


def check_log_probs(
    model: PreTrainedModel, trajectories: Iterable[Trajectory], temperature: float
) -> None:
    """Compare each log-prob with one plain forward pass over the trajectory."""
    for trajectory in trajectories:
        assert (trajectory.stop_reason, trajectory.error) == (StopReason.COMPLETED, "")
        before: list[int] = []
        for turn in trajectory.turns:
            before += turn.prompt_T.tolist()
            prompt_T = trajectory.tokens_T[: len(before)]
            expected_T = plain_logprobs(model, prompt_T, turn.response_T, temperature)
            assert turn.logprobs_T == pytest.approx(expected_T, abs=1e-4)
            before += turn.response_T.tolist()
