"""Requests and responses in the format of OpenAI's API.

`ChatRequest` and `Response` are the one form that the session works with. The other dialects
(`responses`, `anthropic_messages`) translate to and from it.
Every parameter of a request is either supported or refused by name; none is ignored.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from agenticrun_workers.agents.agent import AgentLimits
from agenticrun_workers.agents.outside.formats import AnswerFormat, check_schema
from agenticrun_workers.agents.outside.messages import (
    ApiError,
    ChatMessage,
    chat_messages,
    check_unicode,
    refused,
)
from agenticrun_workers.agents.queued_types import MAX_SAMPLES, OWNED
from agenticrun_workers.types import FinishReason, Generation, IntArray

LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Accepted parameters that by definition do not change an answer."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
}
"""Parameters that the engines do not support, with the values that have no effect."""

CHAT_ONLY = ("store", "modalities", "top_logprobs")
COMPLETION_ONLY = ("echo", "suffix")
STREAM_OPTIONS = ("include_usage", "include_obfuscation")
"""The second one has no effect: no chunk has padding."""
MAX_STOPS = 16


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of a request. None = the run's value."""

    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    token_ids: bool = False
    """True if the response has the tokens of the prompt and of the answers."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Request for an answer to a conversation, in any dialect."""

    options: RequestOptions
    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...]
    calls: bool
    """True if the answer is searched for tool calls."""
    one_call: bool = False
    """True if the answer ends after its first tool call."""
    form: AnswerFormat | None = None
    """Format that the answer must have."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    effort: str | None = None
    """Amount of reasoning, if the chat template can say it; none: the policy shall not reason."""
    thinks: bool | None = None
    """True if the policy shall think, False if not. None = as the run does."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Request to `/v1/completions`. The prompt is a text or tokens."""

    options: RequestOptions
    prompt: str | tuple[int, ...]


def chat_request(body: Any, limits: AgentLimits, model: str) -> ChatRequest:
    """Parse a request to `/v1/chat/completions`.

    Raises:
        ApiError: names the invalid parameter.
    """
    fields = _Fields(body, model)
    messages = chat_messages(fields.take("messages"))
    tools = fields.take("tools") or []
    check_unicode(tools, "tools")
    if not isinstance(tools, list) or not all(
        isinstance(tool, Mapping) and tool.get("type") == "function" for tool in tools
    ):
        raise refused("tools", "a list of {type: function, function: {...}} is expected")
    choice = fields.take("tool_choice") or "auto"
    wanted = answer_format(tools, choice, fields.take("response_format"))
    effort = fields.take("reasoning_effort")
    if effort is not None and not isinstance(effort, str):
        raise refused("reasoning_effort", f"must be a text, such as low, not {effort!r}")
    template_args = fields.take("chat_template_kwargs") or {}
    check_unicode(template_args, "chat_template_kwargs")
    if not isinstance(template_args, Mapping):
        raise refused(
            "chat_template_kwargs", "an object with variables of the template is expected"
        )
    parallel = fields.take("parallel_tool_calls")
    if parallel not in (None, True, False):
        raise refused("parallel_tool_calls", f"must be true or false, not {parallel!r}")
    logprobs = fields.flag("logprobs")
    max_tokens, older = fields.number("max_completion_tokens", 1), fields.number("max_tokens", 1)
    if None not in (max_tokens, older) and max_tokens != older:
        raise refused(
            "max_tokens", "differs from max_completion_tokens, which means the same: leave it out"
        )
    options = fields.request_options(limits, max_tokens or older, logprobs)
    fields.end((*NEUTRAL.keys() - set(COMPLETION_ONLY),))
    calls = bool(tools) and choice != "none"
    return ChatRequest(
        options,
        messages,
        tuple(tools),
        calls,
        calls and parallel is False,
        wanted,
        template_args,
        effort,
    )


def answer_format(
    tools: Sequence[Mapping[str, Any]], choice: Any, response_format: Any
) -> AnswerFormat | None:
    """Return the format that an answer must have, or None if it may be any text.

    Args:
        tools: tools of the request.
        choice: its `tool_choice`.
        response_format: its `response_format`.

    Raises:
        ApiError: names the invalid parameter.
    """
    schema = _schema_of(response_format)
    places: dict[str, int] = {}
    for place, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise refused(f"tools[{place}].function.name", "is missing")
        places[function["name"]] = place

    def calls_of(*names: str) -> dict[str, Any]:
        return {
            name: _arguments(tools[places[name]]["function"], f"tools[{places[name]}]")
            for name in names
        }

    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = str(function.get("name")) if isinstance(function, Mapping) else ""
        if name not in places:
            raise refused(
                "tool_choice",
                f"{dict(choice)!r} names no tool of this request: "
                "{type: function, function: {name: ...}} is expected",
            )
        return AnswerFormat(calls_of(name))
    if choice not in ("auto", "none", "required"):
        raise refused("tool_choice", f"must be auto, none, required or a function, not {choice!r}")
    if choice == "required":
        if not places:
            raise refused("tool_choice", "is required, and the request has no tools")
        return AnswerFormat(calls_of(*places))
    if schema is None:
        return None
    return AnswerFormat(calls_of(*places) if places and choice == "auto" else None, schema)


def _arguments(function: Mapping[str, Any], path: str) -> Any:
    """Return the schema that the arguments of a call must have: the function's, if it is strict."""
    if not function.get("strict"):
        return {"type": "object"}
    return check_schema(function.get("parameters"), f"{path}.function.parameters")


def _schema_of(response_format: Any) -> Any:
    """Return the schema of `response_format`, or None for text. Raises `ApiError`."""
    param = "response_format"
    kind = (
        (response_format or {"type": "text"}).get("type")
        if isinstance(response_format, Mapping | None)
        else None
    )
    match kind:
        case "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            described = response_format.get("json_schema")
            if not isinstance(described, Mapping):
                raise refused(f"{param}.json_schema", "{name: ..., schema: ...} is expected")
            return check_schema(described.get("schema"), f"{param}.json_schema.schema")
    raise refused(param, "the type must be text, json_object or json_schema")


def completion_request(body: Any, limits: AgentLimits, model: str) -> CompletionRequest:
    """Parse a request to `/v1/completions`.

    Raises:
        ApiError: names the invalid parameter.
    """
    fields = _Fields(body, model)
    prompt = fields.take("prompt")
    if (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)
    ):
        prompt = tuple(prompt)
    elif not isinstance(prompt, str) or not prompt:
        raise refused("prompt", "one text or one list of tokens is expected, not empty")
    logprobs = fields.number("logprobs", 0)
    if logprobs:
        raise refused(
            "logprobs",
            "must be 0, for those of the sampled tokens: the engines do not report others",
        )
    options = fields.request_options(limits, fields.number("max_tokens", 1), logprobs == 0)
    best_of = fields.number("best_of", 1)
    if best_of not in (None, options.n):
        raise refused("best_of", "must be n: all samples are returned")
    fields.end((*NEUTRAL.keys() - set(CHAT_ONLY),))
    return CompletionRequest(options, prompt)


class _Fields:
    """Parameters of a request, taken one by one. A null parameter counts as missing."""

    def __init__(self, body: Any, model: str) -> None:
        if not isinstance(body, Mapping):
            raise ApiError(400, "the request's body must be a JSON object")
        self._left = {name: value for name, value in body.items() if value is not None}
        wanted = self.take("model")
        if wanted != model:
            raise ApiError(
                404,
                f"model: {wanted!r} is not served; {model!r} is",
                param="model",
                code="model_not_found",
            )

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def number(self, name: str, least: int) -> int | None:
        value = self.take(name)
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or value < least
        ):
            raise refused(name, f"must be a whole number of at least {least}, not {value!r}")
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value not in (None, True, False):
            raise refused(name, f"must be true or false, not {value!r}")
        return bool(value)

    def request_options(
        self, limits: AgentLimits, max_tokens: int | None, logprobs: bool
    ) -> RequestOptions:
        """Take the options that both kinds of requests have. Raises `ApiError`."""
        for name, place in OWNED.items():
            value, owned = self.take(name), getattr(limits, name)
            if value is not None and value != owned:
                raise refused(
                    name,
                    f"is {value!r}, and the run samples with {owned}: "
                    f"leave it out, and set {place}",
                )
        n = self.number("n", 1) or 1
        if n > MAX_SAMPLES:
            raise refused("n", f"must be at most {MAX_SAMPLES}, not {n}")
        stream = self.flag("stream")
        options = self.take("stream_options") or {}
        if not isinstance(options, Mapping) or (options and not stream):
            raise refused("stream_options", "is an object for requests with stream: leave it out")
        for name, value in options.items():
            if name not in STREAM_OPTIONS or value not in (None, True, False):
                raise refused(
                    f"stream_options.{name}",
                    f"{value!r} is not supported: {' and '.join(STREAM_OPTIONS)} may be true or "
                    "false",
                )
        return RequestOptions(
            n,
            max_tokens,
            self._stop(),
            self.number("seed", 0),
            logprobs,
            stream,
            bool(options.get("include_usage")),
            self.flag("return_token_ids"),
        )

    def _stop(self) -> tuple[str, ...]:
        value = self.take("stop")
        stops = [value] if isinstance(value, str) else value or []
        if (
            not isinstance(stops, list)
            or len(stops) > MAX_STOPS
            or not all(isinstance(stop, str) and stop for stop in stops)
        ):
            raise refused("stop", f"one text or up to {MAX_STOPS} are expected, none of them empty")
        return tuple(stops)

    def end(self, neutral: tuple[str, ...]) -> None:
        """Refuse the remaining parameters, except labels and neutral values."""
        for name, value in self._left.items():
            if name in neutral:
                if value not in NEUTRAL[name]:
                    raise refused(
                        name,
                        f"{value!r} is not supported by the run's engines: leave it out",
                        "unsupported_value",
                    )
            elif name not in LABELS:
                raise refused(
                    name, "this parameter is not supported: leave it out", "unsupported_parameter"
                )


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the n answers."""

    index: int
    message: ChatMessage
    generation: Generation
    pieces: list[bytes]
    """Bytes of each token of the answer; empty if no log-probs are asked for."""
    stop_text: str | None = None
    """The stop text of the request that ended the answer."""

    @property
    def finish_reason(self) -> str:
        if self.generation.finish is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.message.tool_calls else "stop"

    @property
    def chat_logprobs(self) -> dict[str, Any]:
        pairs = zip(self.pieces, self.generation.logprobs_T.tolist(), strict=True)
        tokens = [
            {
                "token": piece.decode(errors="replace"),
                "logprob": value,
                "bytes": list(piece),
                "top_logprobs": [],
            }
            for piece, value in pairs
        ]
        return {"content": tokens, "refusal": None}

    @property
    def text_logprobs(self) -> dict[str, Any]:
        # A token inside a character has the place of this character.
        decoder = getincrementaldecoder("utf-8")(errors="replace")
        sizes = [len(decoder.decode(piece)) for piece in self.pieces]
        offsets = [0, *accumulate(sizes)][:-1]
        values = self.generation.logprobs_T.tolist()
        return {
            "tokens": [piece.decode(errors="replace") for piece in self.pieces],
            "token_logprobs": values,
            "top_logprobs": None,
            "text_offset": offsets,
        }


@dataclass(frozen=True, slots=True)
class Response:
    """Response to one request."""

    id: str
    created: int
    model: str
    options: RequestOptions
    prompt_T: IntArray
    choices: list[Choice] = field(default_factory=list)

    @property
    def usage(self) -> dict[str, int]:
        sampled = sum(len(choice.generation.tokens_T) for choice in self.choices)
        return {
            "prompt_tokens": len(self.prompt_T),
            "completion_tokens": sampled,
            "total_tokens": len(self.prompt_T) + sampled,
        }

    def chat_body(self) -> dict[str, Any]:
        """Return the response as a `chat.completion`."""
        choices = [
            {
                "index": choice.index,
                "message": choice.message.body | {"refusal": None},
                "finish_reason": choice.finish_reason,
                "logprobs": choice.chat_logprobs if self.options.logprobs else None,
                **self._tokens_of(choice),
            }
            for choice in self.choices
        ]
        body = self._body("chat.completion", choices) | {"usage": self.usage}
        return body | self._prompt_tokens

    def chat_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the response as `chat.completion.chunk` objects.

        Each choice has two chunks: its message, and its finish reason.
        """
        for choice in self.choices:
            delta = choice.message.body
            if choice.message.tool_calls:
                delta["tool_calls"] = [
                    call.body | {"index": place}
                    for place, call in enumerate(choice.message.tool_calls)
                ]
            logprobs = choice.chat_logprobs if self.options.logprobs else None
            said = {
                "index": choice.index,
                "delta": delta,
                "finish_reason": None,
                "logprobs": logprobs,
                **self._tokens_of(choice),
            }
            tokens = self._prompt_tokens if choice is self.choices[0] else {}
            yield self._chunk("chat.completion.chunk", [said]) | tokens
            over = {
                "index": choice.index,
                "delta": {},
                "finish_reason": choice.finish_reason,
                "logprobs": None,
            }
            yield self._chunk("chat.completion.chunk", [over])
        yield from self._usage_chunk("chat.completion.chunk")

    def text_body(self) -> dict[str, Any]:
        """Return the response as a `text_completion`."""
        return self._body("text_completion", [self._text(choice) for choice in self.choices]) | {
            "usage": self.usage
        }

    def text_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the response as `text_completion` chunks, one per choice."""
        for choice in self.choices:
            yield self._chunk("text_completion", [self._text(choice)])
        yield from self._usage_chunk("text_completion")

    def _text(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.message.content,
            "finish_reason": choice.finish_reason,
            "logprobs": choice.text_logprobs if self.options.logprobs else None,
            **self._prompt_tokens,
            **self._tokens_of(choice),
        }

    @property
    def _prompt_tokens(self) -> dict[str, Any]:
        """The tokens of the prompt under vLLM's name, if they are asked for."""
        return {"prompt_token_ids": self.prompt_T.tolist()} if self.options.token_ids else {}

    def _tokens_of(self, choice: Choice) -> dict[str, Any]:
        """Return the tokens of an answer under vLLM's name, if they are asked for."""
        tokens_T = choice.generation.tokens_T
        return {"token_ids": tokens_T.tolist()} if self.options.token_ids else {}

    def _usage_chunk(self, kind: str) -> Iterator[dict[str, Any]]:
        if self.options.include_usage:
            yield self._body(kind, []) | {"usage": self.usage}

    def _chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return one chunk. With `include_usage`, only the last one has usage numbers."""
        return self._body(kind, choices) | ({"usage": None} if self.options.include_usage else {})

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
