"""Tool calls in the text of an answer."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from agenticrun_workers.agents.outside.messages import ChatMessage, ToolCall
from agenticrun_workers.plugins import last_group

HERMES = r"<tool_call>\s*(.*?)\s*</tool_call>"
"""How Hermes, Qwen and many others call tools: JSON with `name` and `arguments` between two marks."""


def answer_message(text: str, pattern: re.Pattern[str]) -> tuple[ChatMessage, bool]:
    """The answer with its tool calls, and whether all of them could be read.

    The last group of the pattern is the call. A call that cannot be read stays part of the text.
    """
    calls: list[ToolCall] = []
    readable = True

    def take(match: re.Match[str]) -> str:
        nonlocal readable
        call = _call(last_group(match))
        if call is None:
            readable = False
            return match.group()
        calls.append(call)
        return ""

    rest = pattern.sub(take, text)
    return ChatMessage("assistant", rest.strip() if calls else text, tuple(calls)), readable


def _call(text: str) -> ToolCall | None:
    try:
        value: Any = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{secrets.token_hex(12)}", value["name"], text)
