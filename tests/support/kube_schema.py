"""The apiserver's checks of a structural schema, for statuses that a test has built.

The rules are those of k8s.io/kube-openapi: a date-time is a regular expression and then a parse, an
integer is an int64, and maxLength counts characters, not bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from typing import Any

from agenticrun_api.crd import custom_resource_definition

_DATE_TIME = re.compile(
    r"[0-9]{4}-(0[1-9]|1[012])-([012][0-9]|3[01])"
    r"[Tt]([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([Zz]|[+-][0-9]{2}:[0-9]{2})"
)
_TYPES = {"string": str, "boolean": bool, "array": list, "object": dict}


@cache
def status_schema() -> dict[str, Any]:
    """Return the schema of the status in the CRD."""
    (version,) = custom_resource_definition()["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["status"]
    return schema


def violations(schema: dict[str, Any], value: Any, path: str = "status") -> list[str]:
    """Return a line for each place where the apiserver would refuse the value.

    Args:
        schema: a structural schema, a part of the CRD.
        value: JSON.
        path: of the value, for the lines.
    """
    return list(_violations(schema, value, path))


def _violations(schema: dict[str, Any], value: Any, path: str) -> Iterator[str]:
    kind = schema["type"]
    if not _is_of(kind, value):
        yield f"{path}: {value!r} is not of type {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is not one of {schema['enum']}"
    if kind == "string":
        yield from _text_violations(schema, value, path)
    elif kind in ("integer", "number"):
        if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            yield f"{path}: {value} is out of bounds"
    elif kind == "array":
        yield from _list_violations(schema, value, path)
    elif kind == "object":
        yield from _object_violations(schema, value, path)


def _list_violations(schema: dict[str, Any], items: list[Any], path: str) -> Iterator[str]:
    if len(items) > schema.get("maxItems", len(items)):
        yield f"{path}: too many items"
    keys = schema.get("x-kubernetes-list-map-keys")
    found = [tuple(item[key] for key in keys) for item in items] if keys else []
    if len(set(found)) < len(found):
        yield f"{path}: duplicate items"
    for index, item in enumerate(items):
        yield from _violations(schema["items"], item, f"{path}[{index}]")


def _object_violations(schema: dict[str, Any], given: dict[str, Any], path: str) -> Iterator[str]:
    declared, others = schema.get("properties", {}), schema.get("additionalProperties")
    if len(given) > schema.get("maxProperties", len(given)):
        yield f"{path}: too many fields"
    for name in schema.get("required", ()):
        if name not in given:
            yield f"{path}.{name}: required"
    for name, inner in given.items():
        if below := declared.get(name, others):
            yield from _violations(below, inner, f"{path}.{name}")
        else:
            yield f"{path}.{name}: unknown field"


def _is_of(kind: str, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "integer":
        return number and isinstance(value, int) and -(2**63) <= value < 2**63
    return number if kind == "number" else isinstance(value, _TYPES[kind])


def _text_violations(schema: dict[str, Any], text: str, path: str) -> Iterator[str]:
    try:
        text.encode()
    except UnicodeEncodeError:
        yield f"{path}: a lone surrogate"
    if len(text) > schema.get("maxLength", len(text)):
        yield f"{path}: longer than {schema['maxLength']} characters"
    if len(text) < schema.get("minLength", 0):
        yield f"{path}: too short"
    if schema.get("format") == "date-time" and not _is_date_time(text):
        yield f"{path}: {text!r} is not of type date-time"


def _is_date_time(text: str) -> bool:
    if not _DATE_TIME.fullmatch(text):
        return False
    try:
        datetime.fromisoformat(text.upper())
    except ValueError:
        return False
    return True
