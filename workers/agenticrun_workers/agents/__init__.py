"""Agents: coroutines that drive an environment with a policy, one episode at a time."""

from agenticrun_workers.agents.agent import Agent, AgentLimits, Episode, Generate
from agenticrun_workers.agents.chat import ChatFormat, ChatTemplateError
from agenticrun_workers.agents.multi_turn import MultiTurnAgent
from agenticrun_workers.agents.random_policy import random_valid_policy
from agenticrun_workers.agents.registry import (
    AgentConfigError,
    AgentImportError,
    AgentNotFound,
    agent_texts,
    make_agent,
    register_agent,
)
from agenticrun_workers.agents.step_wise import StepWiseAgent
from agenticrun_workers.agents.turn_based import TurnBasedAgent

__all__ = [
    "Agent",
    "AgentConfigError",
    "AgentImportError",
    "AgentLimits",
    "AgentNotFound",
    "ChatFormat",
    "ChatTemplateError",
    "Episode",
    "Generate",
    "MultiTurnAgent",
    "StepWiseAgent",
    "TurnBasedAgent",
    "agent_texts",
    "make_agent",
    "random_valid_policy",
    "register_agent",
]
