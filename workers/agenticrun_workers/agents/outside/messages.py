"""Messages, tool calls and errors in the format of OpenAI's API."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agenticrun_workers.agents.chat_families import ParsedAnswer


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


def renamed(error: ApiError, params: Sequence[tuple[str, str]], conversation: str) -> ApiError:
    """Return the error of a chat request with the names of another dialect.

    Args:
        error: of the chat request.
        params: names of places in a chat request, and those in the client's request.
        conversation: the client's name of the messages. It stands without a number, because the
            messages of the chat are not numbered as the client's are.
    """
    message, place = str(error), error.param
    if place is not None:
        for chat, own in params:
            place = place.replace(chat, own)
        message = message.replace(str(error.param), place, 1)
        place = conversation if place.startswith(conversation) else place
    return ApiError(error.status, message, param=place, code=error.code)


KEYS = {
    "system": {"content"},
    "user": {"content"},
    "assistant": {"content", "tool_calls", "reasoning_content"},
    "tool": {"content", "tool_call_id"},
}
"""Keys besides `role` that a message of each role may have.

Empty values of other keys are accepted, because clients send received messages back. litellm adds
an object to them whose values are empty.
"""

EMPTY: tuple[Any, ...] = (None, [], {}, "")

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
        except (ValueError, RecursionError):
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
    reasoning: str | None = None
    """Reasoning before an answer. Clients may leave it out of the messages that they send back."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """Key that is equal for equivalent messages.

        Space around the text, the layout of JSON arguments and reasoning do not count.
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
        if self.reasoning is not None:
            said["reasoning_content"] = self.reasoning
        if self.tool_calls:
            said["tool_calls"] = [call.body for call in self.tool_calls]
        if self.tool_call_id is not None:
            said["tool_call_id"] = self.tool_call_id
        return said

    @property
    def for_template(self) -> dict[str, Any]:
        """The message for chat templates."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
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
    check_unicode(values, "messages")
    return tuple(_message(value, f"messages[{place}]") for place, value in enumerate(values))


def _message(value: Any, path: str) -> ChatMessage:
    role = value.get("role") if isinstance(value, Mapping) else None
    role = SAME_ROLE.get(str(role), str(role))
    if role not in KEYS:
        raise refused(path, f"the role must be one of {', '.join([*KEYS, *SAME_ROLE])}")
    for key, said in value.items():
        inner = list(said.values()) if isinstance(said, Mapping) else [said]
        if key != "role" and key not in KEYS[role] and any(each not in EMPTY for each in inner):
            raise refused(
                f"{path}.{key}", f"is not supported in a message of role {role} here: leave it out"
            )
    calls = value.get("tool_calls") if role == "assistant" else None
    content = _text(value.get("content"), f"{path}.content", optional=bool(calls))
    call_id = value.get("tool_call_id") if role == "tool" else None
    if role == "tool" and not isinstance(call_id, str):
        raise refused(f"{path}.tool_call_id", "the id of the call that this answers is missing")
    reasoning = value.get("reasoning_content") if role == "assistant" else None
    if reasoning is not None:
        reasoning = _string(reasoning, f"{path}.reasoning_content")
    return ChatMessage(role, content, _calls(calls or (), f"{path}.tool_calls"), call_id, reasoning)


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


def _calls(values: Any, path: str) -> tuple[ToolCall, ...]:
    """Return the calls of a message. Arguments are JSON, as text or as an object."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise refused(path, "a list of calls is expected")
    calls = []
    for place, call in enumerate(values):
        at = f"{path}[{place}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise refused(at, "each call must be {id, type: function, function: {name, arguments}}")
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append(
            ToolCall(
                _string(call.get("id"), f"{at}.id"),
                _string(function.get("name"), f"{at}.function.name"),
                _string(arguments, f"{at}.function.arguments"),
            )
        )
    return tuple(calls)


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise refused(path, "text is expected")
    return value


def check_unicode(value: Any, path: str) -> None:
    """Raise `ApiError` for the first text below `value` that is no valid unicode.

    Half of a surrogate pair can be written in JSON, and no tokenizer takes it.
    """
    left = [(path, value)]
    while left:
        path, value = left.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise refused(path, "text that is not valid unicode") from None
        elif isinstance(value, list | tuple):
            left += reversed([(f"{path}[{n}]", inner) for n, inner in enumerate(value)])
        elif isinstance(value, Mapping):
            inner = [(f"{path}.{key}", value[key]) for key in value]
            left += reversed([*((path, key) for key in value), *inner])


def answer_message(parsed: ParsedAnswer) -> ChatMessage:
    """Return an answer as a message. Its calls get new ids."""
    calls = tuple(
        ToolCall(f"call_{secrets.token_hex(12)}", call.name, call.arguments)
        for call in parsed.calls
    )
    return ChatMessage("assistant", parsed.content, calls, reasoning=parsed.reasoning)
