"""OpenAI's Responses API (`/v1/responses`), as another form of chat completions.

A request becomes a chat request, and its answer a `response` object or its events. So both APIs
have the same parameters, limits and errors, and a conversation may change from one to the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from agenticrun_workers.agents.outside.api import LABELS, Choice, Response
from agenticrun_workers.agents.outside.messages import ApiError, refused

LOGPROBS = "message.output_text.logprobs"
WITHOUT_EFFECT = ("reasoning.encrypted_content",)
"""Values of `include` for things that the policy never has."""

RENAMED = {
    "max_output_tokens": "max_completion_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "parallel_tool_calls": "parallel_tool_calls",
    "stream": "stream",
    "top_logprobs": "top_logprobs",
    "service_tier": "service_tier",
    "store": "store",
    "chat_template_kwargs": "chat_template_kwargs",
    **dict(zip(LABELS, LABELS, strict=True)),
}
"""Parameters that chat completions have, too, and their names there."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
}
"""Parameters without an effect here, with the values for which nothing is missing."""

STATEFUL = ("previous_response_id", "conversation", "prompt")

IGNORED_IN_ITEMS = ("type", "id", "status", "phase")
"""Keys of an item that say nothing to the policy."""

PARAMS = (
    ("reasoning_effort", "reasoning.effort"),
    ("response_format.json_schema.schema", "text.format.schema"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("messages", "input"),
    (".function.", "."),
)
"""Names of places in a chat request, and those of the request that the client sent."""


def chat_body(body: Any) -> dict[str, Any]:
    """Return the chat request that asks for the same.

    Raises:
        ApiError: names the invalid parameter.
    """
    if not isinstance(body, Mapping):
        raise ApiError(400, "the request's body must be a JSON object")
    left = {name: value for name, value in body.items() if value is not None}
    for name in STATEFUL:
        if name in left:
            raise refused(
                name,
                "the endpoint stores no conversations: send the whole conversation as input",
                "unsupported_parameter",
            )
    chat: dict[str, Any] = {"model": left.pop("model", None)}
    chat["messages"] = _messages(left.pop("instructions", None), left.pop("input", None))
    if tools := left.pop("tools", None):
        chat["tools"] = _tools(tools)
    if choice := left.pop("tool_choice", None):
        chat["tool_choice"] = _tool_choice(choice)
    if text := left.pop("text", None):
        chat["response_format"] = _response_format(text)
    chat["reasoning_effort"] = _effort(left.pop("reasoning", None))
    include = left.pop("include", None) or []
    if not isinstance(include, list):
        raise refused("include", "a list is expected", "invalid_type")
    unknown = [each for each in include if each not in (LOGPROBS, *WITHOUT_EFFECT)]
    if unknown:
        raise refused(
            "include", f"{unknown[0]!r} is not supported: leave it out", "unsupported_value"
        )
    chat["logprobs"] = LOGPROBS in include
    for name, value in left.items():
        if name in RENAMED:
            chat[RENAMED[name]] = value
        elif name not in NEUTRAL:
            raise refused(
                name, "this parameter is not supported: leave it out", "unsupported_parameter"
            )
        elif _without_none(value) not in NEUTRAL[name]:
            raise refused(
                name,
                f"{value!r} is not supported by the run's engines: leave it out",
                "unsupported_value",
            )
    return chat


def _effort(reasoning: Any) -> Any:
    if not isinstance(reasoning, Mapping | None):
        raise refused("reasoning", "{effort: ...} is expected")
    for name, value in (reasoning or {}).items():
        if name != "effort" and value is not None:
            raise refused(f"reasoning.{name}", "is not supported: leave it out")
    return (reasoning or {}).get("effort")


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: part for key, part in value.items() if part is not None}
    return value


def _messages(instructions: Any, items: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat. Calls belong to the message of the policy before them."""
    messages: list[dict[str, Any]] = []
    if instructions:
        if not isinstance(instructions, str):
            raise refused("instructions", "text is expected")
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise refused("input", "a text or a list of items is expected, at least one")
    for place, item in enumerate(items):
        path = f"input[{place}]"
        if not isinstance(item, Mapping):
            raise refused(path, "an item is expected")
        match item.get("type", "message"):
            case "message":
                messages.append(_message(item, path))
            case "function_call":
                call = _call(item, path)
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                messages.append(_output(item, path))
            case other:
                raise refused(
                    f"{path}.type",
                    f"{other!r} is not known: message, function_call and function_call_output are",
                )
    return messages


def _check_keys(item: Mapping[str, Any], path: str, known: Sequence[str]) -> None:
    for key, value in item.items():
        if key not in (*IGNORED_IN_ITEMS, *known) and value not in (None, [], {}, ""):
            raise refused(f"{path}.{key}", "is not supported: leave it out")


def _message(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    _check_keys(item, path, ("role", "content"))
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise refused(f"{path}.role", "must be user, assistant, system or developer")
    return {"role": role, "content": _text(item.get("content"), f"{path}.content")}


def _text(content: Any, path: str) -> str:
    """Return the text of parts. Raises `ApiError` for a picture, a file or a sound."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(path, "text or a list of parts is expected")
    for place, part in enumerate(content):
        if (
            not isinstance(part, Mapping)
            or part.get("type") not in ("input_text", "output_text", "text")
            or not isinstance(part.get("text"), str)
        ):
            raise refused(
                f"{path}[{place}]",
                "the policy reads text only: a part must be of type input_text or output_text",
            )
    return "".join(part["text"] for part in content)


def _call(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    _check_keys(item, path, ("call_id", "name", "arguments"))
    for key in ("call_id", "name", "arguments"):
        if not isinstance(item.get(key), str):
            raise refused(f"{path}.{key}", "text is expected")
    return {
        "id": item["call_id"],
        "type": "function",
        "function": {"name": item["name"], "arguments": item["arguments"]},
    }


def _output(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    _check_keys(item, path, ("call_id", "output"))
    if not isinstance(item.get("call_id"), str):
        raise refused(f"{path}.call_id", "the id of the call that this answers is missing")
    content = _text(item.get("output"), f"{path}.output")
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise refused("tools", "a list is expected")
    made = []
    for place, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise refused(
                f"tools[{place}].type",
                "must be function: the endpoint has no tools of its own",
                "unsupported_value",
            )
        function = {
            key: value for key, value in tool.items() if key != "type" and value is not None
        }
        made.append({"type": "function", "function": function})
    return made


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(text: Any) -> Any:
    if not isinstance(text, Mapping) or text.keys() - {"format", "verbosity"}:
        raise refused("text", "{format: {...}} is expected")
    if text.get("verbosity") not in (None, "medium"):
        raise refused("text.verbosity", "is not supported: leave it out", "unsupported_value")
    form = text.get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        return {
            "type": "json_schema",
            "json_schema": {key: value for key, value in form.items() if key != "type"},
        }
    return form


@dataclass(frozen=True, slots=True)
class Responded:
    """Answer to a request to `/v1/responses`."""

    request: Mapping[str, Any]
    response: Response

    @property
    def streams(self) -> bool:
        return self.response.options.stream

    @property
    def _choice(self) -> Choice:
        return self.response.choices[0]

    @property
    def _whole(self) -> bool:
        return self._choice.finish_reason != "length"

    @property
    def output(self) -> list[dict[str, Any]]:
        """The answer as items: its text, then its calls."""
        status = "completed" if self._whole else "incomplete"
        message, name = self._choice.message, self.response.id
        items: list[dict[str, Any]] = []
        if message.content or not message.tool_calls:
            items.append(
                {
                    "id": f"msg_{name}",
                    "type": "message",
                    "role": "assistant",
                    "status": status,
                    "content": [self._part(message.content)],
                }
            )
        items += [
            {
                "id": f"fc_{name}_{place}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
            for place, call in enumerate(message.tool_calls)
        ]
        return items

    def body(self) -> dict[str, Any]:
        """Return the finished `response`."""
        usage = self.response.usage
        return self._body("completed" if self._whole else "incomplete", self.output) | {
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
        }

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream."""
        numbers = count()

        def event(kind: str, **said: Any) -> dict[str, Any]:
            return {"type": f"response.{kind}", "sequence_number": next(numbers), **said}

        begun = self._body("in_progress", [])
        yield event("created", response=begun)
        yield event("in_progress", response=begun)
        for index, item in enumerate(self.output):
            where: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
            empty: dict[str, Any] = (
                {"content": []} if item["type"] == "message" else {"arguments": ""}
            )
            started = item | empty | {"status": "in_progress"}
            yield event("output_item.added", output_index=index, item=started)
            if item["type"] == "message":
                (part,) = item["content"]
                here = where | {"content_index": 0}
                text, logprobs = part["text"], part["logprobs"]
                blank = part | {"text": "", "logprobs": []}
                yield event("content_part.added", part=blank, **here)
                yield event("output_text.delta", delta=text, logprobs=logprobs, **here)
                yield event("output_text.done", text=text, logprobs=logprobs, **here)
                yield event("content_part.done", part=part, **here)
            else:
                arguments = item["arguments"]
                yield event("function_call_arguments.delta", delta=arguments, **where)
                yield event(
                    "function_call_arguments.done",
                    arguments=arguments,
                    name=item["name"],
                    **where,
                )
            yield event("output_item.done", output_index=index, item=item)
        yield event("completed" if self._whole else "incomplete", response=self.body())

    def _part(self, text: str) -> dict[str, Any]:
        logprobs = self._choice.chat_logprobs["content"] if self.response.options.logprobs else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _body(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        asked = self.request
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.response.id,
            "object": "response",
            "created_at": self.response.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata") or {},
            "model": self.response.model,
            "output": output,
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.get("temperature"),
            "text": asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "top_p": asked.get("top_p"),
            "truncation": "disabled",
            "usage": None,
        }
