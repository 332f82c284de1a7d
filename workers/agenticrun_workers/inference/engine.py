"""The protocol every inference engine implements. A new engine is one file that does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from agenticrun_workers.types import Generation, GenerationRequest


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Load of one engine, as it reports it. Counters only grow."""

    policy_version: int
    running: int
    waiting: int
    generated_tokens: int
    prompt_tokens: int
    busy_seconds: float
    aborted_tokens: int = 0
    """Sampled tokens of requests that were aborted, or began again with new weights."""


class InferenceEngine(Protocol):
    """Token ids in, token ids and log-probs out. All methods run on one asyncio event loop.

    `policy_version` counts trainer versions: 0 = the initial weights.
    """

    async def start(self) -> None:
        """Load the model and begin to serve. Raises `EngineStartError` with a message for people."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one response. Raises `InvalidRequest` for ids outside the vocabulary, an empty prompt, or one that does not fit."""
        ...

    async def abort(self, request_ids: list[str] | None = None) -> None:
        """End these requests (None: all); their `generate` returns what was sampled so far with finish `abort`."""
        ...

    async def pause(self) -> None:
        """Stop sampling after the current token; requests stay and new ones wait."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`. Requests continue from the tokens they have."""
        ...

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Replace parameters by name (arrays or tensors of the same shape), drop stale caches, and become `version`.

        Requests in flight go on from the tokens they have, or begin again where `staleness.partialRollout` is off.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def stop(self) -> None:
        """Abort everything and leave nothing behind. Safe to call twice."""
        ...


class EngineError(Exception):
    """Base of what engines raise."""


class EngineStartError(EngineError):
    """The engine could not start: wrong model, options or version."""


class InvalidRequest(EngineError):
    """The request can never be served; the engine is unharmed."""
