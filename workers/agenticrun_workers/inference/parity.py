"""The conversations that show if an engine computes the trainer's model.

Each has two turns: a prompt, a response, the next prompt and a response. One is longer than the
window of the model, so that layers with a window forget its beginning. The trainer scores the
sampled tokens (`trainer.parity`), and `driver.parity` compares.

No torch here: the driver plays the conversations and reads the results.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from agenticrun_workers.types import (
    FloatArray,
    Generation,
    GenerationRequest,
    IntArray,
    SamplingParams,
)

SAMPLED = 16
"""Tokens of a response."""
LENGTH = 256
"""Tokens of the longest conversation of a model without a window."""
BEYOND = 64
"""Tokens by which the longest conversation exceeds the window."""
SHARES = (3, 2, 1)
"""Quarters of `LENGTH` that the other conversations have."""

Answer = Callable[[list[GenerationRequest]], Awaitable[Sequence[Generation]]]
"""Has an engine answer several requests at once."""


@dataclass(frozen=True, slots=True)
class ProbeSample:
    """A conversation as an engine sampled it."""

    tokens_T: IntArray
    turns_T: IntArray
    """Number of the turn on sampled tokens, -1 elsewhere."""
    logprobs_T: FloatArray
    """Log-probs that the engine recorded, 0 elsewhere."""


@dataclass(frozen=True, slots=True)
class Parity:
    """The difference between an engine and the trainer, in nats per sampled token."""

    gap: float
    """Mean |trainer's log-prob - engine's log-prob|."""
    allowed: float
    """Largest difference that rounding explains."""
    tokens: int


@dataclass(frozen=True, slots=True)
class ParityProbe:
    """Random prompts for engines.

    Args:
        prompts: both prompts of each conversation.
        sampled: tokens of each response.
        temperature: of the recorded log-probs.
    """

    prompts: tuple[tuple[IntArray, IntArray], ...]
    sampled: int
    temperature: float

    @staticmethod
    def make(vocabulary: int, window: int, max_length: int, temperature: float) -> ParityProbe:
        """Make random prompts, the same at each call.

        Args:
            vocabulary: number of token ids.
            window: tokens that the most far-sighted layer with a window sees; 0 without one.
            max_length: longest sequence of the run. A longer window never matters in it.
            temperature: of the trainer's log-probs.
        """
        # The same prompts for every engine and at each start, so that answers can be compared.
        random = np.random.default_rng(0)
        longest = max(LENGTH, window + BEYOND) if window < max_length else LENGTH
        lengths = [longest, *(LENGTH * quarters // 4 for quarters in SHARES)]
        # Short enough for both turns to fit a short sequence length.
        sampled = min(SAMPLED, max_length // 8)
        prompts = []
        for length in lengths:
            first = max(1, min(length, max_length) - 3 * sampled)
            prompts.append(
                tuple(
                    random.integers(vocabulary, size=size).astype(np.int32)
                    for size in (first, sampled)
                )
            )
        return ParityProbe(tuple((one, other) for one, other in prompts), sampled, temperature)

    async def play(self, answer: Answer, name: str) -> list[ProbeSample]:
        """Have an engine sample both responses of all conversations.

        Args:
            answer: see `Answer`.
            name: of the requests.

        Raises:
            EngineError: the engine cannot answer.
        """
        contexts = [np.zeros(0, np.int32) for _ in self.prompts]
        turns = list(contexts)
        logprobs = [np.zeros(0, np.float32) for _ in self.prompts]
        # The second turn continues from the cache of the first, which is what may go wrong.
        for turn in range(2):
            contexts = [
                np.concatenate([context_T, prompts[turn]])
                for context_T, prompts in zip(contexts, self.prompts, strict=True)
            ]
            requests = [
                GenerationRequest(
                    f"{name}-{number}-{turn}",
                    # One session for both turns.
                    f"{name}-{number}",
                    context_T,
                    # The whole distribution: log-probs of a truncated one are not the trainer's.
                    SamplingParams(self.sampled, 1.0, record_temperature=self.temperature),
                    seed=number,
                )
                for number, context_T in enumerate(contexts)
            ]
            for number, generation in enumerate(await answer(requests)):
                before = len(contexts[number]) - len(turns[number])
                count = len(generation.tokens_T)
                contexts[number] = np.concatenate([contexts[number], generation.tokens_T])
                turns[number] = np.concatenate(
                    [turns[number], np.full(before, -1), np.full(count, turn)]
                ).astype(np.int32)
                logprobs[number] = np.concatenate(
                    [logprobs[number], np.zeros(before), generation.logprobs_T]
                ).astype(np.float32)
        return [ProbeSample(*arrays) for arrays in zip(contexts, turns, logprobs, strict=True)]
