"""Checks of what environments return: text that a policy can read, and finite numbers.

Anything else is an `EnvFault`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np

from agenticrun_workers.envs.env import EnvFault, MetricMode, StepResult
from agenticrun_workers.types import StopReason

MAX_TEXT = 1_048_576
"""Maximum number of characters in one observation.

That is more than a quarter of a million tokens, so more than any context holds; tokenising 10 MB
would block all episodes of an env worker for seconds.
"""

MODES = frozenset(get_args(MetricMode))

LARGEST = float(np.finfo(np.float32).max)
"""Largest reward or metric: they are stored as float32."""


@dataclass(frozen=True, slots=True)
class Start:
    """The beginning of an episode."""

    observation: str
    instruction: str
    """The task: the environment's instruction, or this episode's own."""
    info: Mapping[str, Any] = field(default_factory=dict)


def checked_start(answer: object, instruction: object) -> Start:
    """Check what `reset` returned; `instruction` is the environment's own. Raises `EnvFault`."""
    observation, info = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
    if not isinstance(info, Mapping):
        raise _fault(f"reset returned an info of {type(info).__name__}, not a mapping")
    told = _text(info.get("env_instruction", instruction), "the instruction is")
    return Start(_text(observation, "reset returned"), told, info)


def checked_step(answer: object) -> StepResult:
    """Check what `step` returned: a `StepResult`, or gymnasium's tuple of five.

    The reward becomes a float. Raises `EnvFault`.
    """
    result = _of_tuple(answer) if isinstance(answer, tuple) and len(answer) == 5 else answer
    if not isinstance(result, StepResult):
        raise _fault(
            f"step returned {type(answer).__name__}, neither a StepResult nor a tuple of five"
        )
    _text(result.observation, "step returned an observation of")
    if not isinstance(result.info, Mapping):
        raise _fault(f"step returned an info of {type(result.info).__name__}, not a mapping")
    _check_metrics(result.metrics, result.modes)
    return replace(
        result,
        reward=_number(result.reward, "step returned the reward"),
        terminated=_flag(result.terminated, "terminated"),
        truncated=_flag(result.truncated, "truncated"),
    )


def checked_actions(answer: object) -> list[str]:
    """Check what `valid_actions` returned; empty if they cannot be listed. Raises `EnvFault`."""
    if (
        isinstance(answer, str)
        or not isinstance(answer, (list, tuple))
        or not all(isinstance(action, str) for action in answer)
    ):
        raise _fault("valid_actions did not return a list of strings")
    return list(answer)


def _of_tuple(answer: tuple[Any, Any, Any, Any, Any]) -> StepResult:
    observation, reward, terminated, truncated, info = answer
    if not isinstance(info, Mapping):
        raise _fault(f"step returned an info of {type(info).__name__}, not a mapping")
    return StepResult(
        observation,
        reward,
        terminated,
        truncated,
        info.get("metrics", {}),
        info.get("metrics_agg_mode", {}),
        info,
    )


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise _fault(f"{what} {type(value).__name__}, not text")
    if len(value) > MAX_TEXT:
        raise _fault(f"{what} {len(value):,} characters; {MAX_TEXT:,} are allowed")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _fault(f"{what} text that is not valid unicode: {error.reason}") from None
    return value


def _number(value: object, what: str) -> float:
    try:
        number = float("x" if isinstance(value, (str, bytes)) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise _fault(f"{what} {_shortly(value)}, which is not a number") from None
    if not abs(number) <= LARGEST:
        raise _fault(f"{what} {number}")
    return number


def _shortly(value: object) -> str:
    return (
        repr(value[:40]) if isinstance(value, (str, bytes)) else f"of type {type(value).__name__}"
    )


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise _fault(f"step returned {name} of {type(value).__name__}, not True or False")
    return bool(value)


def _check_metrics(metrics: object, modes: object) -> None:
    for part, name in ((metrics, "metrics"), (modes, "modes of metrics")):
        if not isinstance(part, Mapping) or not all(isinstance(key, str) for key in part):
            raise _fault(f"step returned {name} that are not a mapping from names")
    assert isinstance(metrics, Mapping)
    assert isinstance(modes, Mapping)
    for name, value in metrics.items():
        _number(value, f"step returned the metric {name} =")
    for name, mode in modes.items():
        if mode not in MODES:
            raise _fault(
                f"step returned the mode {mode!r} of the metric {name}; known are "
                f"{', '.join(sorted(MODES))}"
            )


def _fault(message: str) -> EnvFault:
    return EnvFault(StopReason.ENV_ERROR, message)
