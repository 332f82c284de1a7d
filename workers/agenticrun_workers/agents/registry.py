"""Agents by name: `@register_agent("mine")`, an entry point in the group `agenticrun.agents`, or `module:Class`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from agenticrun_workers.agents.agent import Agent, AgentLimits
from agenticrun_workers.agents.templates import fixed_text
from agenticrun_workers.plugins import ErrorTypes, PluginConfigError, PluginImportError, PluginNotFound, Registry, snake_case


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


def agent_texts(type: str, config: Mapping[str, Any]) -> list[str]:
    """What an agent writes beside the environment's texts: its templates, and other texts of its config.

    The vocabulary of a tiny model is made of them. Raises `AgentNotFound` or `AgentImportError`.
    """
    parameters = inspect.signature(_registry.find(type)).parameters
    values = {name: parameter.default for name, parameter in parameters.items() if name.endswith("_template")}
    values |= {snake_case(name): value for name, value in config.items()}
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    return [text for name, value in texts.items() for text in (fixed_text(value) if name.endswith("_template") else [value])]
