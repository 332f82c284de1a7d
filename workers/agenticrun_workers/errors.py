"""Errors that callers handle, and their text."""

from __future__ import annotations


class InvalidConfig(Exception):
    """The run's YAML asks for something that cannot work. The run is not retried.

    `path` is the field, for example `spec.pipeline.envs[0].type`.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(path, message)
        self.path = path
        self.message = message

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class ScheduleEnded(Exception):
    """The learning rate has fallen to zero, so further steps would learn nothing."""


class RolloutFailed(Exception):
    """Rollout cannot continue. Another attempt may succeed."""


def utf8_text(text: str) -> str:
    """Return a text that can be written and sent: lone surrogates become backslash escapes.

    What user code raises may hold some: `json.loads` makes them, and names of files have them.
    """
    return text.encode(errors="backslashreplace").decode()
