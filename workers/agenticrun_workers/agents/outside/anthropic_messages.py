"""Anthropic's Messages API (`/v1/messages`), as another form of chat completions.

A request is translated to a chat request, and the response to Anthropic's form. So both APIs have
the same prompts, and a conversation may change from one to the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agenticrun_workers.agents.outside.api import Choice, Response
from agenticrun_workers.agents.outside.messages import ApiError, check_unicode, refused
from agenticrun_workers.types import FinishReason

RENAMED = {
    "model": "model",
    "max_tokens": "max_tokens",
    "stop_sequences": "stop",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stream": "stream",
    "metadata": "metadata",
    "chat_template_kwargs": "chat_template_kwargs",
}
"""Parameters that chat completions have, too, and their names there."""

KEPT_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "standard_only"),
    "context_management": ({}, {"edits": []}, KEPT_THINKING),
    "mcp_servers": ([],),
}
"""Parameters without an effect here, with the values for which nothing is missing."""

WITHOUT_EFFECT = ("type", "cache_control", "citations", "caller")
"""Keys of blocks and tools that say nothing to the policy."""

PARAMS = (
    ("response_format.json_schema.schema", "output_config.format.schema"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    (".function.parameters", ".input_schema"),
    (".function.", "."),
    ("stop", "stop_sequences"),
)
"""Names of places in a chat request, and those of the request that the client sent."""

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    kind = ERRORS.get(error.status, "api_error" if error.status >= 500 else ERRORS[400])
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def chat_body(body: Any) -> tuple[dict[str, Any], bool | None]:
    """Return the chat request that asks for the same, and `ChatRequest.thinks`.

    Raises:
        ApiError: names the invalid parameter.
    """
    if not isinstance(body, Mapping):
        raise ApiError(400, "the request's body must be a JSON object")
    for name in ("system", "messages"):
        check_unicode(body.get(name), name)
    left = {name: value for name, value in body.items() if value is not None}
    chat: dict[str, Any] = {
        "messages": [
            *_system(left.pop("system", None)),
            *_messages(left.pop("messages", None)),
        ],
        "tools": _tools(left.pop("tools", [])),
        **_tool_choice(left.pop("tool_choice", {})),
        **_output_config(left.pop("output_config", {})),
    }
    thinks = _thinks(left.pop("thinking", {}))
    left.pop("cache_control", None)
    for name, value in left.items():
        if name in RENAMED:
            chat[RENAMED[name]] = value
        elif name not in NEUTRAL:
            raise refused(
                name, "this parameter is not supported: leave it out", "unsupported_parameter"
            )
        elif value not in NEUTRAL[name]:
            raise refused(name, f"{value!r} is not supported: leave it out", "unsupported_value")
    return chat, thinks


def _system(system: Any) -> list[dict[str, Any]]:
    if not system:
        return []
    return [{"role": "system", "content": _text(system, "system")}]


def _messages(values: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat: one for an answer, and one for each result of a tool."""
    if not isinstance(values, list) or not values:
        raise refused("messages", "a list of messages is expected, at least one")
    messages: list[dict[str, Any]] = []
    for place, value in enumerate(values):
        path = f"messages[{place}]"
        if not isinstance(value, Mapping) or value.get("role") not in ("user", "assistant"):
            raise refused(path, "the role must be user or assistant; instructions go into system")
        _check_keys(value, path, ("role", "content"))
        content = value.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not (blocks or value["role"] == "assistant"):
            raise refused(f"{path}.content", "a text or a list of blocks is expected, at least one")
        if value["role"] == "user":
            messages += _asked(blocks, f"{path}.content")
        else:
            messages.append(_answered(blocks, f"{path}.content"))
    if messages[-1]["role"] == "assistant":
        raise refused(
            f"messages[{len(values) - 1}]",
            "the last message must be of role user: the endpoint does not continue an answer",
        )
    return messages


def _asked(blocks: Sequence[Any], path: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        at = f"{path}[{place}]"
        match _kind(block, at):
            case "text":
                text = _text([block], path, place)
                if messages and messages[-1]["role"] == "user":
                    messages[-1]["content"] += text
                else:
                    messages.append({"role": "user", "content": text})
            case "tool_result":
                # `is_error` has no counterpart in chat templates: the result's text says it
                _check_keys(block, at, ("tool_use_id", "content", "is_error"))
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": _string(block, "tool_use_id", at),
                        "content": _text(block.get("content") or "", f"{at}.content"),
                    }
                )
            case other:
                raise _unknown(other, at, "text and tool_result")
    return messages


def _answered(blocks: Sequence[Any], path: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for place, block in enumerate(blocks):
        at = f"{path}[{place}]"
        match _kind(block, at):
            case "text":
                message["content"] += _text([block], path, place)
            case "thinking":
                _check_keys(block, at, ("thinking", "signature"))
                thought = message.get("reasoning_content", "") + _string(block, "thinking", at)
                message["reasoning_content"] = thought
            case "tool_use":
                _check_keys(block, at, ("id", "name", "input"))
                if not isinstance(block.get("input"), Mapping):
                    raise refused(f"{at}.input", "an object is expected")
                function = {
                    "name": _string(block, "name", at),
                    "arguments": json.dumps(block["input"], ensure_ascii=False),
                }
                call = {"id": _string(block, "id", at), "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case other:
                raise _unknown(other, at, "text, thinking and tool_use")
    return message


def _kind(block: Any, path: str) -> str:
    if not isinstance(block, Mapping):
        raise refused(path, "a block with a type is expected")
    return str(block.get("type"))


def _unknown(kind: str, path: str, known: str) -> ApiError:
    return refused(f"{path}.type", f"{kind!r} is not supported: {known} are", "unsupported_value")


def _text(content: Any, path: str, first: int = 0) -> str:
    """Return the text of blocks; `first` is the place of the first one."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(path, "a text or a list of blocks is expected")
    for place, block in enumerate(content, first):
        at = f"{path}[{place}]"
        if (kind := _kind(block, at)) != "text":
            raise _unknown(kind, at, "the policy reads text only: blocks of type text")
        _check_keys(block, at, ("text",))
        _string(block, "text", at)
    return "".join(block["text"] for block in content)


def _string(block: Mapping[str, Any], key: str, path: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise refused(f"{path}.{key}", "text is expected")
    return value


def _check_keys(value: Mapping[str, Any], path: str, known: Sequence[str]) -> None:
    for key, said in value.items():
        if key not in (*WITHOUT_EFFECT, *known) and said not in (None, [], {}, "", False):
            raise refused(f"{path}.{key}", "is not supported: leave it out")


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise refused("tools", "a list is expected")
    made = []
    for place, tool in enumerate(tools):
        path = f"tools[{place}]"
        if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
            raise refused(
                f"{path}.type",
                "must be custom, or left out: the endpoint has no tools of its own",
                "unsupported_value",
            )
        # the endpoint streams an answer when it is complete, so that this has no effect
        known = ("name", "description", "input_schema", "strict", "eager_input_streaming")
        _check_keys(tool, path, known)
        if not isinstance(tool.get("input_schema"), Mapping):
            raise refused(f"{path}.input_schema", "a JSON schema is expected")
        function = {"name": _string(tool, "name", path)}
        if tool.get("description") is not None:
            function["description"] = _string(tool, "description", path)
        strict = {} if tool.get("strict") is None else {"strict": tool["strict"]}
        function |= {"parameters": tool["input_schema"], **strict}
        made.append({"type": "function", "function": function})
    return made


def _tool_choice(choice: Any) -> dict[str, Any]:
    """Return `tool_choice` and `parallel_tool_calls` of the chat request."""
    if choice == {}:
        return {}
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    known = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in (*known, "tool"):
        raise refused("tool_choice", "the type must be auto, any, tool or none")
    single = choice.get("disable_parallel_tool_use")
    if single not in (None, True, False):
        raise refused("tool_choice.disable_parallel_tool_use", "must be true or false")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    return {
        "tool_choice": known.get(kind, named),
        "parallel_tool_calls": None if single is None else not single,
    }


def _output_config(config: Any) -> dict[str, Any]:
    if not isinstance(config, Mapping) or config.keys() - {"effort", "format"}:
        raise refused("output_config", "{effort: ..., format: {...}} is expected")
    form = config.get("format")
    if form is not None:
        if not isinstance(form, Mapping) or form.get("type") != "json_schema":
            raise refused("output_config.format", "the type must be json_schema")
        form = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return {"response_format": form, "reasoning_effort": config.get("effort")}


def _thinks(thinking: Any) -> bool | None:
    if thinking == {}:
        return None
    kind = thinking.get("type") if isinstance(thinking, Mapping) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        raise refused("thinking", "the type must be enabled, disabled or adaptive")
    if thinking.get("display") not in (None, "summarized"):
        raise refused("thinking.display", "must be left out: reasoning is sent as it is")
    # of `budget_tokens` templates know nothing: only max_tokens limits an answer
    _check_keys(thinking, "thinking", ("budget_tokens", "display"))
    return {"enabled": True, "disabled": False}.get(str(kind))


@dataclass(frozen=True, slots=True)
class AnsweredMessages:
    """Answer to a request to `/v1/messages`."""

    response: Response

    @property
    def streams(self) -> bool:
        return self.response.options.stream

    @property
    def _choice(self) -> Choice:
        return self.response.choices[0]

    @property
    def content(self) -> list[dict[str, Any]]:
        """The answer as blocks: its reasoning, its text, then its calls."""
        message = self._choice.message
        blocks: list[dict[str, Any]] = []
        if message.reasoning:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.content or not message.tool_calls:
            blocks.append({"type": "text", "text": message.content})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.values}
            for call in message.tool_calls
        ]
        return blocks

    @property
    def _ending(self) -> dict[str, Any]:
        choice = self._choice
        if choice.generation.finish is FinishReason.LENGTH:
            reason = "max_tokens"
        elif choice.message.tool_calls:
            reason = "tool_use"
        else:
            reason = "end_turn" if choice.stop_text is None else "stop_sequence"
        stop_text = choice.stop_text if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stop_text}

    def _usage(self, output_tokens: int) -> dict[str, Any]:
        return {
            "input_tokens": len(self.response.prompt_T),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": output_tokens,
        }

    def _message(self, output_tokens: int, **more: Any) -> dict[str, Any]:
        return {
            "id": self.response.id,
            "type": "message",
            "role": "assistant",
            "model": self.response.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(output_tokens),
            **more,
        }

    def body(self) -> dict[str, Any]:
        """Return the finished `message`."""
        sampled = len(self._choice.generation.tokens_T)
        return self._message(sampled, content=self.content, **self._ending)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream."""
        yield {"type": "message_start", "message": self._message(0)}
        yield {"type": "ping"}
        for index, block in enumerate(self.content):
            empty, deltas = _streamed(block)
            yield {"type": "content_block_start", "index": index, "content_block": block | empty}
            for delta in deltas:
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        usage = self._usage(len(self._choice.generation.tokens_T))
        yield {"type": "message_delta", "delta": self._ending, "usage": usage}
        yield {"type": "message_stop"}


def _streamed(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the keys that are empty when a block starts, and the deltas that fill them."""
    match block["type"]:
        case "text":
            return {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            thought = {"type": "thinking_delta", "thinking": block["thinking"]}
            signed = {"type": "signature_delta", "signature": block["signature"]}
            return {"thinking": ""}, [thought, signed]
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return {"input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
