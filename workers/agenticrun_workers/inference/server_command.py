"""`strategy.config` as the command line of an engine's server: its own options under their own names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

FIELD = "spec.pipeline.actorInfer.strategy.config"


def command_line(
    config: Mapping[str, Any],
    owned: Mapping[str, str],
    defaults: Mapping[str, Any] | None = None,
    *,
    negatable: bool = False,
) -> list[str]:
    """Flags of a server.

    True is a bare flag; False leaves it out, or is `--no-<flag>` where the server knows those; null is the server's own default.
    A list follows its flag word by word, a mapping is JSON. Names may be written with `_` or `-`.

    Args:
        config: what the user passes through.
        owned: options that are decided elsewhere -> where. With their aliases.
        defaults: options that the user may replace.
        negatable: whether the server has a `--no-<flag>` for each switch (argparse's BooleanOptionalAction).

    Raises:
        ValueError: `config` has an owned option, or a value that cannot stand on a command line.
    """
    options = dict(defaults or {})
    for key, value in config.items():
        name = key.replace("-", "_").strip("_")
        _refuse_owned(name, owned)
        options[name] = value
    return [word for name, value in options.items() for word in _words(name, value, negatable)]


def _refuse_owned(name: str, owned: Mapping[str, str]) -> None:
    """Also abbreviations: argparse takes any prefix of an option for the option."""
    if name in owned:
        raise ValueError(f"{FIELD}.{name} cannot be set: {owned[name]} decides it")
    for option, decides in owned.items():
        if option.startswith(name):
            raise ValueError(
                f"{FIELD}.{name} is short for {option}, which cannot be set: {decides} decides it"
            )


def _words(name: str, value: Any, negatable: bool) -> list[str]:
    flag = "--" + name.replace("_", "-")
    match value:
        case None:
            return []
        case True:
            return [flag]
        case False:
            return ["--no-" + name.replace("_", "-")] if negatable else []
        case str() | int() | float():
            return [f"{flag}={value}"]
        case list() | tuple():
            words = [json.dumps(item) if isinstance(item, dict) else str(item) for item in value]
            if any(word.startswith("--") for word in words):
                raise ValueError(
                    f"{FIELD}.{name} has an item that begins with --, which would be another option: {value}"
                )
            return [flag, *words]
        case dict():
            return [f"{flag}={json.dumps(value)}"]
        case _:
            raise ValueError(
                f"{FIELD}.{name} is a {type(value).__name__}; it must be a string, number, boolean, list or mapping"
            )
