"""Calls of tools as text, for environments that offer tools by name and JSON schema.

The instruction lists the tools and the format of a call, so that any model can use them: a call is
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)

FORMAT = (
    "You may call these tools, one per answer:\n{tools}\n"
    'Write a call as <tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>; '
    "its result is the next message."
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the policy may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed call of a tool that exists."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Invalid:
    """An answer that holds no action; `reason` is written for the policy."""

    reason: str


class ToolBox:
    """The tools of an environment.

    Args:
        tools: in the order of the instruction.
    """

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}

    @property
    def names(self) -> list[str]:
        """Names of the tools."""
        return list(self._tools)

    def question(self) -> str:
        """Return the tools and the format of a call, for the instruction."""
        return FORMAT.format(
            tools="\n".join(
                as_json(
                    {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.parameters,
                    }
                )
                for tool in self._tools.values()
            )
        )

    def parse(self, text: str) -> ToolCall | Invalid | None:
        """Return the first call in an answer; None if there is none."""
        match = TOOL_CALL.search(text)
        if match is None:
            return None
        call = parse_json(match[1])
        if isinstance(call, Invalid):
            return Invalid(f"The tool call is not JSON: {call.reason}")
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str):
            return Invalid('A tool call is {"name": "...", "arguments": {...}}.')
        if name not in self._tools:
            return Invalid(f"There is no tool {name!r}, only {', '.join(self._tools)}.")
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):
            arguments = parse_json(arguments)
        if not isinstance(arguments, dict):
            return Invalid(f"The arguments of {name} are not a JSON object.")
        return ToolCall(name, arguments)


def parse_json(text: str) -> Any:
    """Return the JSON value that a text is, or that its first code block or object is.

    Numbers that JSON does not have (NaN, 1e999) and texts that cannot be encoded (a lone surrogate)
    are refused: a server would fail on them.

    Returns:
        The value, or `Invalid`.
    """
    plain = text.strip()
    if fence := re.search(r"```(?:json)?\s*\n(.*?)```", plain, re.DOTALL):
        plain = fence[1].strip()
    elif not plain.startswith(("{", "[", '"')) and "{" in plain:
        plain = plain[plain.index("{") :]
    try:
        value, _ = json.JSONDecoder().raw_decode(plain)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return Invalid(str(error) or type(error).__name__)
    return value


def as_json(value: Any) -> str:
    """Return a value as JSON on one line; what JSON does not have becomes text."""
    return json.dumps(value, ensure_ascii=False, default=_plain)


def as_text(value: Any) -> str:
    """Return a text unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else as_json(value)


def _plain(value: Any) -> Any:
    """Return what JSON can hold of an array or another object."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
