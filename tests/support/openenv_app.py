"""Environments on the real server of OpenEnv, beside the one of examples/openenv.

`uvicorn openenv_app:app` in an environment that has OpenEnv, with examples/openenv on the path: the
lift at /, two others below.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Literal

from fastmcp import FastMCP
from lift import app
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from pydantic import field_validator


class Order(Action):
    """An action with a nested default, an optional field, and a validator that raises."""

    name: str
    count: int | None = None
    kind: Literal["a", "b"] = "a"

    @field_validator("name")
    @classmethod
    def _sold(cls, name: str) -> str:
        if name == "sold out":
            raise ValueError("it is sold out")
        return name


class Receipt(Observation):
    text: str


class Shop(Environment):
    """Repeats an order. One session at a time."""

    def reset(self, seed=None, episode_id=None, **_) -> Receipt:
        return Receipt(text="What?")

    def step(self, action: Order, timeout_s=None, **_) -> Receipt:
        if action.name == "broken":
            raise RuntimeError("the till is broken")
        text = f"{action.count} {action.name} {action.kind}"
        return Receipt(text=text, reward=True, done=action.name == "end")

    @property
    def state(self) -> State:
        return State()


class Tools(MCPEnvironment):
    """An environment whose actions are calls of tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("tools")

        @mcp.tool
        def echo(text: str) -> str:
            """Repeat a text."""
            return text

        @mcp.tool
        def fail() -> str:
            raise ValueError("it fails")

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **_) -> Observation:
        return Observation(metadata={"message": "ready"})

    def _step_impl(self, action: Action, timeout_s=None, **_) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State()


app.mount("/shop", create_app(Shop, Order, Receipt))
app.mount("/tools", create_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=4))
