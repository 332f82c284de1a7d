"""Turn-based agents: `multi_turn` (StarPO) and `step_wise` (GiGPO, step REINFORCE).

`multi_turn` grows one conversation per episode: one training sample. Where the run drops the
reasoning of earlier answers (`spec.model.earlierReasoning`), no prompt continues the one before, so
each turn is a sample with the whole conversation. `step_wise` renders a new prompt for each turn,
with the newest past turns: one training sample per turn, of bounded length.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from agenticrun_workers.agents.agent import AgentLimits, Episode, EpisodeMetrics, Generate
from agenticrun_workers.agents.chat import ChatFormat, Message, check_template
from agenticrun_workers.agents.registry import register_agent
from agenticrun_workers.envs import Env, EnvCalls, EnvFault, StepResult
from agenticrun_workers.plugins import compile_pattern, last_group
from agenticrun_workers.types import (
    FinishReason,
    Generation,
    IntArray,
    StopReason,
    Trajectory,
    Turn,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Policy = Literal["continue", "stop"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A past turn as text, for later prompts."""

    observation: str
    answer: str
    action: str | None
    ended: bool
    """True if the policy sampled the end-of-turn token."""


class TurnBasedAgent(ABC):
    """Base class of agents with one prompt per turn.

    Subclasses render the prompt.

    Args:
        tokenizer: tokenizer with a chat template.
        limits: limits of turns and tokens, and sampling settings.
        action_pattern: regular expression to search for in the answer. Its last group, stripped, is
            the action.
        on_parse_error: `continue` sends the empty action, which the environment counts as invalid;
            `stop` ends the episode.
        on_cut_answer: `continue` treats an answer that reaches its token limit like any other;
            `stop` ends the episode.
    """

    stepwise: bool
    """True if each prompt is complete; False if it extends the conversation."""

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
        self.envs = EnvCalls(limits.step_timeout)
        self._pattern = compile_pattern("actionPattern", action_pattern)
        for name, value in (("onParseError", on_parse_error), ("onCutAnswer", on_cut_answer)):
            if value not in ("continue", "stop"):
                raise ValueError(f"{name} must be continue or stop, not {value!r}")

    @abstractmethod
    def prompt(self, instruction: str, past: Sequence[Exchange], observation: str) -> IntArray:
        """Return the prompt tokens of the next turn, int32 [T]; see `stepwise`."""

    async def collect_trajectory(
        self, episode: Episode, env: Env, generate: Generate
    ) -> Trajectory:
        """Run one episode; see `Agent`."""
        play = _Play(self, episode, env, generate)
        try:
            await play.run()
        except _EpisodeEnded as end:
            return play.trajectory(end.reason)
        except EnvFault as fault:
            return play.trajectory(fault.reason, str(fault))
        raise AssertionError("an episode ends with a reason")

    def action(self, answer: str) -> str | None:
        """Return the action in an answer, or None if the pattern does not match."""
        match = self._pattern.search(answer)
        return None if match is None else last_group(match).strip()

    def fields(self, instruction: str, observation: str, turn: int) -> dict[str, Any]:
        """Return the placeholder values that every template may use. `turn` counts from 1."""
        return {
            "instruction": instruction,
            "observation": observation,
            "turn": turn,
            "turns_left": self.limits.max_turns - turn + 1,
            "max_tokens": self.limits.max_tokens_per_step,
        }


class _EpisodeEnded(Exception):
    """Exception that carries a stop reason out of the turn loop."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class _Play:
    """State of one running episode."""

    agent: TurnBasedAgent
    episode: Episode
    env: Env
    generate: Generate
    turns: list[Turn] = field(default_factory=list)
    past: list[Exchange] = field(default_factory=list)
    metrics: EpisodeMetrics = field(default_factory=EpisodeMetrics)
    instruction: str = ""
    conversation: list[IntArray] = field(default_factory=list)
    """Prompts and responses so far; unused by step-wise agents."""
    ending_T: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))

    async def run(self) -> None:
        """Run turn by turn until `_EpisodeEnded` is raised."""
        start = await self.agent.envs.reset(
            self.env, self.episode.env_seed, self.episode.key.stream, self.episode.item
        )
        self.instruction, observation = start.instruction, start.observation
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

    def trajectory(self, reason: StopReason, error: str = "") -> Trajectory:
        turns = tuple(self.turns)
        return Trajectory(
            self.episode.key,
            self.episode.tag,
            turns,
            reason,
            self.metrics.totals(),
            error,
            self.agent.stepwise,
            self.ending_T,
        )

    def _ending(self, observation: str) -> IntArray:
        """Return the unanswered prompt of a cut episode, int32 [T]; empty if it does not fit."""
        prompt_T = self._prompt(observation)
        before = 0 if self.agent.stepwise else sum(map(len, self.conversation))
        return (
            prompt_T
            if before + len(prompt_T) <= self.agent.limits.sequence_length
            else prompt_T[:0]
        )

    def _prompt(self, observation: str) -> IntArray:
        """Return the tokens of the next prompt, int32 [T].

        Raises:
            EnvFault: the observation cannot be tokenised.
        """
        try:
            return self.agent.prompt(self.instruction, self.past, observation)
        except Exception as error:  # tokenizers raises plain Exception
            texts = (self.instruction, observation)
            message = self.agent.chat.not_tokenised("observation", texts, self.env, error)
            raise EnvFault(StopReason.ENV_ERROR, message) from error

    async def _respond(self, prompt_T: IntArray, observation: str, turn: int) -> Generation:
        limits = self.agent.limits
        context_T = (
            prompt_T if self.agent.stepwise else np.concatenate([*self.conversation, prompt_T])
        )
        budget = min(limits.max_tokens_per_step, limits.sequence_length - len(context_T))
        if budget < 1:
            raise _EpisodeEnded(StopReason.CONTEXT_OVERFLOW)
        sampling = limits.sampling(budget, self.agent.chat.stop_tokens)
        generation = await self.generate(
            self.episode.request(str(turn), context_T, sampling, [turn])
        )
        if generation.finish is FinishReason.ABORT:
            self._record(prompt_T, observation, generation, None)
            raise _EpisodeEnded(StopReason.ABORTED)
        if not len(generation.tokens_T):
            raise _EpisodeEnded(StopReason.PARSE_ERROR)
        self.conversation += [prompt_T, generation.tokens_T]
        return generation

    async def _act(
        self, prompt_T: IntArray, observation: str, generation: Generation
    ) -> StepResult:
        answer = self.agent.chat.text(generation.tokens_T)
        action = self.agent.action(answer)
        cut = self.agent.stop_on_cut and generation.finish is FinishReason.LENGTH
        if cut or (action is None and self.agent.stop_on_parse_error):
            self._record(prompt_T, observation, generation, action)
            raise _EpisodeEnded(StopReason.MAX_TOKENS if cut else StopReason.PARSE_ERROR)
        try:
            result = await self.agent.envs.step(self.env, action or "")
        except EnvFault:
            self._record(prompt_T, observation, generation, action)
            raise
        known = result.metrics.get("action_is_valid", 1.0) != 0
        self._record(prompt_T, observation, generation, action, float(result.reward), known)
        self.metrics.add_step(result)
        ended = self.agent.chat.ended(generation.tokens_T)
        self.past.append(Exchange(observation, answer, action, ended))
        return result

    def _record(
        self,
        prompt_T: IntArray,
        observation: str,
        generation: Generation,
        action: str | None,
        reward: float = 0.0,
        known: bool = True,
    ) -> None:
        """Append a turn. `known` is False if the environment calls the action invalid."""
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


MULTI_TURN_FIELDS = ("instruction", "observation", "turn", "turns_left", "max_tokens")


@register_agent("multi_turn")
class MultiTurnAgent(TurnBasedAgent):
    """Agent with one conversation: observation, answer, observation, answer ...

    Args:
        system_template: first message; empty = none.
        agent_template: each user message. Both templates may use {instruction}, {observation},
            {turn} (from 1), {turns_left} (including this one) and {max_tokens}.
        others: see `TurnBasedAgent`.
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        limits: AgentLimits,
        system_template: str = "{instruction}",
        agent_template: str = "{observation}",
        action_pattern: str = r"^(.*)$",
        on_parse_error: Policy = "continue",
        on_cut_answer: Policy = "continue",
    ) -> None:
        super().__init__(
            tokenizer=tokenizer,
            limits=limits,
            action_pattern=action_pattern,
            on_parse_error=on_parse_error,
            on_cut_answer=on_cut_answer,
        )
        self.stepwise = self.chat.drops_between_turns
        self._system_template = system_template
        self._agent_template = agent_template
        for template in (system_template, agent_template):
            check_template(template, MULTI_TURN_FIELDS)

    def prompt(self, instruction: str, past: Sequence[Exchange], observation: str) -> IntArray:
        """Return the tokens to append to the conversation, int32 [T].

        They are the end of the last answer, if the policy did not sample it, and the next message.
        Without the reasoning of earlier answers, they are the whole conversation.
        """
        user = self._user(instruction, observation, len(past))
        if past and not self.stepwise:
            return self.chat.next(user, ended=past[-1].ended)
        system = self._system_template.format_map(self.fields(instruction, "", 1))
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for turn, exchange in enumerate(past):
            messages += [
                {"role": "user", "content": self._user(instruction, exchange.observation, turn)},
                self.chat.message(exchange.answer, ended=exchange.ended),
            ]
        return self.chat.conversation([*messages, {"role": "user", "content": user}])

    def _user(self, instruction: str, observation: str, turns: int) -> str:
        """Return the user message after a number of turns."""
        return self._agent_template.format_map(self.fields(instruction, observation, turns + 1))


STEP_WISE_FIELDS = (
    "instruction",
    "history",
    "history_length",
    "step_count",
    "turn",
    "turns_left",
    "observation",
    "max_tokens",
)
HISTORY_FIELDS = ("turn", "observation", "action")

AGENT_TEMPLATE = (
    "Steps taken: {step_count}. The last {history_length}:\n{history}Now:\n{observation}"
)
HISTORY_TEMPLATE = "[{turn}]\n{observation}\n-> {action}\n"


@register_agent("step_wise")
class StepWiseAgent(TurnBasedAgent):
    """Agent with a complete prompt for each turn, which shows a few past turns.

    `sequenceLength` limits the prompt and answer of one turn.

    Args:
        system_template: system message; empty = none.
        agent_template: user message. Both templates may use {instruction}, {history},
            {history_length} (turns in the history), {step_count} (turns before this one), {turn}
            (this one, from 1), {turns_left} (including this one), {observation} and {max_tokens}.
        history_template: one past turn in the history, oldest first: {turn}, {observation},
            {action}. If the answer has no action, {action} is the whole answer.
        history_length: maximum number of past turns in the history.
        others: see `TurnBasedAgent`.
    """

    stepwise = True

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        limits: AgentLimits,
        system_template: str = "{instruction}",
        agent_template: str = AGENT_TEMPLATE,
        history_template: str = HISTORY_TEMPLATE,
        history_length: int = 2,
        action_pattern: str = r"^(.*)$",
        on_parse_error: Policy = "continue",
        on_cut_answer: Policy = "continue",
    ) -> None:
        super().__init__(
            tokenizer=tokenizer,
            limits=limits,
            action_pattern=action_pattern,
            on_parse_error=on_parse_error,
            on_cut_answer=on_cut_answer,
        )
        if history_length < 0:
            raise ValueError(f"historyLength must be 0 or more, not {history_length}")
        self._system_template = system_template
        self._agent_template = agent_template
        self._history_template = history_template
        self._history_length = history_length
        for template in (system_template, agent_template):
            check_template(template, STEP_WISE_FIELDS)
        check_template(history_template, HISTORY_FIELDS)

    def prompt(self, instruction: str, past: Sequence[Exchange], observation: str) -> IntArray:
        """Return the whole prompt of this turn, int32 [T]."""
        first_shown = max(0, len(past) - self._history_length)
        history = "".join(
            self._history_template.format_map(
                {
                    "turn": number + 1,
                    "observation": past[number].observation,
                    "action": past[number].answer
                    if past[number].action is None
                    else past[number].action,
                }
            )
            for number in range(first_shown, len(past))
        )
        shown = {
            "history": history,
            "history_length": len(past) - first_shown,
            "step_count": len(past),
        }
        fields = self.fields(instruction, observation, len(past) + 1) | shown
        return self.chat.first(
            self._system_template.format_map(fields), self._agent_template.format_map(fields)
        )
