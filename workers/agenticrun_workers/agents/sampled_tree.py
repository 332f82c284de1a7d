"""Responses of one episode as a tree, linked by token prefixes.

The parent of a prompt is the longest sampled sequence that it starts with; without one, the prompt
is a root. So log-probs, versions and masks always come from the generation itself, even if an agent
edits the conversation between two requests.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agenticrun_workers.agents.chat import ChatFormat
from agenticrun_workers.types import Generation, IntArray, Turn


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """One response with its prompt and its parent response."""

    prompt_T: IntArray
    """The whole prompt."""
    generation: Generation
    parent: Sampled | None

    @property
    def length(self) -> int:
        """Number of tokens in the prompt and the response."""
        return len(self.prompt_T) + len(self.generation.tokens_T)

    @property
    def added_T(self) -> IntArray:
        """Tokens that the prompt adds to its parent's sequence."""
        return self.prompt_T[self.parent.length if self.parent else 0 :]

    def begins(self, prompt_T: IntArray) -> bool:
        """Return True if a prompt starts with this prompt and response."""
        size = len(self.prompt_T)
        return (
            self.length <= len(prompt_T)
            # First, because it is short and differs where conversations do.
            and np.array_equal(self.generation.tokens_T, prompt_T[size : self.length])
            and np.array_equal(self.prompt_T, prompt_T[:size])
        )

    def path(self) -> list[Sampled]:
        """Return the responses from the root to this one."""
        return [*(self.parent.path() if self.parent else []), self]

    def turn(self, chat: ChatFormat, reward: float, *, valid: bool = True) -> Turn:
        """Return the turn of this response. Its prompt is `added_T`."""
        generation = self.generation
        return Turn(
            self.added_T,
            generation.tokens_T,
            generation.logprobs_T,
            generation.versions_T,
            reward,
            valid=valid,
            state=hashlib.sha256(self.prompt_T.tobytes()).digest(),
            action=chat.text(generation.tokens_T).strip(),
            engine=generation.engine,
        )


class SampledTree:
    """The responses of one episode."""

    def __init__(self) -> None:
        self._sampled: list[Sampled] = []
        self._by_tokens: dict[bytes, list[Sampled]] = defaultdict(list)
        self._returned: dict[bytes, int] = defaultdict(int)

    def add(self, prompt_T: IntArray, generation: Generation) -> None:
        """Add a response to this prompt, int32 [T]."""
        parent = max(
            (one for one in self._sampled if one.begins(prompt_T)),
            key=lambda one: one.length,
            default=None,
        )
        sampled = Sampled(prompt_T, generation, parent)
        self._sampled.append(sampled)
        self._by_tokens[np.concatenate([prompt_T, generation.tokens_T]).tobytes()].append(sampled)

    def find(self, tokens: Sequence[int]) -> Sampled | None:
        """Return the response with exactly these tokens, or None.

        Equal samples are returned in order: the k-th call with the same tokens gets the k-th one.
        """
        key = np.asarray(tokens, np.int32).tobytes()
        equal = self._by_tokens.get(key)
        if equal is None:
            return None
        place = self._returned[key]
        self._returned[key] += 1
        return equal[place % len(equal)]
