"""Agents by name: `@register_agent("mine")`, an entry point in the group `agenticrun.agents`, or `module:Class`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from agenticrun_workers.agents.agent import Agent, AgentLimits
from agenticrun_workers.plugins import ErrorTypes, PluginConfigError, PluginImportError, PluginNotFound, Registry


class AgentNotFound(PluginNotFound):
    """No agent of that name."""


class AgentImportError(PluginImportError):
    """The agent's module could not be imported."""


class AgentConfigError(PluginConfigError):
    """The agent does not know a config key, or refuses a value."""


_registry: Registry[Agent] = Registry("agent", "agenticrun.agents", ErrorTypes(AgentNotFound, AgentImportError, AgentConfigError))

register_agent = _registry.register


def make_agent(type: str, config: Mapping[str, Any], *, tokenizer: PreTrainedTokenizerBase, limits: AgentLimits) -> Agent:
    """Build an agent. Raises `AgentNotFound`, `AgentImportError` or `AgentConfigError`, each saying what to do."""
    return _registry.make(type, config, tokenizer=tokenizer, limits=limits)
