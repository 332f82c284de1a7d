"""The agent of StarPO: one growing conversation per episode, and so one training sample."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from agenticrun_workers.agents.agent import AgentLimits
from agenticrun_workers.agents.registry import register_agent
from agenticrun_workers.agents.templates import check_template
from agenticrun_workers.agents.turn_based import Exchange, Policy, TurnBasedAgent
from agenticrun_workers.types import IntArray

TEMPLATE_FIELDS = ("instruction", "observation", "turn", "turns_left", "max_tokens")


@register_agent("multi_turn")
class MultiTurnAgent(TurnBasedAgent):
    """Observation, answer, observation, answer ... in one conversation.

    Args:
        system_template: first message; empty = none.
        agent_template: each user message. Both may use {instruction}, {observation}, {turn} (from 1), {turns_left}
            (this one included) and {max_tokens}.
        others: see `TurnBasedAgent`.
    """

    stepwise = False

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
        self._system_template = system_template
        self._agent_template = agent_template
        for template in (system_template, agent_template):
            check_template(template, TEMPLATE_FIELDS)

    def prompt(self, instruction: str, past: Sequence[Exchange], observation: str) -> IntArray:
        """What the conversation grows by: the end of the last answer where the policy did not sample it, and the next message."""
        user = self._agent_template.format_map(self.fields(instruction, observation, len(past) + 1))
        if past:
            return self.chat.next(user, ended=past[-1].ended)
        return self.chat.first(
            self._system_template.format_map(self.fields(instruction, "", 1)), user
        )
