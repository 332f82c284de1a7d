"""Loads an AgenticRun from YAML. Errors name the field."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from agenticrun_api.names import KIND
from agenticrun_api.run import AgenticRun

M = TypeVar("M", bound=BaseModel)


class InvalidRun(Exception):
    """The run is invalid. `errors` has one line per problem, which begins with the field's path."""

    def __init__(self, errors: Iterable[str]):
        self.errors = tuple(errors)
        super().__init__("\n".join(self.errors))


def load_run(path: Path) -> AgenticRun:
    """Load the AgenticRun in a YAML file; ignore other documents. Raises `InvalidRun`."""
    return parse_run(read_run(path))


def read_run(path: Path) -> dict[str, Any]:
    """Return the only AgenticRun document in a YAML file, not validated. Raises `InvalidRun`."""
    try:
        documents = [doc for doc in yaml.safe_load_all(path.read_text()) if isinstance(doc, dict)]
    except yaml.YAMLError as error:
        raise InvalidRun([f"{path}: not YAML: {error}"]) from error
    runs = [doc for doc in documents if doc.get("kind") == KIND]
    if len(runs) != 1:
        raise InvalidRun([f"{path}: expected one document of kind {KIND}, found {len(runs)}"])
    document: dict[str, Any] = runs[0]
    return document


def parse_run(document: dict[str, Any]) -> AgenticRun:
    """Validate an object like the apiserver, without transition rules. Raises `InvalidRun`."""
    return parse(AgenticRun, document)


def parse(model: type[M], document: Any) -> M:
    """Validate `document` as `model`. Raises `InvalidRun`."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise InvalidRun(_line(detail) for detail in error.errors(include_url=False)) from error


def _line(detail: ErrorDetails) -> str:
    path = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"]
    ).lstrip(".")
    path += str(detail.get("ctx", {}).get("path", "")) if detail["type"] == "rule" else ""
    message = "unknown field" if detail["type"] == "extra_forbidden" else detail["msg"]
    given = detail.get("input")
    shown = (
        ""
        if detail["type"] in ("missing", "rule", "extra_forbidden")
        or isinstance(given, dict | list)
        else f" (got {given!r})"
    )
    return f"{path}: {message}{shown}"
