"""`--set path=value`: changes of a run's YAML before it is validated.

Paths are as in error messages, relative to `spec`: `pipeline.envs[0].maxSteps`, or
`spec.pipeline.envs.0.maxSteps`. Values are YAML: `4`, `0.5`, `true`, `[1, 4]`, `{name: gigpo}`, or
`null` to remove an optional field.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from agenticrun_api.base import camel
from agenticrun_api.load import InvalidRun, parse_run, read_run
from agenticrun_api.run import AgenticRun
from agenticrun_api.yaml_text import EqualKeys, InvalidYaml, read_yaml

_SEGMENT = re.compile(r"([^.\[\]]+)((?:\[\d+\])*)")

Key = str | int


def load_run_with(path: Path, changes: Iterable[str], *, local: bool = False) -> AgenticRun:
    """Load the AgenticRun in a YAML file, apply the `path=value` changes and validate the result.

    Args:
        path: the file.
        changes: the changes.
        local: True for a run on this machine; see `parse_run`.

    Raises:
        InvalidRun: a change cannot be applied, or the result is invalid.
    """
    return parse_run(with_overrides(read_run(path), changes), local=local)


def with_overrides(document: dict[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a run's document with the `path=value` changes applied in order.

    Missing mappings on a path are created.

    Raises:
        InvalidRun: a change cannot be applied. One line per change, which begins with its path.
    """
    # The caller's document stays as the file has it.
    changed = copy.deepcopy(document)
    errors = []
    for change in changes:
        try:
            _apply(changed, change)
        except ValueError as error:
            errors.append(str(error))
    # All of them, so that one attempt shows every mistake.
    if errors:
        raise InvalidRun(errors)
    return changed


def _apply(document: dict[str, Any], change: str) -> None:
    text, equals, value = change.partition("=")
    keys = _keys(text.strip())
    if not equals:
        raise ValueError(f"{_shown(keys)}: write --set {text}=VALUE")
    node: Any = document
    # By place, because messages show the path up to there.
    for place in range(len(keys) - 1):
        node = _child(node, keys, place, empty_for=keys[place + 1])
        if not isinstance(node, dict | list):
            raise ValueError(
                f"{_shown(keys[: place + 1])}: is {node!r}, which has no {keys[place + 1]!r}"
            )
    try:
        parsed = read_yaml(value)
    except EqualKeys as error:
        raise ValueError(f"{_shown(keys)}: {value!r} sets {error.key} twice") from error
    except InvalidYaml as error:
        raise ValueError(f"{_shown(keys)}: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{_shown(keys)}: {value!r} is not YAML: {error}") from error
    node[_key_in(node, keys, len(keys) - 1)] = parsed


def _child(node: Any, keys: list[Key], place: int, empty_for: Key) -> Any:
    key = _key_in(node, keys, place)
    # An empty key of a YAML file is null, and may be filled as well.
    if isinstance(node, dict) and node.get(key) is None:
        node[key] = [] if isinstance(empty_for, int) else {}
    return node[key]


def _key_in(node: Any, keys: list[Key], place: int) -> Key:
    """Return the key of a path element in `node`.

    This is the index in a list, or a mapping's key as the file spells it (camelCase or snake_case).
    """
    key = keys[place]
    if isinstance(node, list):
        if not str(key).isdigit():
            raise ValueError(
                f"{_shown(keys[:place])}: is a list: "
                f"write {_shown(keys[:place])}[0] for its first entry"
            )
        if int(key) >= len(node):
            raise ValueError(f"{_shown(keys[: place + 1])}: the list has {len(node)} entries")
        return int(key)
    if isinstance(key, int):
        raise ValueError(f"{_shown(keys[:place])}: is not a list, so it has no entry {key}")
    # As the file spells it: a second spelling would make two keys of one field.
    return next((known for known in node if camel(known) == camel(key)), key)


def _keys(path: str) -> list[Key]:
    """Split a path: `pipeline.envs[0].maxSteps` -> spec, pipeline, envs, 0, maxSteps."""
    keys: list[Key] = []
    for segment in path.split("."):
        match = _SEGMENT.fullmatch(segment)
        if match is None:
            raise ValueError(f"{path}: is not a path of fields such as pipeline.envs[0].maxSteps")
        keys.append(match[1])
        keys += [int(index) for index in re.findall(r"\d+", match[2])]
    # Nearly all changes are about the spec, so its name may be left out.
    return keys if keys[0] in ("spec", "metadata") else ["spec", *keys]


def _shown(keys: list[Key]) -> str:
    """Return a path as in error messages: `spec.pipeline.envs[0].maxSteps`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(
        "."
    )
