"""The operator's log: as text, or as one JSON object in each line.

Every record that is written while a run is reconciled has the run's namespace and name, and the
number of its attempt, without the caller passing them on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

_subject: ContextVar[dict[str, Any] | None] = ContextVar("subject", default=None)


class LogFormat(StrEnum):
    """The form of a line of the log."""

    TEXT = "text"
    JSON = "json"


@contextmanager
def about_run(namespace: str, name: str) -> Iterator[None]:
    """Add the run to the records that are written inside the block."""
    token = _subject.set({"namespace": namespace, "run": name})
    try:
        yield
    finally:
        _subject.reset(token)


def note_attempt(attempt: int) -> None:
    """Add the number of the attempt to the records about the present run."""
    subject = _subject.get()
    if subject is not None:
        subject["attempt"] = attempt


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: time, level, logger, message, run, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **(_subject.get() or {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str, form: LogFormat) -> None:
    """Write records of this level and above to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter()
        if form is LogFormat.JSON
        else logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in ("kopf", "aiohttp.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
