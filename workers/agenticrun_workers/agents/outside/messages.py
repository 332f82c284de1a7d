"""Messages, tool calls and errors in the format of OpenAI's API."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agenticrun_workers.plugins import last_group


class ApiError(Exception):
    """Error response to a request.

    Args:
        status: HTTP status.
        message: what is wrong and what to do.
        param: the invalid parameter, if there is one.
        code: error code, one of OpenAI's if one fits.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """Return the error with status 400 for a parameter that the client has to change."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


KEYS = {
    "system": {"content"},
    "user": {"content"},
    "assistant": {"content", "tool_calls"},
    "tool": {"content", "tool_call_id"},
}
"""Keys besides `role` that a message of each role may have.

Empty values of other keys are accepted, because clients send received messages back.
"""

SAME_ROLE = {"developer": "system"}
"""Newer role names of OpenAI, with the older names that chat templates know."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Function call in an answer. `arguments` is JSON."""

    id: str
    name: str
    arguments: str

    @property
    def values(self) -> Any:
        """Arguments as a value, or as text if they are not valid JSON."""
        try:
            return json.loads(self.arguments)
        except ValueError:
            return self.arguments

    @property
    def body(self) -> dict[str, Any]:
        """The call in the API's format."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }

    @property
    def for_template(self) -> dict[str, Any]:
        """The call for chat templates, which write the argument values as JSON themselves."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.values},
        }


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def identity(self) -> tuple[Any, ...]:
        """Key that is equal for equivalent messages.

        Space around the text and the layout of JSON arguments do not count.
        """
        calls = tuple(
            (call.id, call.name, json.dumps(call.values, sort_keys=True))
            for call in self.tool_calls
        )
        return self.role, self.content.strip(), calls, self.tool_call_id

    @property
    def body(self) -> dict[str, Any]:
        """The message in the API's format."""
        said: dict[str, Any] = {
            "role": self.role,
            "content": self.content if self.content or not self.tool_calls else None,
        }
        if self.tool_calls:
            said["tool_calls"] = [call.body for call in self.tool_calls]
        if self.tool_call_id is not None:
            said["tool_call_id"] = self.tool_call_id
        return said

    @property
    def for_template(self) -> dict[str, Any]:
        """The message for chat templates."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def chat_messages(values: Any) -> tuple[ChatMessage, ...]:
    """Parse the `messages` of a request, at least one.

    Raises:
        ApiError: names the invalid message.
    """
    if not isinstance(values, list) or not values:
        raise refused("messages", "a list of messages is expected, at least one")
    return tuple(_message(value, f"messages[{place}]") for place, value in enumerate(values))


def _message(value: Any, path: str) -> ChatMessage:
    role = value.get("role") if isinstance(value, Mapping) else None
    role = SAME_ROLE.get(str(role), str(role))
    if role not in KEYS:
        raise refused(path, f"the role must be one of {', '.join([*KEYS, *SAME_ROLE])}")
    for key, said in value.items():
        if key != "role" and key not in KEYS[role] and said not in (None, [], {}, ""):
            raise refused(
                f"{path}.{key}", f"is not supported in a message of role {role} here: leave it out"
            )
    calls = value.get("tool_calls") if role == "assistant" else None
    content = _text(value.get("content"), f"{path}.content", optional=bool(calls))
    call_id = value.get("tool_call_id") if role == "tool" else None
    if role == "tool" and not isinstance(call_id, str):
        raise refused(f"{path}.tool_call_id", "the id of the call that this answers is missing")
    return ChatMessage(role, content, _calls(calls or (), f"{path}.tool_calls"), call_id)


def _text(content: Any, path: str, *, optional: bool) -> str:
    """Return a message's text; a list of text parts is joined. Raises `ApiError`."""
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, list):
        raise refused(path, "text is expected")
    for place, part in enumerate(content):
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise refused(
                f"{path}[{place}]",
                "the policy reads text only: a part must be {type: text, text: ...}",
            )
    return "".join(part["text"] for part in content)


def _calls(values: Sequence[Any], path: str) -> tuple[ToolCall, ...]:
    try:
        return tuple(
            ToolCall(str(v["id"]), str(v["function"]["name"]), str(v["function"]["arguments"]))
            for v in values
        )
    except (TypeError, KeyError) as error:
        raise refused(
            path, "each call must be {id, type: function, function: {name, arguments}}"
        ) from error


HERMES = r"<tool_call>\s*(.*?)\s*</tool_call>"
"""Tool calls of Hermes, Qwen and many others: JSON with `name` and `arguments` in tags."""


def answer_message(text: str, pattern: re.Pattern[str]) -> tuple[ChatMessage, bool]:
    """Parse the tool calls of an answer.

    Args:
        text: the answer.
        pattern: finds a tool call; its last group is the call as JSON.

    Returns:
        The message, and True if all its calls could be parsed. Other calls stay in the text.
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
