"""Agents by name: `@register_agent`, an entry point of `agenticrun.agents`, or `module:Class`.

A class is an `Agent` or an agent with queues (`agents/queued.py`). The signature of its
`collect_trajectory` decides which.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast, overload

from agenticrun_workers.agents.agent import Agent, AgentLimits
from agenticrun_workers.agents.chat import fixed_text
from agenticrun_workers.agents.queued import QueuedAgent
from agenticrun_workers.agents.queued_types import GenerationConfig
from agenticrun_workers.plugins import (
    ErrorTypes,
    PluginConfigError,
    PluginImportError,
    PluginNotFound,
    Registry,
    snake_case,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Factory = Callable[..., Any]

OWN_ARGUMENTS = ("episode", "env", "generate")
QUEUE_ARGUMENTS = ("prompt", "env", "obs_queue", "act_queue")


class AgentNotFound(PluginNotFound):
    """No agent has that name, or the named object is not an agent."""


class AgentImportError(PluginImportError):
    """The agent's module could not be imported."""


class AgentConfigError(PluginConfigError):
    """A config key is unknown to the agent, or it rejects a value."""


_registry: Registry[Any] = Registry(
    "agent", "agenticrun.agents", ErrorTypes(AgentNotFound, AgentImportError, AgentConfigError)
)


@overload
def register_agent(name: str) -> Callable[[Factory], Factory]: ...


@overload
def register_agent(name: str, factory: Factory) -> Factory: ...


def register_agent(name: str, factory: Factory | None = None) -> Any:
    """Register a class or factory.

    Use it as `@register_agent("mine")` or `register_agent("mine", Mine)`.
    """
    return _registry.register(name) if factory is None else _registry.register(name)(factory)


def make_agent(
    type: str, config: Mapping[str, Any], *, tokenizer: PreTrainedTokenizerBase, limits: AgentLimits
) -> Agent:
    """Build an agent.

    The constructor receives `tokenizer`, `limits` and `gconfig` if it has parameters of these
    names.

    Args:
        type: registered name, entry point or `module:Class`.
        config: the agent's config, with camelCase keys.
        tokenizer: tokenizer of the policy.
        limits: limits of turns and tokens, and sampling settings.

    Raises:
        AgentNotFound: no such agent.
        AgentImportError: its module cannot be imported.
        AgentConfigError: its config is invalid.
    """
    parameters = inspect.signature(_registry.find(type)).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given: dict[str, Any] = {"tokenizer": tokenizer, "limits": limits}
    if "gconfig" in parameters:
        asked = config.get("gconfig", {})
        config = {key: value for key, value in config.items() if key != "gconfig"}
        try:
            if not isinstance(asked, Mapping):
                raise ValueError(f"gconfig must be a mapping, not {asked!r}")
            given["gconfig"] = GenerationConfig.of(asked, limits)
        except ValueError as error:
            raise AgentConfigError(f"agent {type!r} refuses its config: {error}") from error
    made = _registry.make(
        type,
        config,
        **{name: value for name, value in given.items() if takes_any or name in parameters},
    )
    return (
        QueuedAgent(made, tokenizer=tokenizer, limits=limits)
        if _has_queues(type, made)
        else cast(Agent, made)
    )


def _has_queues(type: str, made: Any) -> bool:
    """Return True for an agent with queues, False for an `Agent`.

    Raises:
        AgentNotFound: `collect_trajectory` has neither signature.
    """
    collect = getattr(made, "collect_trajectory", None)
    expected = (
        f"async def collect_trajectory(self, {', '.join(OWN_ARGUMENTS)}) "
        f"or (self, {', '.join(QUEUE_ARGUMENTS)})"
    )
    if not inspect.iscoroutinefunction(collect):
        raise AgentNotFound(f"agent {type!r} has no {expected}")
    signature = inspect.signature(collect)
    if _takes(signature, OWN_ARGUMENTS):
        return False
    if _takes(signature, QUEUE_ARGUMENTS):
        return True
    raise AgentNotFound(f"agent {type!r}: collect_trajectory{signature} is not {expected}")


def _takes(signature: inspect.Signature, arguments: tuple[str, ...]) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def agent_texts(type: str, config: Mapping[str, Any]) -> list[str]:
    """Return the texts that an agent adds to prompts: its templates and config strings.

    The vocabulary of a tiny tokenizer is built from them.

    Raises:
        AgentNotFound: no such agent.
        AgentImportError: its module cannot be imported.
    """
    parameters = inspect.signature(_registry.find(type)).parameters
    values = {
        name: parameter.default
        for name, parameter in parameters.items()
        if name.endswith("_template")
    }
    values |= {snake_case(name): value for name, value in config.items()}
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    return [
        text
        for name, value in texts.items()
        for text in (fixed_text(value) if name.endswith("_template") else [value])
    ]
