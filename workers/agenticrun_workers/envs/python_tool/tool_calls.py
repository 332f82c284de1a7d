"""Parse answers: a call of the Python tool, a final answer, or neither."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from agenticrun_workers.plugins import compile_pattern, last_group

CODE_BLOCK = re.compile(r"```(?:python|py)\s*\n(.*?)```", re.DOTALL | re.IGNORECASE)
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

PYTHON_NAMES = ("python", "python_code", "code_interpreter")
"""Names of the tool in JSON calls."""


@dataclass(frozen=True, slots=True)
class Call:
    """Code to run."""

    code: str


@dataclass(frozen=True, slots=True)
class BadCall:
    """A malformed call; the message says why."""

    message: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The final answer."""

    text: str


class CallParser:
    """Finds the first call or answer in a text and ignores the rest.

    Args:
        call_pattern: regular expression with the code as its last group. None: ```python blocks,
            and Hermes' <tool_call> JSON with the name python and the argument code.
        answer_pattern: regular expression with the final answer as its last group.

    Raises:
        ValueError: a pattern is not a regular expression.
    """

    def __init__(self, call_pattern: str | None, answer_pattern: str) -> None:
        self._own_call = (
            None if call_pattern is None else compile_pattern("callPattern", call_pattern)
        )
        self._answer = compile_pattern("answerPattern", answer_pattern)

    def parse(self, text: str) -> Call | BadCall | Answer | None:
        """Return the earliest call or answer; None if there is neither."""
        found: list[tuple[int, Call | BadCall | Answer]] = []
        if match := self._answer.search(text):
            found.append((match.start(), Answer(last_group(match).strip())))
        if self._own_call is not None:
            if match := self._own_call.search(text):
                found.append((match.start(), Call(last_group(match))))
        else:
            if match := CODE_BLOCK.search(text):
                found.append((match.start(), Call(match[1])))
            if match := TOOL_CALL.search(text):
                found.append((match.start(), json_call(match[1])))
        return min(found, key=lambda entry: entry[0])[1] if found else None


def json_call(text: str) -> Call | BadCall:
    """Return the code of `{"name": "python", "arguments": {"code": "..."}}`.

    The arguments may be a JSON string of their own.
    """
    try:
        call: Any = json.loads(text)
        arguments = call["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        name, code = call["name"], arguments["code"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return BadCall(
            f'a tool call is {{"name": "python", "arguments": {{"code": "..."}}}}, '
            f"this one is not: {type(error).__name__}: {error}"
        )
    if name not in PYTHON_NAMES:
        return BadCall(f"there is no tool called {name!r}, only python")
    return Call(code) if isinstance(code, str) else BadCall("the argument code must be text")


def same_answer(one: str, other: str) -> bool:
    """Compare two answers as numbers (4, 4.0, 8/2, 1,000), or as texts without case and spaces."""
    first, second = _number(one), _number(other)
    if first is not None and second is not None:
        return first == second
    return _folded(one) == _folded(other)


def shortened(text: str, characters: int) -> str:
    """Return the beginning and the end of a text that is too long."""
    if len(text) <= characters:
        return text
    head = characters // 2
    tail = text[len(text) - (characters - head) :]
    return f"{text[:head]}\n... {len(text) - characters} characters left out ...\n{tail}"


def _number(text: str) -> Fraction | None:
    """Return the number that a text states; longer texts are not numbers."""
    plain = re.sub(r"[\s$,]", "", text)
    if not re.fullmatch(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40}|\d{1,40}/\d{1,40})", plain):
        return None
    try:
        return Fraction(plain)
    except ZeroDivisionError:
        return None


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())
