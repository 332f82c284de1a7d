"""What was sampled in one episode, and how later requests go on from it.

A client sends its whole conversation again with every request. The longest part of it that ends with a recorded answer stands for the
recorded tokens; only what came after it is tokenised. So no sampled text is ever tokenised again, and the answers make a tree: a
conversation asked twice or changed half-way is a fork, and one that begins otherwise is a root.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from agenticrun_workers.agents.chat import ChatFormat
from agenticrun_workers.agents.outside.messages import ChatMessage
from agenticrun_workers.agents.sampled_tree import Sampled
from agenticrun_workers.types import IntArray

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer shows for the first bytes of a character."""

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One sampled answer."""

    completion: str
    """The id of the response that it came with, and its place among the n of that."""
    choice: int
    sampled: Sampled
    parent: Answer | None
    conversation: tuple[ChatMessage, ...]
    """All messages, this answer the last."""
    valid: bool
    """Its tool calls could be read."""


class Recorded:
    """The answers of one episode, in the order in which they were sampled."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self.answers: list[Answer] = []
        self._of_chats: dict[tuple[Any, ...], Answer] = {}
        self._of_texts: list[tuple[str, Answer]] = []

    def chat_prompt(
        self, messages: Sequence[ChatMessage], tools: Tools
    ) -> tuple[IntArray, Answer | None]:
        """Tokens of a conversation up to the start of the answer, int32 [T], and the recorded answer that they go on from."""
        templates = [message.for_template for message in messages]
        key = _key(messages, tools)
        for size in range(len(messages), 0, -1):
            before = (
                self._of_chats.get(key[: size + 1])
                if messages[size - 1].role == "assistant"
                else None
            )
            if before is not None:
                tokens_T = before.sampled.generation.tokens_T
                ended = int(tokens_T[-1]) == self._chat.end_of_turn
                added_T = self._chat.going_on(
                    templates[: size - 1], templates[size:], ended=ended, tools=tools
                )
                return np.concatenate([before.sampled.prompt_T, tokens_T, added_T]), before
        return self._chat.conversation(templates, tools), None

    def text_prompt(self, text: str) -> IntArray:
        """Tokens of a text, int32 [T]: as far as it repeats a recorded text, the recorded tokens."""
        best_T, known = np.zeros(0, np.int32), 0
        for prompt, answer in self._of_texts:
            if text.startswith(prompt):
                tokens_T = answer.sampled.generation.tokens_T
                size, said = self._said_of(text[len(prompt) :], tokens_T)
                if size and len(prompt) + said > known:
                    best_T, known = (
                        np.concatenate([answer.sampled.prompt_T, tokens_T[:size]]),
                        len(prompt) + said,
                    )
        rest = self._tokenizer.encode(text[known:], add_special_tokens=not known)
        return np.concatenate([best_T, np.asarray(rest, np.int32)])

    def _said_of(self, text: str, tokens_T: IntArray) -> tuple[int, int]:
        """How many of these tokens the text begins with, and how many of its characters they are."""

        def goes_too_far(size: int) -> bool:
            return not text.startswith(self._chat.shown(tokens_T[:size]).rstrip(UNFINISHED))

        size = bisect_left(range(len(tokens_T) + 1), True, key=goes_too_far) - 1
        while not text.startswith(said := self._chat.shown(tokens_T[:size])):
            size -= 1  # it ends inside of a character
        return size, len(said)

    def parent_of(self, prompt_T: IntArray, matched: Answer | None = None) -> Answer | None:
        """The longest sampled sequence that a prompt begins with; of equal ones the one whose conversation it repeats, else the latest."""
        fitting = [answer for answer in reversed(self.answers) if answer.sampled.begins(prompt_T)]
        return max(
            fitting, key=lambda answer: (answer.sampled.length, answer is matched), default=None
        )

    def add(self, answer: Answer, tools: Tools = (), text: str | None = None) -> None:
        """Remember an answer: to a conversation with these tools, or to the prompt `text`."""
        self.answers.append(answer)
        if text is None:
            self._of_chats[_key(answer.conversation, tools)] = answer
        else:
            self._of_texts.append((text, answer))

    def find(self, completion: str, choice: int) -> Answer | None:
        """The answer with this id and place."""
        return next(
            (
                answer
                for answer in self.answers
                if (answer.completion, answer.choice) == (completion, choice)
            ),
            None,
        )

    def branches(self) -> list[list[Answer]]:
        """What each trajectory trains: for every answer that nothing went on from, the answers up to it.

        An answer with several that go on from it is trained once, in the latest of its branches.
        """
        went_on = {id(answer.parent) for answer in self.answers}
        trained: set[int] = set()
        branches: list[list[Answer]] = []
        for leaf in reversed([answer for answer in self.answers if id(answer) not in went_on]):
            branch: list[Answer] = []
            answer: Answer | None = leaf
            while answer is not None and id(answer) not in trained:
                trained.add(id(answer))
                branch.append(answer)
                answer = answer.parent
            branches.append(branch[::-1])
        return branches[::-1]


def _key(messages: Sequence[ChatMessage], tools: Tools) -> tuple[Any, ...]:
    """Equal for conversations that say the same: the tools, and one item for each message."""
    return json.dumps(list(tools), sort_keys=True), *(message.identity for message in messages)
