"""An agent of openai-agents, with a tool, structured output and streaming.

It has no AgenticRun code. `run: adder:play` calls it with the base_url of the policy.
"""

import ssl
from typing import Any

import agents
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic import BaseModel

agents.set_tracing_disabled(True)  # it would send traces to OpenAI

MAX_TURNS = 4
TLS = ssl.create_default_context()
"""Shared by all clients: each would read the certificates again, which takes 50 ms."""


class Total(BaseModel):
    """The answer."""

    total: int


@agents.function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def play(base_url: str, task: Any) -> None:
    async with AsyncOpenAI(
        base_url=base_url, api_key=task.api_key, http_client=DefaultAsyncHttpxClient(verify=TLS)
    ) as client:
        agent = agents.Agent(
            "Adder",
            instructions=task.instruction,
            model=agents.OpenAIResponsesModel(task.model, client),
            tools=[add],
            output_type=Total,
        )
        result = agents.Runner.run_streamed(agent, task.observation, max_turns=MAX_TURNS)
        try:
            async for _ in result.stream_events():
                pass
        except agents.AgentsException:
            pass  # too many turns, or an answer that was cut: the environment rewards the last one
