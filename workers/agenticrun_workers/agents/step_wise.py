"""The agent of GiGPO and step REINFORCE: a fresh prompt each turn, and so one training sample per turn.

The prompt holds the newest past turns as text, so its length does not grow with the episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from agenticrun_workers.agents.agent import AgentLimits
from agenticrun_workers.agents.registry import register_agent
from agenticrun_workers.agents.templates import check_template
from agenticrun_workers.agents.turn_based import Exchange, Policy, TurnBasedAgent
from agenticrun_workers.types import IntArray

TEMPLATE_FIELDS = (
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
    """Each turn's prompt stands for itself; `sequenceLength` bounds one turn's prompt and answer.

    Args:
        system_template: system message; empty = none.
        agent_template: user message. Both may use {instruction}, {history}, {history_length} (turns that the history shows),
            {step_count} (turns before this one), {turn} (this one, from 1), {turns_left} (this one included), {observation}
            and {max_tokens}.
        history_template: one past turn of the history, oldest first: {turn}, {observation}, {action}. An answer without an
            action is shown as it was.
        history_length: how many of the newest past turns the history shows.
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
            check_template(template, TEMPLATE_FIELDS)
        check_template(history_template, HISTORY_FIELDS)

    def prompt(self, instruction: str, past: Sequence[Exchange], observation: str) -> IntArray:
        """The whole prompt of this turn."""
        fields = self._fields_of(instruction, past, observation)
        return self.chat.first(
            self._system_template.format_map(fields), self._agent_template.format_map(fields)
        )

    def _fields_of(
        self, instruction: str, past: Sequence[Exchange], observation: str
    ) -> dict[str, Any]:
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
        return self.fields(instruction, observation, len(past) + 1) | shown
