"""A graph of LangGraph: a node that works with a tool, and one that answers as JSON. It streams.

It has no AgenticRun code. `run: graph:play` calls it with the base_url of the policy;
`command: [python, -m, graph]` starts it as a program for each episode.
"""

import asyncio
import json
import os
import ssl
from types import SimpleNamespace
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from openai import DefaultAsyncHttpxClient, DefaultHttpxClient, LengthFinishReasonError
from pydantic import BaseModel

MAX_NODES = 8
TLS = ssl.create_default_context()
"""Shared by all clients: each would read the certificates again, which takes 50 ms."""


class Total(BaseModel):
    """The answer."""

    total: int


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def adder(model: ChatOpenAI) -> Any:
    """Build the graph: work until there is no tool call, then answer."""
    working = model.bind_tools([add])
    answering = model.bind(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "Total", "schema": Total.model_json_schema(), "strict": True},
        }
    )

    async def work(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await working.ainvoke(state["messages"])]}

    async def answer(state: MessagesState) -> dict[str, Any]:
        asked = HumanMessage("Give the total as JSON.")
        return {"messages": [asked, await answering.ainvoke([*state["messages"], asked])]}

    def after_work(state: MessagesState) -> str:
        return "tools" if state["messages"][-1].tool_calls else "answer"

    graph = StateGraph(MessagesState)
    graph.add_node("work", work)
    graph.add_node("tools", ToolNode([add], handle_tool_errors=True))
    graph.add_node("answer", answer)
    graph.add_edge(START, "work")
    graph.add_conditional_edges("work", after_work, ["tools", "answer"])
    graph.add_edge("tools", "work")
    graph.add_edge("answer", END)
    return graph.compile()


async def play(base_url: str, task: Any) -> None:
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
            messages = [(message["role"], message["content"]) for message in task.messages]
            streaming = adder(model).astream(
                {"messages": messages}, {"recursion_limit": MAX_NODES}, stream_mode="messages"
            )
            try:
                async for _ in streaming:
                    pass
            except (GraphRecursionError, LengthFinishReasonError):
                pass  # too many nodes, or a cut answer: the environment rewards the last one


if __name__ == "__main__":
    task = SimpleNamespace(**json.loads(os.environ["AGENTICRUN_TASK"]))
    asyncio.run(play(os.environ["OPENAI_BASE_URL"], task))
