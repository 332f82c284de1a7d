"""Plug-ins by name: registered in code, by an entry point, or addressed as `module:Class`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Factory = TypeVar("Factory", bound=Callable[..., Any])


class PluginError(Exception):
    """Base class of errors in finding or building a plug-in. The message says what to do."""


class PluginNotFound(PluginError):
    """No plug-in of that name is registered or installed."""


class PluginImportError(PluginError):
    """The plug-in's module could not be imported. The message has the original error."""


class PluginConfigError(PluginError):
    """A config key is unknown to the plug-in, or it rejects a value."""


@dataclass(frozen=True)
class ErrorTypes:
    """Exception types of a registry: each kind of plug-in has its own."""

    not_found: type[PluginNotFound] = PluginNotFound
    import_failed: type[PluginImportError] = PluginImportError
    bad_config: type[PluginConfigError] = PluginConfigError


@dataclass
class Registry(Generic[T]):
    """Factories of one kind of plug-in.

    Args:
        kind: word for the plug-in in messages.
        group: entry point group.
        errors: exception types to raise.
    """

    kind: str
    group: str
    errors: ErrorTypes = field(default_factory=ErrorTypes)
    _factories: dict[str, Callable[..., T]] = field(default_factory=dict)

    def register(self, name: str) -> Callable[[Factory], Factory]:
        """Return a decorator that registers a class or factory, replacing an earlier one."""

        def remember(factory: Factory) -> Factory:
            self._factories[name] = factory
            return factory

        return remember

    def find(self, name: str) -> Callable[..., T]:
        """Return the factory of a registered name, an entry point or `module:Class`.

        Raises:
            PluginNotFound: no such plug-in.
            PluginImportError: its module cannot be imported.
        """
        # Before entry points: reading those of all packages takes a while.
        if name in self._factories:
            return self._factories[name]
        module_name, _, attribute = name.partition(":")
        if not attribute:
            found = [point for point in entry_points(group=self.group) if point.name == name]
            if not found:
                known = sorted(
                    {*self._factories, *(p.name for p in entry_points(group=self.group))}
                )
                close = difflib.get_close_matches(name, known, 1)
                guess = f"did you mean {close[0]}? " if close else ""
                raise self.errors.not_found(
                    f"no {self.kind} is called {name!r} ({guess}known: {', '.join(known)}); "
                    "write module:Class for one of your own"
                )
            module_name, _, attribute = found[0].value.partition(":")
        try:
            factory: Callable[..., T] = imported(module_name, attribute)
        except PluginImportError as error:
            raise self.errors.import_failed(f"{self.kind} {name!r}: {error}") from error
        return factory

    def make(self, name: str, config: Mapping[str, Any], **fixed: Any) -> T:
        """Build a plug-in. The camelCase keys of its config become keyword arguments.

        `fixed` arguments come from the caller and cannot be set by a config.

        Raises:
            PluginError: as in `find`, and PluginConfigError for an invalid config.
        """
        factory = self.find(name)
        arguments = {snake_case(key): value for key, value in config.items()}
        parameters = inspect.signature(factory).parameters
        # A factory with **kwargs checks its keys itself.
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        known = [key for key in parameters if key not in fixed]
        # The message has the key as the user wrote it.
        for original, key in zip(config, arguments, strict=True):
            if key in fixed or (key not in known and not takes_any):
                raise self.errors.bad_config(
                    f"{self.kind} {name!r} has no config key {original!r} "
                    f"(known: {', '.join(map(camel_case, known))})"
                )
        try:
            return factory(**arguments, **fixed)
        # A plug-in checks its config in its constructor; both types are usual there.
        except (TypeError, ValueError) as error:
            raise self.errors.bad_config(
                f"{self.kind} {name!r} refuses its config: {error}"
            ) from error


def bound(name: str, config: Mapping[str, Any], arguments: int) -> partial[Any]:
    """Return a user's `module:function` or `module:Class` with its config as keyword arguments.

    Args:
        config: its camelCase keys become snake_case.
        arguments: number of positional arguments that the caller will give.

    Raises:
        PluginError: it cannot be imported, is not a function, or takes other arguments.
    """
    module_name, _, attribute = name.partition(":")
    function = imported(module_name, attribute)
    if not callable(function):
        raise PluginConfigError(f"{name} is a {type(function).__name__}, not a function")
    keywords = {snake_case(key): value for key, value in config.items()}
    signature = inspect.signature(function)
    try:
        # Now: a call would fail in the first episode, after all pods have started.
        signature.bind(*[None] * arguments, **keywords)
    except TypeError as error:
        raise PluginConfigError(
            f"{name}{signature} does not take {arguments} arguments"
            + (f" and the keys {', '.join(config)}" if config else "")
            + f": {error}"
        ) from error
    return partial(function, **keywords)


def imported(module_name: str, attribute: str) -> Any:
    """Return an attribute (dots allowed) of a user's module. Raises `PluginImportError`."""
    try:
        target: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may do anything when imported
        raise PluginImportError(
            f"importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise PluginImportError(f"{module_name} has no {attribute}")
        target = getattr(target, part)
    return target


def compile_pattern(key: str, pattern: str) -> re.Pattern[str]:
    """Compile a config's regular expression, with DOTALL. Raises `ValueError`."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{key} {pattern!r} is no regular expression: {error}") from error


def last_group(match: re.Match[str]) -> str:
    """Return the last matched group, or the whole match if there is none."""
    return match.group(match.lastindex or 0) or ""


def snake_case(key: str) -> str:
    """Convert camelCase to snake_case: `isSlippery` -> `is_slippery`."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", key).lower()


def camel_case(key: str) -> str:
    """Convert snake_case to camelCase: `is_slippery` -> `isSlippery`."""
    head, *rest = key.split("_")
    return head + "".join(part.capitalize() for part in rest)
