"""What a client is told when a request cannot be answered, in the shape of OpenAI's API."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agenticrun_workers.plugins import last_group


class ApiError(Exception):
    """A refusal. `param` names what is wrong in the request, `code` is one of OpenAI's words where there is one."""

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
    """Status 400: `param` is what the client has to change."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


KEYS = {
    "system": {"content"},
    "user": {"content"},
    "assistant": {"content", "tool_calls"},
    "tool": {"content", "tool_call_id"},
}
"""What a message of each role may say beside its role. Empty values of other keys say nothing: clients send back what they were sent."""

SAME_ROLE = {"developer": "system"}
"""OpenAI's newer name of a role that chat templates know by the older one."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that an answer calls; `arguments` is JSON."""

    id: str
    name: str
    arguments: str

    @property
    def values(self) -> Any:
        """The arguments; the text itself if it is no JSON."""
        try:
            return json.loads(self.arguments)
        except ValueError:
            return self.arguments

    @property
    def body(self) -> dict[str, Any]:
        """As the API says it."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }

    @property
    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: the arguments are values, which the template writes as JSON itself."""
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
        """Equal for messages that say the same: spaces around the text and the layout of JSON arguments do not count."""
        calls = tuple(
            (call.id, call.name, json.dumps(call.values, sort_keys=True))
            for call in self.tool_calls
        )
        return self.role, self.content.strip(), calls, self.tool_call_id

    @property
    def body(self) -> dict[str, Any]:
        """As the API says it."""
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
        """As chat templates take it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def chat_messages(values: Any) -> tuple[ChatMessage, ...]:
    """The `messages` of a request, at least one. Raises `ApiError`, which names the message."""
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
            raise refused(f"{path}.{key}", f"a message of role {role} cannot say this here")
    calls = value.get("tool_calls") if role == "assistant" else None
    content = _text(value.get("content"), f"{path}.content", optional=bool(calls))
    call_id = value.get("tool_call_id") if role == "tool" else None
    if role == "tool" and not isinstance(call_id, str):
        raise refused(f"{path}.tool_call_id", "the id of the call that this answers is missing")
    return ChatMessage(role, content, _calls(calls or (), f"{path}.tool_calls"), call_id)


def _text(content: Any, path: str, *, optional: bool) -> str:
    """Text as it is, or parts of text put together."""
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
