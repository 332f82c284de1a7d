"""An agent of pydantic-ai, with a tool and a typed answer.

`run: box:play` calls it with the base_url of the policy.
"""

import random
import ssl
import string
from dataclasses import dataclass
from typing import Any, Literal

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, RunContext, UsageLimits
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

COLOURS = ("red", "green", "blue")
QUESTION = "Which colour?"
TLS = ssl.create_default_context()
"""Shared by all clients: each would read the certificates again, which takes 50 ms."""


class Box:
    """The colour is in a box. Looking into it and naming the colour earns 1, a guess nothing."""

    blocking = False
    instruction = "Look into the box."

    def reset(self, seed: int, split: str) -> str:
        return QUESTION

    def step(self, action: str) -> None:
        raise NotImplementedError("the agent returns its reward")

    def valid_actions(self) -> list[str]:
        """Return answers for the warm-up, which lets the agent play with random ones."""
        answers = [f'{{"colour": "{colour}"}}' for colour in COLOURS]
        return ['<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', *answers]

    def vocabulary(self) -> list[str]:
        # Whole sentences are one token each: in a short prompt the colour is found sooner.
        sentences = [self.instruction, QUESTION, "look()\n"]
        return [*self.valid_actions(), *COLOURS, *sentences, *string.printable]


class Answer(BaseModel):
    colour: Literal["red", "green", "blue"]


@dataclass
class Content:
    colour: str
    seen: bool = False


agent = Agent(instructions=Box.instruction, deps_type=Content, output_type=NativeOutput(Answer))


@agent.tool
def look(box: RunContext[Content]) -> str:
    """Look into the box."""
    box.deps.seen = True
    return box.deps.colour


async def play(base_url: str, task: Any) -> float:
    content = Content(random.Random(task.seed).choice(COLOURS))
    async with AsyncOpenAI(
        base_url=base_url, api_key=task.api_key, http_client=DefaultAsyncHttpxClient(verify=TLS)
    ) as client:
        model = OpenAIChatModel(task.model, provider=OpenAIProvider(openai_client=client))
        limits = UsageLimits(request_limit=3)
        try:
            result = await agent.run(
                task.observation, model=model, deps=content, usage_limits=limits
            )
        except AgentRunError:  # too many requests, or an answer that was cut
            return 0.0
    return float(content.seen and result.output.colour == content.colour)
