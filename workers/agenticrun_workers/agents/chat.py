"""Chat templates, rendered piece by piece so that no token is tokenised twice.

Between two responses a template writes the end of the assistant's turn, the user's message and the
start of the next answer. Each piece is rendered inside a small conversation with a marker in place
of the response, and only the text after the marker is tokenised. Sampled tokens and pieces together
equal what the template renders for the whole conversation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from agenticrun_workers.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and for tools `tool_calls` or `tool_call_id`."""

_MARKER = "\N{WHITE SQUARE}answer\N{WHITE SQUARE}"

KEPT_PROMPTS = 4096
KEPT_LENGTH = 1000
"""Longest message, in characters, whose tokens are kept: positions of games come again, the output
of a tool hardly does. So many messages of this length take 22 MB with their tokens (ASCII)."""


class ChatTemplateError(Exception):
    """The chat template cannot be rendered piece by piece."""


class ChatFormat:
    """Token pieces of conversations in the tokenizer's own chat template.

    `end_of_turn` is the token that ends an assistant's turn in the template; `stop_tokens` also
    includes the tokenizer's end of sequence.

    Raises:
        ChatTemplateError: the template changes or hides an assistant's message.
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
                f"after an answer the chat template writes {tail!r}, "
                "which starts with no special token"
            )
        self.end_of_turn = added[self._end_text]
        self.stop_tokens: tuple[int, ...] = tuple(
            {self.end_of_turn, tokenizer.eos_token_id} - {None}
        )
        self._cached_next = lru_cache(KEPT_PROMPTS)(self._next)

    def first(self, system: str, user: str) -> IntArray:
        """Return the tokens up to the first answer, int32 [T]. Empty `system` = no message."""
        messages = [{"role": "system", "content": system}] if system else []
        return self.conversation([*messages, {"role": "user", "content": user}])

    def conversation(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> IntArray:
        """Return the tokens of messages up to the next answer, int32 [T].

        `tools` have the format of OpenAI's API.
        """
        return self._encode(self._render(messages, prompt=True, tools=tools))

    def going_on(
        self,
        before: Sequence[Message],
        added: Sequence[Message],
        *,
        ended: bool,
        tools: Sequence[Message] = (),
    ) -> IntArray:
        """Return the tokens between an answer to `before` and the answer to `added`, int32 [T].

        Raises `ChatTemplateError`, and what the template raises for messages that it rejects.
        """
        tail = self._tail([*before, {"role": "assistant", "content": _MARKER}, *added], tools)
        return self._encode(tail.removeprefix(self._end_text) if ended else tail)

    def shows_tools(self, tools: Sequence[Message]) -> bool:
        """Return True if the chat template renders these tools."""
        asked: list[Message] = [{"role": "user", "content": "?"}]
        return self._render(asked, prompt=True, tools=tools) != self._render(asked, prompt=True)

    def next(self, user: str, *, ended: bool) -> IntArray:
        """Return the tokens between an answer and the next one, int32 [T].

        `ended`: the policy sampled the end-of-turn token itself.
        """
        render = self._cached_next if len(user) <= KEPT_LENGTH else self._next
        return render(user, ended)

    def answer(self, text: str) -> IntArray:
        """Return the tokens of an answer, including the end of turn, int32 [T]."""
        return np.append(self._encode(text), np.int32(self.end_of_turn))

    def text(self, response_T: IntArray) -> str:
        """Return the text of a response without its stop token."""
        if len(response_T) and int(response_T[-1]) in self.stop_tokens:
            response_T = response_T[:-1]
        text: str = self._tokenizer.decode(response_T.tolist(), skip_special_tokens=False)
        return text

    def shown(self, prompt_T: IntArray) -> str:
        """Return the text of a prompt, including special tokens."""
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
"""Placeholders that render as digits."""


def check_template(template: str, fields: Sequence[str]) -> None:
    """Raise `ValueError` if a template uses an unknown field."""
    try:
        template.format_map(dict.fromkeys(fields, ""))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"template {template!r}: {error!r}; known fields are {', '.join(fields)}"
        ) from error


def fixed_text(template: str) -> list[str]:
    """Return a template's text without placeholders, and the digits if it renders numbers."""
    text = re.sub(r"\{(\w*)\}", "", template)
    writes_numbers = any(f"{{{name}}}" in template for name in NUMBERS)
    return [text, *"0123456789"] if writes_numbers else [text]
