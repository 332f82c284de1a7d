"""Errors that callers handle."""

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


class CannotStart(Exception):
    """The run cannot start on this machine now. The message says why, and what to do."""


class ScheduleEnded(Exception):
    """The learning rate has fallen to zero, so further steps would learn nothing."""


class RolloutFailed(Exception):
    """Rollout cannot continue. Another attempt may succeed."""
