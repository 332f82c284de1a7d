"""The chat template, rendered piece by piece so that nothing is ever tokenised twice.

A conversation grows by what the template puts between two responses: the end of the assistant's turn, the user's message
and the start of the next answer. Each piece is rendered inside a small conversation with a marker where the response
stands, and only the text after the marker is tokenised. Joined with the sampled tokens, the pieces are what the template
would have rendered for the whole conversation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from agenticrun_workers.types import IntArray

Message = Mapping[str, Any]
"""A message as chat templates take it: `role`, `content`, and for tools `tool_calls` or `tool_call_id`."""

_MARKER = "\N{WHITE SQUARE}answer\N{WHITE SQUARE}"


class ChatTemplateError(Exception):
    """The chat template cannot be rendered piece by piece."""


class ChatFormat:
    """Token pieces of conversations in the tokenizer's own chat template.

    `end_of_turn` is the token that ends an assistant's turn, found in the template itself; `stop_tokens` are that one and the
    tokenizer's end of sequence.
    Raises `ChatTemplateError` if the template changes or hides what an assistant said.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        tail = self._after_marker(None)
        added: dict[str, int] = tokenizer.get_added_vocab()
        self._end_text = max(
            (token for token in added if tail.startswith(token)), key=len, default=""
        )
        if not self._end_text:
            raise ChatTemplateError(
                f"after an answer the chat template writes {tail!r}, which starts with no special token"
            )
        self.end_of_turn = added[self._end_text]
        self.stop_tokens: tuple[int, ...] = tuple(
            {self.end_of_turn, tokenizer.eos_token_id} - {None}
        )
        self._cached_next = lru_cache(maxsize=4096)(self._next)

    def first(self, system: str, user: str) -> IntArray:
        """Tokens up to the start of the first answer, int32 [T]. An empty `system` adds no system message."""
        messages = [{"role": "system", "content": system}] if system else []
        return self.conversation([*messages, {"role": "user", "content": user}])

    def conversation(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> IntArray:
        """Tokens of these chat messages up to the start of the answer, int32 [T]. `tools` are described as OpenAI's API does."""
        return self._encode(self._render(messages, prompt=True, tools=tools))

    def going_on(
        self,
        before: Sequence[Message],
        added: Sequence[Message],
        *,
        ended: bool,
        tools: Sequence[Message] = (),
    ) -> IntArray:
        """Tokens between an answer to `before` and the next one, where `added` messages of any roles came in between, int32 [T].

        Raises `ChatTemplateError`, and whatever the template raises for messages that it refuses.
        """
        tail = self._tail([*before, {"role": "assistant", "content": _MARKER}, *added], tools)
        return self._encode(tail.removeprefix(self._end_text) if ended else tail)

    def shows_tools(self, tools: Sequence[Message]) -> bool:
        """Whether the chat template tells the policy about them."""
        asked: list[Message] = [{"role": "user", "content": "?"}]
        return self._render(asked, prompt=True, tools=tools) != self._render(asked, prompt=True)

    def next(self, user: str, *, ended: bool) -> IntArray:
        """Tokens between an answer and the next one, int32 [T]; `ended` says that the policy sampled the end of turn itself."""
        return self._cached_next(user, ended)

    def answer(self, text: str) -> IntArray:
        """An answer as a policy would sample it, end of turn included, int32 [T]."""
        return np.append(self._encode(text), np.int32(self.end_of_turn))

    def text(self, response_T: IntArray) -> str:
        """What a response says, without the token that ended it."""
        if len(response_T) and int(response_T[-1]) in self.stop_tokens:
            response_T = response_T[:-1]
        text: str = self._tokenizer.decode(response_T.tolist(), skip_special_tokens=False)
        return text

    def shown(self, prompt_T: IntArray) -> str:
        """A prompt as the policy saw it, the template's marks included."""
        text: str = self._tokenizer.decode(prompt_T.tolist(), skip_special_tokens=False)
        return text

    def _next(self, user: str, ended: bool) -> IntArray:
        tail = self._after_marker(user)
        tokens = self._encode(tail.removeprefix(self._end_text) if ended else tail)
        tokens.setflags(write=False)
        return tokens

    def _after_marker(self, user: str | None) -> str:
        messages: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _MARKER},
        ]
        if user is not None:
            messages.append({"role": "user", "content": user})
        return self._tail(messages, (), prompt=user is not None)

    def _tail(
        self, messages: Sequence[Message], tools: Sequence[Message], *, prompt: bool = True
    ) -> str:
        _, marker, tail = self._render(messages, prompt=prompt, tools=tools).partition(_MARKER)
        if not marker:
            raise ChatTemplateError(
                "the chat template does not write an assistant's message as it was given"
            )
        return tail

    def _render(
        self, messages: Sequence[Message], *, prompt: bool, tools: Sequence[Message] = ()
    ) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [*messages], tools=[*tools] or None, tokenize=False, add_generation_prompt=prompt
        )
        return text

    def _encode(self, text: str) -> IntArray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)


NUMBERS = ("turn", "turns_left", "max_tokens", "step_count", "history_length")
"""Placeholders that become digits."""


def check_template(template: str, fields: Sequence[str]) -> None:
    """Raise `ValueError` if a template asks for anything but these fields."""
    try:
        template.format_map(dict.fromkeys(fields, ""))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"template {template!r}: {error!r}; known fields are {', '.join(fields)}"
        ) from error


def fixed_text(template: str) -> list[str]:
    """What a template writes itself: its text without the placeholders, and digits if it writes numbers."""
    text = re.sub(r"\{(\w*)\}", "", template)
    writes_numbers = any(f"{{{name}}}" in template for name in NUMBERS)
    return [text, *"0123456789"] if writes_numbers else [text]
