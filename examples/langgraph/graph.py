"""A graph of LangGraph: a node that asks the policy, and one with a tool. It streams.

`run: graph:play` calls it with the base_url of the policy.
"""

import random
import ssl
import string
from typing import Any, Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai import DefaultAsyncHttpxClient, DefaultHttpxClient, LengthFinishReasonError
from pydantic import BaseModel

SKIES = ("sun", "rain", "snow")
QUESTION = "How is the weather?"
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
ANSWER = ('{"weather": "', '"}')
MAX_NODES = 5
TLS = ssl.create_default_context()
"""Shared by all clients: each would read the certificates again, which takes 50 ms."""


class Weather:
    """Looking at the sky and naming the weather earns 1, a guess nothing."""

    blocking = False
    instruction = "Look outside, then answer."

    def reset(self, seed: int, split: str) -> str:
        return QUESTION

    def step(self, action: str) -> None:
        raise NotImplementedError("the agent returns its reward")

    def valid_actions(self) -> list[str]:
        """Return answers for the warm-up, which lets the agent play with random ones."""
        return [CALL, *(sky.join(ANSWER) for sky in SKIES)]

    def vocabulary(self) -> list[str]:
        # Whole sentences are one token each: in a short prompt the weather is found sooner. In the
        # answer it is the same token as in the tool's result, so the policy learns to copy it.
        sentences = [self.instruction, QUESTION, "look()\n"]
        return [CALL, *ANSWER, *SKIES, *sentences, *string.printable]


class Answer(BaseModel):
    weather: Literal["sun", "rain", "snow"]


def reporter(model: ChatOpenAI, sky: str) -> Any:
    """Build the graph: ask the policy until it calls no tool."""

    @tool
    def look() -> str:
        """Look outside."""
        return sky

    # A schema, for langchain-openai warns with each answer that a class has read.
    schema = Answer.model_json_schema()
    policy = model.bind_tools([look], strict=True, response_format=schema)

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await policy.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode([look]))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    return graph.compile()


async def play(base_url: str, task: Any) -> float:
    sky = random.Random(task.seed).choice(SKIES)
    with DefaultHttpxClient(verify=TLS) as sync_client:  # which ChatOpenAI makes, and never uses
        async with DefaultAsyncHttpxClient(verify=TLS) as client:
            model = ChatOpenAI(
                model=task.model,
                base_url=base_url,
                api_key=task.api_key,
                http_client=sync_client,
                http_async_client=client,
                streaming=True,
                max_retries=0,
            )
            asked = [(message["role"], message["content"]) for message in task.messages]
            messages: list[Any] = []
            streaming = reporter(model, sky).astream(
                {"messages": asked}, {"recursion_limit": MAX_NODES}, stream_mode="values"
            )
            try:
                async for state in streaming:
                    messages = state["messages"]
            except (GraphRecursionError, LengthFinishReasonError):
                return 0.0  # too many nodes, or an answer that was cut
    looked = any(message.type == "tool" for message in messages)
    return float(looked and Answer.model_validate_json(messages[-1].content).weather == sky)
