"""The environment protocol (gym-like, text in and text out, sync or async) and its registry.

Environments are found by name: `@register_env("maze")`, an entry point in the group
`agenticrun.envs`, or `module:Class`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.plugins import (
    ErrorTypes,
    PluginConfigError,
    PluginImportError,
    PluginNotFound,
    Registry,
)
from agenticrun_workers.types import StopReason, Stream

MetricMode = Literal["sum", "mean", "min", "max", "first", "last"]
"""Aggregation of one metric over the steps of an episode."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one action.

    gymnasium's plain tuple (observation, reward, terminated, truncated, info) is accepted as well:
    `info["metrics"]` and `info["metrics_agg_mode"]` are then its metrics and their modes, as in
    ROLL.
    """

    observation: str
    reward: float
    terminated: bool
    truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measurements of this step. `action_is_valid: 0` means that the answer held no action."""
    modes: Mapping[str, MetricMode] = field(default_factory=dict)
    """Aggregation of each metric over the episode.

    Default: the sum, and for `success` the last value.
    """
    info: Mapping[str, Any] = field(default_factory=dict)
    """Anything else, for agents that know this environment."""


class EnvFault(Exception):
    """An environment raised, hung, or returned something that is not a step.

    It costs the episode; `reason` is env_error or timeout.
    """

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class AtCapacity(EnvFault):
    """The server of an environment has no place for another session."""

    def __init__(self, message: str) -> None:
        super().__init__(StopReason.ENV_ERROR, message)


class Env(Protocol):
    """An environment that plays one episode at a time.

    It owns its random numbers: the same (seed, split) gives the same episode on any machine.
    `split` is `train` (also in the warm-up) or `validation`: an environment that generates levels
    must never give the same level in both. Sync methods are called in a thread, unless the class
    has `blocking = False`, which promises that they take microseconds. An instance plays one
    episode after another, unless the class has `reusable = False`: then each episode gets a new
    instance.

    Environments written for gymnasium's signatures work unchanged: `reset(seed)` without a split
    (validation then uses other seeds), a pair (observation, info) from `reset`, a tuple of five
    from `step`. `instruction` and `valid_actions` may be missing.
    """

    instruction: str
    """The task and how to answer, for the first prompt.

    `info["env_instruction"]` of `reset`, if there is one, replaces it.
    """

    def reset(
        self, seed: int, split: Stream
    ) -> str | tuple[str, Mapping[str, Any]] | Awaitable[str | tuple[str, Mapping[str, Any]]]:
        """Begin an episode and return its first observation."""
        ...

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Play the text of an answer.

        An invalid action is a normal step with `action_is_valid: 0`, never an exception.
        """
        ...

    def valid_actions(self) -> list[str] | Awaitable[list[str]]:
        """Return the answers that are valid now, if they can be listed.

        Warm-up by random play and the random policy need them.
        """
        ...


@runtime_checkable
class HasVocabulary(Protocol):
    """An environment that builds its texts from a fixed set of pieces.

    A tiny tokenizer can be made of them.
    """

    def vocabulary(self) -> list[str]:
        """Return the pieces; every observation and answer is a concatenation of them."""
        ...


class NoColumn(KeyError):
    """An item has no column of that name. The text names its columns."""

    def __str__(self) -> str:
        return str(self.args[0])


class Row(dict[str, Any]):
    """An item of a data set: values by column."""

    def __missing__(self, name: str) -> Any:
        raise NoColumn(f"the data set has no column {name!r}; it has {', '.join(self)}")


@runtime_checkable
class TakesItem(Protocol):
    """An environment that plays items of `envs[].dataset`."""

    def set_item(self, item: Mapping[str, Any]) -> None:
        """Set the item of the next episode: its columns by name. Called before `reset`."""
        ...


@runtime_checkable
class Renders(Protocol):
    """An environment that can draw its state, for `tracking.renderDir`."""

    def render(self) -> NDArray[np.uint8]:
        """Draw the state after the last `reset` or `step`: RGB, uint8 [height, width, 3]."""
        ...


@runtime_checkable
class Closes(Protocol):
    """An environment that holds something outside this process, such as a connection."""

    def close(self) -> Awaitable[None] | None:
        """Give back what it holds.

        Called once, when the environment is no longer needed, in whatever state it is. A call that
        has exceeded its time limit may still run.
        """
        ...


class EnvNotFound(PluginNotFound):
    """No environment has that name."""


class EnvImportError(PluginImportError):
    """The environment's module could not be imported."""


class EnvConfigError(PluginConfigError):
    """The environment does not know a config key, or rejects a value."""


_registry: Registry[Env] = Registry(
    "env", "agenticrun.envs", ErrorTypes(EnvNotFound, EnvImportError, EnvConfigError)
)

register_env = _registry.register
find_env = _registry.find


def make_env(type: str, config: Mapping[str, Any]) -> Env:
    """Build an environment.

    Raises:
        EnvNotFound, EnvImportError, EnvConfigError: the message says what to do.
    """
    return _registry.make(type, config)
