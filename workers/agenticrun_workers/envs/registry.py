"""Environments by name: `@register_env("maze")`, an entry point in the group `agenticrun.envs`, or `module:Class`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agenticrun_workers.envs.env import Env
from agenticrun_workers.plugins import (
    ErrorTypes,
    PluginConfigError,
    PluginImportError,
    PluginNotFound,
    Registry,
)


class EnvNotFound(PluginNotFound):
    """No environment of that name."""


class EnvImportError(PluginImportError):
    """The environment's module could not be imported."""


class EnvConfigError(PluginConfigError):
    """The environment does not know a config key, or refuses a value."""


_registry: Registry[Env] = Registry(
    "env", "agenticrun.envs", ErrorTypes(EnvNotFound, EnvImportError, EnvConfigError)
)

register_env = _registry.register
find_env = _registry.find


def make_env(type: str, config: Mapping[str, Any]) -> Env:
    """Build an environment. Raises `EnvNotFound`, `EnvImportError` or `EnvConfigError`, each saying what to do."""
    return _registry.make(type, config)
