"""An agent of openai-agents, with a tool, structured output and streaming.

`run: parcel:play` calls it with the base_url of the policy.
"""

import random
import ssl
import string
from dataclasses import dataclass
from typing import Any, Literal

import agents
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic import BaseModel

agents.set_tracing_disabled(True)  # it would send traces to OpenAI

STATES = ("packed", "sent", "lost")
QUESTION = "Where is my parcel?"
MAX_TURNS = 3
TLS = ssl.create_default_context()
"""Shared by all clients: each would read the certificates again, which takes 50 ms."""


class Support:
    """A customer asks. Tracking the parcel and naming its state earns 1, a guess nothing."""

    blocking = False
    instruction = "Track the parcel, then answer."

    def reset(self, seed: int, split: str) -> str:
        return QUESTION

    def step(self, action: str) -> None:
        raise NotImplementedError("the agent returns its reward")

    def valid_actions(self) -> list[str]:
        """Return answers for the warm-up, which lets the agent play with random ones."""
        answers = [f'{{"state": "{state}"}}' for state in STATES]
        return ['<tool_call>\n{"name": "track", "arguments": {}}\n</tool_call>', *answers]

    def vocabulary(self) -> list[str]:
        # Whole sentences are one token each: in a short prompt the state is found sooner.
        sentences = [self.instruction, QUESTION, "track()\n"]
        return [*self.valid_actions(), *STATES, *sentences, *string.printable]


class Answer(BaseModel):
    state: Literal["packed", "sent", "lost"]


@dataclass
class Parcel:
    state: str
    tracked: bool = False


@agents.function_tool
def track(parcel: agents.RunContextWrapper[Parcel]) -> str:
    """Track the parcel."""
    parcel.context.tracked = True
    return parcel.context.state


async def play(base_url: str, task: Any) -> float:
    parcel = Parcel(random.Random(task.seed).choice(STATES))
    async with AsyncOpenAI(
        base_url=base_url, api_key=task.api_key, http_client=DefaultAsyncHttpxClient(verify=TLS)
    ) as client:
        agent = agents.Agent[Parcel](
            "Support",
            instructions=task.instruction,
            model=agents.OpenAIResponsesModel(task.model, client),
            tools=[track],
            output_type=Answer,
        )
        result = agents.Runner.run_streamed(
            agent, task.observation, context=parcel, max_turns=MAX_TURNS
        )
        try:
            async for _ in result.stream_events():
                pass
        except agents.AgentsException:  # too many turns, or an answer that was cut
            return 0.0
    return float(parcel.tracked and result.final_output.state == parcel.state)
