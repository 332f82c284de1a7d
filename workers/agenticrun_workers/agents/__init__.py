"""Agents: coroutines that drive an environment with a policy, one episode at a time."""

from agenticrun_workers.agents.agent import Agent, AgentLimits, Episode, Generate
from agenticrun_workers.agents.chat import ChatFormat, ChatTemplateError
from agenticrun_workers.agents.math_multi_turn import MathMultiTurnAgent
from agenticrun_workers.agents.outside import OutsideAgent
from agenticrun_workers.agents.queued import QueuedAgent, Request
from agenticrun_workers.agents.queued_types import (
    BundledGenerationOutputs,
    EpisodeEnded,
    GenerationConfig,
    Prompt,
    ScoredSequence,
)
from agenticrun_workers.agents.random_policy import random_valid_policy
from agenticrun_workers.agents.registry import (
    AgentConfigError,
    AgentImportError,
    AgentNotFound,
    agent_texts,
    make_agent,
    register_agent,
)
from agenticrun_workers.agents.turn_based import MultiTurnAgent, StepWiseAgent, TurnBasedAgent

__all__ = [
    "Agent",
    "AgentConfigError",
    "AgentImportError",
    "AgentLimits",
    "AgentNotFound",
    "BundledGenerationOutputs",
    "ChatFormat",
    "ChatTemplateError",
    "Episode",
    "EpisodeEnded",
    "Generate",
    "GenerationConfig",
    "MathMultiTurnAgent",
    "MultiTurnAgent",
    "OutsideAgent",
    "Prompt",
    "QueuedAgent",
    "Request",
    "ScoredSequence",
    "StepWiseAgent",
    "TurnBasedAgent",
    "agent_texts",
    "make_agent",
    "random_valid_policy",
    "register_agent",
]
