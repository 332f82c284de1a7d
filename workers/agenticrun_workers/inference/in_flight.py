"""A request that an engine is working on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from agenticrun_workers.inference.slot_cache import SlotCache
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, IntArray


@dataclass
class Running:
    """A request in flight, and what was sampled for it."""

    request: GenerationRequest
    done: asyncio.Future[Generation]
    session: str
    cache: SlotCache | None = None
    """Where its keys and values are; None until it is admitted."""
    slot: int = -1
    cached: int = 0
    """Leading tokens of `context_T` whose keys and values the slot holds."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def context_T(self) -> IntArray:
        return np.concatenate([self.request.prompt_tokens, np.asarray(self.tokens, np.int32)])

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.request.prompt_tokens) + len(self.tokens) - self.cached

    @property
    def pending_T(self) -> IntArray:
        """Those tokens, without copying the whole context at each step."""
        prompt = len(self.request.prompt_tokens)
        sampled_T = np.asarray(self.tokens[max(0, self.cached - prompt) :], np.int32)
        return np.concatenate([self.request.prompt_tokens[self.cached :], sampled_T])

    def restart(self) -> int:
        """Forget what was sampled; returns how many tokens that were."""
        count = len(self.tokens)
        self.tokens, self.logprobs, self.versions = [], [], []
        return count

    def finish(self, reason: FinishReason) -> None:
        if not self.done.done():
            self.done.set_result(
                Generation(
                    np.asarray(self.tokens, np.int32),
                    np.asarray(self.logprobs, np.float32),
                    np.asarray(self.versions, np.int32),
                    reason,
                )
            )
