"""A CodeAgent of smolagents: the policy answers with Python, which smolagents interprets.

`run: calculator:play` calls it with the base_url of the policy.
"""

import random
import ssl
import string
from typing import Any

from openai import DefaultHttpxClient
from smolagents import CodeAgent, LogLevel, OpenAIModel
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

RIGHT = {"sum": 5, "difference": 1, "product": 6}
TLS = ssl.create_default_context()
"""Shared by all clients: each would read the certificates again, which takes 50 ms."""


class Sums:
    """A program with the right result earns 1."""

    blocking = False
    instruction = "Compute it."

    def reset(self, seed: int, split: str) -> str:
        return f"{random.Random(seed).choice(list(RIGHT))} of 3 and 2"

    def step(self, action: str) -> None:
        raise NotImplementedError("the agent returns its reward")

    def valid_actions(self) -> list[str]:
        """Return answers for the warm-up, which lets the agent play with random ones."""
        return [f"<code>final_answer(3 {operator} 2)</code>" for operator in "+-*"]

    def vocabulary(self) -> list[str]:
        return [*self.valid_actions(), *RIGHT, " of 3 and 2", "New task:\n", *string.printable]


def play(base_url: str, task: Any) -> float:
    with DefaultHttpxClient(verify=TLS) as http_client:
        agent = CodeAgent(
            tools=[],
            model=OpenAIModel(
                task.model, base_url, task.api_key, client_kwargs={"http_client": http_client}
            ),
            # Leave it out for a real model: the default prompt has ten thousand characters.
            prompt_templates={**EMPTY_PROMPT_TEMPLATES, "system_prompt": task.instruction},
            max_steps=2,
            verbosity_level=LogLevel.OFF,
        )
        answer = agent.run(task.observation)
    return float(answer == RIGHT[task.observation.split()[0]])
