"""JSON schemas of tools and answers: references, and the types that a value may have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Any
"""A JSON schema: a mapping, or True for any value."""

_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
_CHOICES = ("anyOf", "oneOf", "allOf")
_NO_TEXT = re.compile(
    r"\s*(?:[-+]?[\d._]+(?:[eE][-+]?\d+)?|(?i:true|false)|null|None|[{\[].*)\s*", re.S
)
"""Texts that are read as a value of another type where the schema allows one."""
_LISTS = {"$ref", "enum", "const", *_CHOICES}
_TYPED = {"type", *_LISTS}


def resolved(root: Schema, reference: Any) -> Schema:
    """Return the schema at a reference, such as `#/$defs/Name`.

    Raises:
        KeyError: the reference is no place in this schema.
    """
    place, *parts = str(reference).split("/")
    found = root
    try:
        if place != "#":
            raise KeyError(reference)
        for part in parts:
            key = part.replace("~1", "/").replace("~0", "~")
            found = found[int(key) if isinstance(found, list) and key.isdecimal() else key]
    except (LookupError, TypeError) as error:
        raise KeyError(reference) from error
    return found


def _followed(left: list[Schema], root: Schema) -> Iterator[Mapping[str, Any] | None]:
    """Take schemas from the front of a list, each before what its reference leads to.

    None stands for a schema that allows any value, or that a reference does not lead to. The caller
    may put the alternatives of a schema at the front.
    """
    seen: set[str] = set()
    while left:
        part = left.pop(0)
        if not isinstance(part, Mapping):
            yield None
            continue
        if reference := str(part.get("$ref", "")):
            if reference in seen:
                continue
            seen.add(reference)
            try:
                left.insert(0, resolved(root, reference))
            except KeyError:
                yield None
                continue
        yield part


def types_of(schema: Schema, root: Schema) -> list[str]:
    """Return the types that a value may have, in the schema's order; none if it may have any.

    None also for a list of values in which a type says too little, such as "1" and 2.

    Args:
        schema: it may refer to others and list alternatives.
        root: the schema that references start from.
    """
    found: list[str] = []
    listed: list[Any] = []
    left = [schema]
    for part in _followed(left, root):
        if part is None:
            return []
        choices = next((part[key] for key in _CHOICES if isinstance(part.get(key), list)), None)
        if part.get("$ref"):
            pass
        elif isinstance(declared := part.get("type"), str):
            found.append(declared)
        elif isinstance(declared, list):
            found += [each for each in declared if isinstance(each, str)]
        elif isinstance(values := part.get("enum"), list):
            found += [_TYPES[type(each)] for each in values]
            listed += values
        elif "const" in part:
            found.append(_TYPES[type(part["const"])])
            listed.append(part["const"])
        elif choices is not None:
            typed = [each for each in choices if isinstance(each, Mapping) and each.keys() & _TYPED]
            if len(typed) < len(choices) and "allOf" not in part:
                return []
            left[:0] = typed
        else:
            return []
        found += ["null"] if part.get("nullable") is True else []
    texts = [each for each in listed if isinstance(each, str)]
    # A listed text would be read as a value of another listed type.
    if len(texts) < len(listed) and any(map(_NO_TEXT.fullmatch, texts)):
        return []
    return [*dict.fromkeys(found)]


def listed_values(schema: Schema, root: Schema) -> list[Any]:
    """Return the values that a schema lists; none if it lists none or allows any text besides.

    Args:
        schema: it may refer to others and list alternatives.
        root: the schema that references start from.
    """
    found: list[Any] = []
    left = [schema]
    for part in _followed(left, root):
        if part is None:
            return []
        choices = next((part[key] for key in _CHOICES if isinstance(part.get(key), list)), None)
        declared = part.get("type", "string")
        if part.get("$ref"):
            continue
        if isinstance(values := part.get("enum"), list):
            found += values
        elif "const" in part:
            found.append(part["const"])
        elif choices is not None:
            # All schemas of allOf apply: one that only names a type allows no further values.
            every = [each for each in choices if isinstance(each, Mapping) and each.keys() & _LISTS]
            left[:0] = every if "allOf" in part and every else choices
        elif "string" in (declared if isinstance(declared, list) else [declared]):
            return []
    return found
