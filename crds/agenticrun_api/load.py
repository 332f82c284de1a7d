"""Loads an AgenticRun from YAML. Errors name the field."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from agenticrun_api.base import LOCAL, SERVED
from agenticrun_api.names import ANNOTATION_VERSION, KIND, submission_id
from agenticrun_api.run import AgenticRun
from agenticrun_api.status import AgenticRunStatus
from agenticrun_api.version import __version__
from agenticrun_api.yaml_text import InvalidYaml, read_yaml_documents

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
        found = read_yaml_documents(path.read_text(encoding="utf-8"))
    except InvalidYaml as error:
        raise InvalidRun([f"{path}: {error}"]) from error
    except yaml.YAMLError as error:
        raise InvalidRun([f"{path}: not YAML: {error}"]) from error
    except UnicodeDecodeError as error:
        raise InvalidRun([f"{path}: not UTF-8 text, write it as such: {error}"]) from error
    # The file may hold Secrets and ConfigMaps, too.
    runs = [doc for doc in found if isinstance(doc, dict) and doc.get("kind") == KIND]
    if len(runs) != 1:
        raise InvalidRun([f"{path}: expected one document of kind {KIND}, found {len(runs)}"])
    document: dict[str, Any] = runs[0]
    return document


def parse_run(document: dict[str, Any], *, local: bool = False) -> AgenticRun:
    """Validate an object like the apiserver, without transition rules.

    Args:
        document: the object.
        local: True for a run on this machine: rules about pods do not hold.

    Raises:
        InvalidRun: the object is invalid.
    """
    return parse(AgenticRun, document, context=LOCAL if local else None)


def parse_mounted(document: dict[str, Any]) -> AgenticRun:
    """Validate the run that the operator mounts in the pods (`AgenticRun.document`).

    Strict about unknown fields, because the user set them: without them, another run would be
    trained than the one asked for.

    Raises:
        InvalidRun: a field is invalid, or unknown to this version.
    """
    try:
        return AgenticRun.model_validate(document, context=SERVED)
    except ValidationError as error:
        details = error.errors(include_url=False)
    theirs = document.get("metadata", {}).get("annotations", {}).get(ANNOTATION_VERSION, "unknown")
    hint = (
        f": the worker image has AgenticRun {__version__}, the operator {theirs}; leave spec.image "
        "out or set a newer one, or leave the field out"
    )
    # Only for unknown fields: other errors do not depend on the version.
    raise InvalidRun(
        _line(detail) + (hint if detail["type"] == "extra_forbidden" else "") for detail in details
    )


def parse_served(document: dict[str, Any]) -> AgenticRun:
    """Validate a run that the apiserver serves.

    Strict with people (`parse_run`), tolerant between versions: fields that this version does not
    know are ignored, because a newer CRD serves its new fields with their defaults to everyone,
    and what only this version refuses (`Rule.added`) is accepted.
    The status is input, too: what is invalid in it is dropped, except fields that decide what
    happens next. An attempt and a submission id that contradict each other are made to agree.

    Raises:
        InvalidRun: a field of the spec that this version knows is invalid, or a control field of
            the status (`CONTROL_FIELDS`).
    """
    document = _with_consistent_job(document)
    try:
        return AgenticRun.model_validate(document, extra="ignore", context=SERVED)
    except ValidationError:
        # Fields that decide what happens next: the operator must not act on a guess.
        if damaged := damaged_control_fields(document.get("status")):
            raise InvalidRun(damaged) from None
    # Whatever is only shown may be lost, so that the run continues.
    status = repair_status(document.get("status"))
    try:
        return AgenticRun.model_validate(
            {**document, "status": status}, extra="ignore", context=SERVED
        )
    except ValidationError as error:
        raise InvalidRun(_line(detail) for detail in error.errors(include_url=False)) from error


def _with_consistent_job(document: dict[str, Any]) -> dict[str, Any]:
    """Return the run with status.job.attempt and submissionId that name the same attempt.

    Each of them follows from the other. Someone may have edited one. The submission id counts if it
    can be one of this run, because Ray knows the job by it.
    """
    metadata, status = document.get("metadata") or {}, document.get("status")
    job = status.get("job") if isinstance(status, dict) else None
    name, uid = metadata.get("name"), metadata.get("uid")
    if not (isinstance(status, dict) and isinstance(job, dict) and name and uid):
        return document
    attempt, stored_id = job.get("attempt"), job.get("submissionId")
    prefix = submission_id(name, uid, "")
    if re.fullmatch(f"{re.escape(prefix)}[1-9][0-9]{{0,8}}", str(stored_id)):
        attempt = int(str(stored_id).removeprefix(prefix))
    elif isinstance(attempt, int) and attempt >= 1:
        stored_id = f"{prefix}{attempt}"
    job = {**job, "attempt": attempt, "submissionId": stored_id}
    return {**document, "status": {**status, "job": job}}


CONTROL_FIELDS = frozenset({"phase", "job", "nextRetryTime"})
"""Fields of the status without which an attempt could be started twice."""


def damaged_control_fields(status: Any) -> list[str]:
    """Return a line for each control field of a status that is invalid."""
    try:
        AgenticRunStatus.model_validate(status or {}, extra="ignore")
    except ValidationError as error:
        return [
            f"status.{_line(detail)}"
            for detail in error.errors(include_url=False)
            if detail["loc"][:1] and detail["loc"][0] in CONTROL_FIELDS
        ]
    return []


def repair_status(document: Any) -> AgenticRunStatus:
    """Validate a status without what is unknown or invalid in it.

    An invalid field is dropped, and so is an object or a list item that lacks a field.
    """
    given = document = document if isinstance(document, dict) else {}
    while True:
        try:
            return AgenticRunStatus.model_validate(document, extra="ignore")
        except ValidationError as error:
            paths = {
                detail["loc"][: -1 if detail["type"] == "missing" else None]
                for detail in error.errors(include_url=False)
            }
        if document is given:
            document = copy.deepcopy(given)
        # In reverse order: children before parents, and list items from the end.
        in_order = sorted(
            paths,
            key=lambda path: [f"{part:09}" if isinstance(part, int) else part for part in path],
        )
        for *way, last in reversed(in_order):
            place: Any = document
            for part in way:
                place = place[part]
            del place[last]


def parse(model: type[M], document: Any, context: dict[str, Any] | None = None) -> M:
    """Validate `document` as `model`. Raises `InvalidRun`."""
    try:
        return model.model_validate(document, context=context)
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
