"""The built-in agent: it shows each observation to the policy and plays the action found in the answer.

Async environments run on the event loop. Sync ones run in a thread, so that one that blocks or hangs costs its own episode
only, unless the environment says `blocking = False` (steps of microseconds).
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from agenticrun_workers.agents.agent import AgentLimits, Episode, Generate
from agenticrun_workers.agents.chat import ChatFormat
from agenticrun_workers.agents.registry import register_agent
from agenticrun_workers.envs.env import Env, StepResult
from agenticrun_workers.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    IntArray,
    SamplingParams,
    StopReason,
    Trajectory,
    Turn,
)

MAX_BLOCKING_CALLS = 64
"""Sync environments that can be inside `reset` or `step` at once."""

TEMPLATE_FIELDS = ("instruction", "observation", "turn", "turns_left", "max_tokens")


class _EpisodeEnded(Exception):
    """Carries a stop reason out of the turn loop."""

    def __init__(self, reason: StopReason, error: str = "") -> None:
        super().__init__(error)
        self.reason = reason
        self.error = error


@register_agent("multi_turn")
class MultiTurnAgent:
    """One conversation per episode: observation, answer, observation, answer ...

    Args:
        tokenizer: with a chat template.
        limits: turns, tokens and sampling.
        system_template: first message; empty = none.
        agent_template: each user message. Both may use {instruction}, {observation}, {turn} (from 1), {turns_left}
            (this one included) and {max_tokens}.
        action_pattern: regular expression searched in the answer; its last group, stripped, is the action.
        on_parse_error: `continue` plays the empty action, which the environment counts as invalid; `stop` ends the episode.
        on_cut_answer: whether an answer that met its token limit is played like any other or ends the episode.
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        limits: AgentLimits,
        system_template: str = "{instruction}",
        agent_template: str = "{observation}",
        action_pattern: str = r"^(.*)$",
        on_parse_error: Literal["continue", "stop"] = "continue",
        on_cut_answer: Literal["continue", "stop"] = "continue",
    ) -> None:
        self.chat = ChatFormat(tokenizer)
        self.limits = limits
        self._system_template = system_template
        self._agent_template = agent_template
        self._pattern = _compile(action_pattern)
        self._stop_on_parse_error = on_parse_error == "stop"
        self._stop_on_cut = on_cut_answer == "stop"
        self._threads = ThreadPoolExecutor(MAX_BLOCKING_CALLS, thread_name_prefix="env")
        for template in (system_template, agent_template):
            _check_template(template)
        for name, value in (("onParseError", on_parse_error), ("onCutAnswer", on_cut_answer)):
            if value not in ("continue", "stop"):
                raise ValueError(f"{name} must be continue or stop, not {value!r}")

    async def collect_trajectory(self, episode: Episode, env: Env, generate: Generate) -> Trajectory:
        """Play one episode; see `Agent`."""
        play = _Play(self, episode, env, generate)
        try:
            await play.run()
        except _EpisodeEnded as end:
            return play.trajectory(end.reason, end.error)
        raise AssertionError("an episode ends with a reason")

    def first_prompt(self, env: Env, observation: str) -> IntArray:
        """Tokens of the first prompt, int32 [T]."""
        system = self._system_template.format_map(self._fields(env, "", 1))
        return self.chat.first(system, self._user(env, observation, 1))

    def next_prompt(self, env: Env, observation: str, turn: int, *, ended: bool) -> IntArray:
        """Tokens put before turn number `turn` (from 1) since the last answer, int32 [T]."""
        return self.chat.next(self._user(env, observation, turn), ended=ended)

    def action(self, answer: str) -> str | None:
        """The action in an answer, or None if the pattern does not match."""
        match = self._pattern.search(answer)
        if match is None:
            return None
        return (match.group(match.lastindex or 0) or "").strip()

    def _user(self, env: Env, observation: str, turn: int) -> str:
        return self._agent_template.format_map(self._fields(env, observation, turn))

    def _fields(self, env: Env, observation: str, turn: int) -> dict[str, Any]:
        left = self.limits.max_turns - turn + 1
        values = (env.instruction, observation, turn, left, self.limits.max_tokens_per_step)
        return dict(zip(TEMPLATE_FIELDS, values, strict=True))


@dataclass
class _Play:
    """One episode being played."""

    agent: MultiTurnAgent
    episode: Episode
    env: Env
    generate: Generate
    turns: list[Turn] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    context: list[IntArray] = field(default_factory=list)

    async def run(self) -> None:
        """Turn by turn, until `_EpisodeEnded`."""
        limits = self.agent.limits
        observation = await self._env_call(self.env.reset, self.episode.env_seed, self.episode.key.stream)
        if not isinstance(observation, str):
            raise _EpisodeEnded(StopReason.ENV_ERROR, f"reset returned {type(observation).__name__}, not text")
        prompt_T = self._prompt(self.agent.first_prompt, observation)
        for turn in range(1, limits.max_turns + 1):
            generation = await self._respond(prompt_T, turn)
            result = await self._act(prompt_T, generation)
            if result.terminated:
                raise _EpisodeEnded(StopReason.COMPLETED)
            if result.truncated:
                raise _EpisodeEnded(StopReason.MAX_TURNS)
            ended = int(generation.tokens_T[-1]) == self.agent.chat.end_of_turn
            if turn < limits.max_turns:
                prompt_T = self._prompt(self.agent.next_prompt, result.observation, turn + 1, ended=ended)
        raise _EpisodeEnded(StopReason.MAX_TURNS)

    def _prompt(self, render: Callable[..., IntArray], observation: str, *arguments: Any, **options: Any) -> IntArray:
        """Tokens of an observation. Text that the tokenizer refuses is the environment's mistake."""
        try:
            return render(self.env, observation, *arguments, **options)
        except Exception as error:  # tokenizers raises plain Exception
            message = f"the observation {observation[:80]!r} cannot be tokenised: {error}"
            raise _EpisodeEnded(StopReason.ENV_ERROR, message) from error

    async def _respond(self, prompt_T: IntArray, turn: int) -> Generation:
        limits, key = self.agent.limits, self.episode.key
        self.context.append(prompt_T)
        context_T = np.concatenate(self.context)
        budget = min(limits.max_tokens_per_step, limits.sequence_length - len(context_T))
        if budget < 1:
            raise _EpisodeEnded(StopReason.CONTEXT_OVERFLOW)
        sampling = SamplingParams(
            max_new_tokens=budget,
            temperature=limits.temperature,
            top_p=limits.top_p,
            top_k=limits.top_k,
            stop_token_ids=self.agent.chat.stop_tokens,
        )
        seed = int(np.random.SeedSequence([self.episode.sampling_seed, turn]).generate_state(1, np.uint64)[0])
        generation = await self.generate(GenerationRequest(f"{key}-{turn}", str(key), context_T, sampling, seed))
        if generation.finish is FinishReason.ABORT or not len(generation.tokens_T):
            self._record(prompt_T, generation, 0.0)
            raise _EpisodeEnded(StopReason.ABORTED)
        self.context.append(generation.tokens_T)
        return generation

    async def _act(self, prompt_T: IntArray, generation: Generation) -> StepResult:
        if self.agent._stop_on_cut and generation.finish is FinishReason.LENGTH:
            self._record(prompt_T, generation, 0.0)
            raise _EpisodeEnded(StopReason.MAX_TOKENS)
        action = self.agent.action(self.agent.chat.text(generation.tokens_T))
        if action is None and self.agent._stop_on_parse_error:
            self._record(prompt_T, generation, 0.0)
            raise _EpisodeEnded(StopReason.PARSE_ERROR)
        try:
            result = _checked(await self._env_call(self.env.step, action or ""))
        except _EpisodeEnded:
            self._record(prompt_T, generation, 0.0)
            raise
        self._record(prompt_T, generation, float(result.reward))
        self._add_metrics(result.metrics)
        return result

    async def _env_call(self, call: Any, *arguments: Any) -> Any:
        """Call the environment, sync or async. Whatever it raises ends this episode and no other."""
        try:
            async with asyncio.timeout(self.agent.limits.step_timeout):
                if inspect.iscoroutinefunction(call):
                    return await call(*arguments)
                if getattr(self.env, "blocking", True):
                    return await asyncio.get_running_loop().run_in_executor(self.agent._threads, call, *arguments)
                return call(*arguments)
        except TimeoutError:
            name = f"{type(self.env).__name__}.{call.__name__}"
            raise _EpisodeEnded(StopReason.TIMEOUT, f"{name} took more than {self.agent.limits.step_timeout} s") from None
        except Exception as error:  # an environment is a user's code and may raise anything
            raise _EpisodeEnded(StopReason.ENV_ERROR, f"{type(error).__name__}: {error}") from error

    def _record(self, prompt_T: IntArray, generation: Generation, reward: float) -> None:
        self.turns.append(Turn(prompt_T, generation.tokens_T, generation.logprobs_T, generation.versions_T, reward))

    def _add_metrics(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.metrics[name] = float(value) if name == "success" else self.metrics.get(name, 0.0) + float(value)

    def trajectory(self, reason: StopReason, error: str) -> Trajectory:
        return Trajectory(self.episode.key, self.episode.tag, tuple(self.turns), reason, self.metrics, error)


def _checked(result: object) -> StepResult:
    if not isinstance(result, StepResult):
        raise _EpisodeEnded(StopReason.ENV_ERROR, f"step returned {type(result).__name__}, not a StepResult")
    if not np.isfinite(result.reward):
        raise _EpisodeEnded(StopReason.ENV_ERROR, f"step returned the reward {result.reward}")
    return result


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"actionPattern {pattern!r} is no regular expression: {error}") from error


def _check_template(template: str) -> None:
    try:
        template.format_map(dict.fromkeys(TEMPLATE_FIELDS, ""))
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"template {template!r}: {error!r}; known fields are {', '.join(TEMPLATE_FIELDS)}") from error
