"""Answers in the shape of OpenAI's API, whole or as a stream of chunks.

The engines answer with a whole response, so a stream says all of it at once; it is there for clients that ask for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from agenticrun_workers.agents.outside.api import Asked
from agenticrun_workers.agents.outside.messages import ChatMessage
from agenticrun_workers.types import FinishReason, Generation


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the n answers."""

    index: int
    message: ChatMessage
    generation: Generation
    tokens: list[str]
    """What each sampled token says."""

    @property
    def finish_reason(self) -> str:
        if self.generation.finish is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.message.tool_calls else "stop"

    @property
    def chat_logprobs(self) -> dict[str, Any]:
        pairs = zip(self.tokens, self.generation.logprobs_T.tolist(), strict=True)
        tokens = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in pairs
        ]
        return {"content": tokens, "refusal": None}

    @property
    def text_logprobs(self) -> dict[str, Any]:
        offsets = [0, *accumulate(map(len, self.tokens))][:-1]
        values = self.generation.logprobs_T.tolist()
        return {
            "tokens": self.tokens,
            "token_logprobs": values,
            "top_logprobs": None,
            "text_offset": offsets,
        }


@dataclass(frozen=True, slots=True)
class Response:
    """What one request is answered with."""

    id: str
    created: int
    model: str
    asked: Asked
    prompt_tokens: int
    choices: list[Choice] = field(default_factory=list)

    @property
    def usage(self) -> dict[str, int]:
        sampled = sum(len(choice.generation.tokens_T) for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
        }

    def chat_body(self) -> dict[str, Any]:
        """A `chat.completion`."""
        choices = [
            {
                "index": choice.index,
                "message": choice.message.body | {"refusal": None},
                "finish_reason": choice.finish_reason,
                "logprobs": choice.chat_logprobs if self.asked.logprobs else None,
            }
            for choice in self.choices
        ]
        return self._body("chat.completion", choices) | {"usage": self.usage}

    def chat_chunks(self) -> Iterator[dict[str, Any]]:
        """The same as `chat.completion.chunk`s: per choice one with what it says and one with how it ended."""
        for choice in self.choices:
            delta = choice.message.body
            if choice.message.tool_calls:
                delta["tool_calls"] = [
                    call.body | {"index": place}
                    for place, call in enumerate(choice.message.tool_calls)
                ]
            logprobs = choice.chat_logprobs if self.asked.logprobs else None
            said = {
                "index": choice.index,
                "delta": delta,
                "finish_reason": None,
                "logprobs": logprobs,
            }
            yield self._chunk("chat.completion.chunk", [said])
            over = {
                "index": choice.index,
                "delta": {},
                "finish_reason": choice.finish_reason,
                "logprobs": None,
            }
            yield self._chunk("chat.completion.chunk", [over])
        yield from self._usage_chunk("chat.completion.chunk")

    def text_body(self) -> dict[str, Any]:
        """A `text_completion`."""
        return self._body("text_completion", [self._text(choice) for choice in self.choices]) | {
            "usage": self.usage
        }

    def text_chunks(self) -> Iterator[dict[str, Any]]:
        """The same, one chunk per choice."""
        for choice in self.choices:
            yield self._chunk("text_completion", [self._text(choice)])
        yield from self._usage_chunk("text_completion")

    def _text(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.message.content,
            "finish_reason": choice.finish_reason,
            "logprobs": choice.text_logprobs if self.asked.logprobs else None,
        }

    def _usage_chunk(self, kind: str) -> Iterator[dict[str, Any]]:
        if self.asked.include_usage:
            yield self._body(kind, []) | {"usage": self.usage}

    def _chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """With `include_usage` every chunk has the field, and the last one the numbers."""
        return self._body(kind, choices) | ({"usage": None} if self.asked.include_usage else {})

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
