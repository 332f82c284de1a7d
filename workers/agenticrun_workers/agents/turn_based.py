"""What agents that play turn by turn have in common: observation, prompt, answer, action, and every way in which that ends.

Async environments run on the event loop. Sync ones run in a thread, so that one that blocks or hangs costs its own episode
only, unless the environment says `blocking = False` (steps of microseconds).
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from agenticrun_workers.agents.agent import AgentLimits, Episode, Generate
from agenticrun_workers.agents.chat import ChatFormat
from agenticrun_workers.agents.templates import compile_pattern
from agenticrun_workers.envs.env import Env, StepResult, TakesItem
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, IntArray, SamplingParams, StopReason, Trajectory, Turn

MAX_BLOCKING_CALLS = 64
"""Sync environments that can be inside `reset` or `step` at once."""

Policy = Literal["continue", "stop"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A past turn, as an agent may show it again."""

    observation: str
    answer: str
    action: str | None
    ended: bool
    """The policy sampled the end of its turn itself."""


class TurnBasedAgent(ABC):
    """One prompt per turn; subclasses say which.

    Args:
        tokenizer: with a chat template.
        limits: turns, tokens and sampling.
        action_pattern: regular expression searched in the answer; its last group, stripped, is the action.
        on_parse_error: `continue` plays the empty action, which the environment counts as invalid; `stop` ends the episode.
        on_cut_answer: whether an answer that met its token limit is played like any other or ends the episode.
    """

    stepwise: ClassVar[bool]
    """Whether each prompt stands for itself; else it is what is added to the conversation."""

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        limits: AgentLimits,
        action_pattern: str,
        on_parse_error: Policy,
        on_cut_answer: Policy,
    ) -> None:
        self.chat = ChatFormat(tokenizer)
        self.limits = limits
        self.stop_on_parse_error = on_parse_error == "stop"
        self.stop_on_cut = on_cut_answer == "stop"
        self.threads = ThreadPoolExecutor(MAX_BLOCKING_CALLS, thread_name_prefix="env")
        self._pattern = compile_pattern(action_pattern)
        for name, value in (("onParseError", on_parse_error), ("onCutAnswer", on_cut_answer)):
            if value not in ("continue", "stop"):
                raise ValueError(f"{name} must be continue or stop, not {value!r}")

    @abstractmethod
    def prompt(self, env: Env, past: Sequence[Exchange], observation: str) -> IntArray:
        """Tokens put before the policy now, after these past turns, int32 [T]; see `stepwise`."""

    async def collect_trajectory(self, episode: Episode, env: Env, generate: Generate) -> Trajectory:
        """Play one episode; see `Agent`."""
        play = _Play(self, episode, env, generate)
        try:
            await play.run()
        except _EpisodeEnded as end:
            return play.trajectory(end.reason, end.error)
        raise AssertionError("an episode ends with a reason")

    def action(self, answer: str) -> str | None:
        """The action in an answer, or None if the pattern does not match."""
        match = self._pattern.search(answer)
        if match is None:
            return None
        return (match.group(match.lastindex or 0) or "").strip()

    def fields(self, env: Env, observation: str, turn: int) -> dict[str, Any]:
        """Values of the placeholders that every template may use. `turn` counts from 1."""
        return {
            "instruction": env.instruction,
            "observation": observation,
            "turn": turn,
            "turns_left": self.limits.max_turns - turn + 1,
            "max_tokens": self.limits.max_tokens_per_step,
        }


class _EpisodeEnded(Exception):
    """Carries a stop reason out of the turn loop."""

    def __init__(self, reason: StopReason, error: str = "") -> None:
        super().__init__(error)
        self.reason = reason
        self.error = error


@dataclass
class _Play:
    """One episode being played."""

    agent: TurnBasedAgent
    episode: Episode
    env: Env
    generate: Generate
    turns: list[Turn] = field(default_factory=list)
    past: list[Exchange] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    conversation: list[IntArray] = field(default_factory=list)
    """Everything so far, of agents that are not step-wise."""
    ending_T: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))

    async def run(self) -> None:
        """Turn by turn, until `_EpisodeEnded`."""
        if self.episode.item is not None:
            await self._env_call(cast(TakesItem, self.env).set_item, self.episode.item)
        observation = await self._env_call(self.env.reset, self.episode.env_seed, self.episode.key.stream)
        if not isinstance(observation, str):
            raise _EpisodeEnded(StopReason.ENV_ERROR, f"reset returned {type(observation).__name__}, not text")
        for turn in range(1, self.agent.limits.max_turns + 1):
            prompt_T = self._prompt(observation)
            generation = await self._respond(prompt_T, observation, turn)
            result = await self._act(prompt_T, observation, generation)
            if result.terminated:
                raise _EpisodeEnded(StopReason.COMPLETED)
            observation = result.observation
            if result.truncated:
                break
        self.ending_T = self._ending(observation)
        raise _EpisodeEnded(StopReason.MAX_TURNS)

    def trajectory(self, reason: StopReason, error: str) -> Trajectory:
        turns = tuple(self.turns)
        return Trajectory(self.episode.key, self.episode.tag, turns, reason, self.metrics, error, self.agent.stepwise, self.ending_T)

    def _ending(self, observation: str) -> IntArray:
        """The prompt that a cut episode leaves unanswered; nothing if there is no room for it."""
        prompt_T = self._prompt(observation)
        before = 0 if self.agent.stepwise else sum(map(len, self.conversation))
        return prompt_T if before + len(prompt_T) <= self.agent.limits.sequence_length else prompt_T[:0]

    def _prompt(self, observation: str) -> IntArray:
        """Tokens of an observation. Text that the tokenizer refuses is the environment's mistake."""
        try:
            return self.agent.prompt(self.env, self.past, observation)
        except Exception as error:  # tokenizers raises plain Exception
            message = f"the observation {observation[:80]!r} cannot be tokenised: {error}"
            raise _EpisodeEnded(StopReason.ENV_ERROR, message) from error

    async def _respond(self, prompt_T: IntArray, observation: str, turn: int) -> Generation:
        limits, key = self.agent.limits, self.episode.key
        context_T = prompt_T if self.agent.stepwise else np.concatenate([*self.conversation, prompt_T])
        budget = min(limits.max_tokens_per_step, limits.sequence_length - len(context_T))
        if budget < 1:
            raise _EpisodeEnded(StopReason.CONTEXT_OVERFLOW)
        sampling = SamplingParams(
            max_new_tokens=budget,
            temperature=limits.temperature,
            top_p=limits.top_p,
            top_k=limits.top_k,
            min_p=limits.min_p,
            stop_token_ids=self.agent.chat.stop_tokens,
            record_temperature=limits.record_temperature,
        )
        seed = int(np.random.SeedSequence([self.episode.sampling_seed, turn]).generate_state(1, np.uint64)[0])
        generation = await self.generate(GenerationRequest(f"{key}-{turn}", str(key), context_T, sampling, seed))
        if generation.finish is FinishReason.ABORT:
            self._record(prompt_T, observation, generation, None)
            raise _EpisodeEnded(StopReason.ABORTED)
        if not len(generation.tokens_T):
            raise _EpisodeEnded(StopReason.PARSE_ERROR)
        self.conversation += [prompt_T, generation.tokens_T]
        return generation

    async def _act(self, prompt_T: IntArray, observation: str, generation: Generation) -> StepResult:
        answer = self.agent.chat.text(generation.tokens_T)
        action = self.agent.action(answer)
        cut = self.agent.stop_on_cut and generation.finish is FinishReason.LENGTH
        if cut or (action is None and self.agent.stop_on_parse_error):
            self._record(prompt_T, observation, generation, action)
            raise _EpisodeEnded(StopReason.MAX_TOKENS if cut else StopReason.PARSE_ERROR)
        try:
            result = _checked(await self._env_call(self.env.step, action or ""))
        except _EpisodeEnded:
            self._record(prompt_T, observation, generation, action)
            raise
        known = result.metrics.get("action_is_valid", 1.0) != 0
        self._record(prompt_T, observation, generation, action, float(result.reward), known)
        self._add_metrics(result.metrics)
        ended = int(generation.tokens_T[-1]) == self.agent.chat.end_of_turn
        self.past.append(Exchange(observation, answer, action, ended))
        return result

    async def _env_call(self, call: Any, *arguments: Any) -> Any:
        """Call the environment, sync or async. Whatever it raises ends this episode and no other."""
        try:
            async with asyncio.timeout(self.agent.limits.step_timeout):
                if inspect.iscoroutinefunction(call):
                    return await call(*arguments)
                if getattr(self.env, "blocking", True):
                    return await asyncio.get_running_loop().run_in_executor(self.agent.threads, call, *arguments)
                return call(*arguments)
        except TimeoutError:
            message = f"{call.__qualname__} took more than {self.agent.limits.step_timeout} s"
            raise _EpisodeEnded(StopReason.TIMEOUT, message) from None
        except Exception as error:  # an environment is a user's code and may raise anything
            raise _EpisodeEnded(StopReason.ENV_ERROR, f"{type(error).__name__}: {error}") from error

    def _record(
        self, prompt_T: IntArray, observation: str, generation: Generation, action: str | None, reward: float = 0.0, known: bool = True
    ) -> None:
        """Keep a turn. `known`: the environment did not call the action invalid."""
        self.turns.append(
            Turn(
                prompt_T,
                generation.tokens_T,
                generation.logprobs_T,
                generation.versions_T,
                reward,
                valid=action is not None and known,
                state=hashlib.sha256(observation.encode()).digest(),
                action=action,
                engine=generation.engine,
            )
        )

    def _add_metrics(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.metrics[name] = float(value) if name == "success" else self.metrics.get(name, 0.0) + float(value)


def _checked(result: object) -> StepResult:
    if not isinstance(result, StepResult):
        raise _EpisodeEnded(StopReason.ENV_ERROR, f"step returned {type(result).__name__}, not a StepResult")
    if not isinstance(result.observation, str):
        raise _EpisodeEnded(StopReason.ENV_ERROR, f"step returned an observation of {type(result.observation).__name__}, not text")
    if not np.isfinite(result.reward):
        raise _EpisodeEnded(StopReason.ENV_ERROR, f"step returned the reward {result.reward}")
    return result
