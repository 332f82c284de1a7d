"""What an environment does wrong, as one line for people."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agenticrun_workers.types import StopReason

MAX_MESSAGE = 500
"""Characters. The message travels to the driver and into the run's status."""


class EnvFault(Exception):
    """An environment raised, hung, or returned something that is no step. It costs the episode; `reason` is env_error or timeout."""

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def raised(error: BaseException, call: Callable[..., Any]) -> EnvFault:
    """What `call` raised, and in which line of the environment's own file. An `EnvFault` stays as it is."""
    if isinstance(error, EnvFault):
        return error
    fault = EnvFault(StopReason.ENV_ERROR, f"{one_line(error)}{_place(error, call)}")
    fault.__cause__ = error
    return fault


def one_line(error: BaseException) -> str:
    """Its type and text, at most `MAX_MESSAGE` characters of it."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # a user's __str__ may raise anything
        text = "(it has no text)"
    return f"{type(error).__name__}: {text if len(text) <= MAX_MESSAGE else f'{text[:MAX_MESSAGE]} ...'}"


def _place(error: BaseException, call: Callable[..., Any]) -> str:
    """The innermost line in the file of `call`, else the innermost one of all."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first one is where it was caught
    code = getattr(inspect.unwrap(call), "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    where = (own or frames)[-1:]
    return "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in where)
