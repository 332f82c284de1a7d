"""Problems that the policy may solve with Python: it calls, reads the result, and answers.

An episode is a question, any number of calls, each followed by its result as the next observation,
and a final answer. Results are observations like any other, so none of their tokens is trained on.
`CallParser` tells a call from a final answer and from text that is neither.
"""

from __future__ import annotations

import itertools
import json
import operator
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from agenticrun_workers.envs.env import StepResult, register_env
from agenticrun_workers.envs.grid import in_holdout
from agenticrun_workers.plugins import compile_pattern, last_group
from agenticrun_workers.sandbox import (
    Limits,
    SandboxMode,
    SandboxUnavailable,
    describe,
    run_python,
)
from agenticrun_workers.types import Stream

INSTRUCTION = (
    "Solve the problem. You may run Python: write a block that begins with ```python and ends with "
    "```, and you are told what it "
    "prints. When you know the answer, write <answer>...</answer>."
)
ANSWER_PATTERN = r"<answer>(.*?)</answer>"
NEITHER = "Write a ```python block to run code, or <answer>...</answer> to answer."
NEITHER_OF_OWN = "This has neither a call nor an answer."
"""With patterns of the run, which the instruction explains."""

LARGEST_WORD = 999
"""Numbers above are several words for a tiny model."""

ENDS = {
    "time": "it took more than {seconds} s",
    "output": "it wrote too much",
    "files": "it wrote too many files",
    "killed": "it crashed",
}
"""Messages about code that was ended."""


@register_env("python_tool")
class PythonTool:
    """An environment that plays one episode at a time.

    The question is an item of the data set, or without one a sum that the environment makes.

    Args:
        question, answer: the item's columns.
        highest: largest number of the environment's own sums.
        call_pattern, answer_pattern: see `CallParser`.
        seconds, memory_mb, output_bytes, scratch_mb: limits of one call; see `Limits`.
        result_characters: shown of what a call wrote; the middle of more is left out.
        sandbox: `required` (no run on machines that cannot contain code) or `best-effort`; see
            `agenticrun_workers.sandbox`.
        instruction: text of the first prompt; the default explains the task.

    Metrics: success, tool_calls, tool_errors (calls that failed or were malformed), and the usual
    ones.
    """

    def __init__(
        self,
        *,
        question: str = "question",
        answer: str = "answer",
        highest: int = 20,
        call_pattern: str | None = None,
        answer_pattern: str = ANSWER_PATTERN,
        seconds: float = 10.0,
        memory_mb: int = 512,
        output_bytes: int = 64 * 1024,
        scratch_mb: int = 16,
        result_characters: int = 2000,
        sandbox: SandboxMode = "required",
        instruction: str = INSTRUCTION,
    ) -> None:
        if sandbox not in ("required", "best-effort"):
            raise ValueError(f"sandbox must be required or best-effort, not {sandbox!r}")
        for key, number in (("highest", highest), ("resultCharacters", result_characters)):
            if number < 1:
                raise ValueError(f"{key} must be at least 1, not {number}")
        self._limits = Limits(seconds, memory_mb, output_bytes, scratch_mb)
        self._parser = CallParser(call_pattern, answer_pattern)
        usual = call_pattern is None and answer_pattern == ANSWER_PATTERN
        self._neither = NEITHER if usual else NEITHER_OF_OWN
        self._columns = question, answer
        self._highest = highest
        self._result_characters = result_characters
        self._mode: SandboxMode = sandbox
        if sandbox == "required":
            _check_sandbox()
        self.instruction = instruction
        self._item: tuple[str, str] | None = None
        self._question = self._answer = ""
        self._result = ""

    def set_item(self, item: Mapping[str, Any]) -> None:
        """Set the problem of the next episode."""
        missing = [column for column in self._columns if column not in item]
        if missing:
            raise ValueError(
                f"the data set has no column {' and no '.join(missing)} (it has: {', '.join(item)})"
            )
        self._item = str(item[self._columns[0]]), str(item[self._columns[1]])

    def reset(self, seed: int, split: Stream) -> str:
        """Begin with the item, or with a sum of this seed."""
        self._question, self._answer = self._item or problem(seed, split, self._highest)
        self._result = ""
        return self._question

    def step(self, action: str) -> StepResult:
        """Run a call, or judge the answer; see `StepResult`. Only an answer ends the episode."""
        asked = self._parser.parse(action)
        if isinstance(asked, Answer):
            right = same_answer(asked.text, self._answer)
            return StepResult("", float(right), True, metrics=_metrics(success=right))
        if isinstance(asked, Call):
            outcome = run_python(asked.code, self._limits, self._mode)
            texts = [outcome.stdout.rstrip(), outcome.stderr.rstrip()]
            if outcome.end in ENDS:
                why = ENDS[outcome.end].format(seconds=self._limits.seconds)
                texts.append(f"The code was stopped: {why}.")
            self._result = shortened(
                "\n".join(filter(None, texts)) or "(no output)", self._result_characters
            )
            metrics = _metrics(calls=1, errors=outcome.end != "finished")
            return StepResult(self._result, 0.0, False, metrics=metrics, info={"outcome": outcome})
        bad = isinstance(asked, BadCall)
        message = asked.message if isinstance(asked, BadCall) else self._neither
        return StepResult(message, 0.0, False, metrics=_metrics(valid=False, errors=bad))

    def valid_actions(self) -> list[str]:
        """Return some of them: calculations with two numbers of the question, and answers.

        These are the numbers of the newest result, and before any result those of the question.
        """
        numbers = list(dict.fromkeys(re.findall(r"\d+", self._question)))
        results = re.findall(r"-?\d+", self._result)
        pairs = (
            itertools.combinations(numbers, 2)
            if len(numbers) > 1
            else [(numbers[0],) * 2]
            if numbers
            else []
        )
        calls = [
            f"```python\n{left} {sign} {right}\n```" for left, right in pairs for sign in OPERATIONS
        ]
        return [
            *calls,
            *(
                f"<answer>{number}</answer>"
                for number in dict.fromkeys(results or numbers or ["0"])
            ),
        ]

    def vocabulary(self) -> list[str]:
        """Return printable characters, pieces of calls and answers, and the numbers of sums."""
        numbers = map(str, range(min(self._highest**2, LARGEST_WORD) + 1))
        return [
            *string.printable,
            "```python\n",
            "\n```",
            "<answer>",
            "</answer>",
            *(f" {sign} " for sign in OPERATIONS),
            *numbers,
        ]


@cache
def _check_sandbox() -> None:
    """Raise `ValueError` where code cannot be contained, before a run and not in each episode."""
    try:
        run_python("")
    except SandboxUnavailable as error:
        raise ValueError(f"sandbox: {error}; here are: {dict(describe())}") from error


def _metrics(
    valid: bool = True, success: bool = False, calls: int = 0, errors: bool = False
) -> dict[str, float]:
    return {
        "action_is_valid": float(valid),
        "num_actions": 1.0,
        "tool_calls": float(calls),
        "tool_errors": float(errors),
        "success": float(success),
    }


OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
HOLDOUT_SHARE = 0.2


def problem(seed: int, split: Stream, highest: int) -> tuple[str, str]:
    """Return question and answer about two numbers from 0 to `highest`.

    A hash of the question decides which split it belongs to.
    """
    # New pairs are drawn until one belongs to the split.
    rng = np.random.default_rng(seed)
    while True:
        sign = str(rng.choice(list(OPERATIONS)))
        left, right = (int(number) for number in rng.integers(0, highest + 1, 2))
        question = f"{left} {sign} {right}"
        if is_holdout(question) == (split is Stream.VALIDATION):
            return question, str(OPERATIONS[sign](left, right))


def is_holdout(question: str) -> bool:
    """Return whether a question belongs to validation, the same on every machine."""
    return in_holdout(f"sums:{question}".encode(), HOLDOUT_SHARE)


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
        # The first of them counts: what a model writes after a call is a guess about its result.
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
