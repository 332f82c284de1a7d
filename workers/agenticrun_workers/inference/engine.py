"""The protocol every inference engine implements. A new engine is one file that does."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

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
        """Load the model and begin to serve. Raises `EngineStartError`, `UnusableModel` among them, with a message for people."""
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

    async def update_weights(self, parts: AsyncIterable[Path], version: int) -> None:
        """Take over new weights, drop stale caches, and become `version`.

        Sampling stops at a token while weights change. Requests in flight go on from the tokens they have, each token with the version
        that it was sampled with, or begin again where `staleness.partialRollout` is off.

        Args:
            parts: safetensors files, in memory or on disk, that hold all parameters between them: each file some whole ones under their
                Hugging Face names. They come as they get ready, and stay unchanged until this returns.

        Raises:
            EngineError: the engine serves nothing until another update has succeeded.
        """
        ...

    async def sleep(self) -> None:
        """Free the accelerator's memory for a trainer on the same device. There are no requests in flight."""
        ...

    async def wake(self) -> None:
        """Take the memory back. The next `update_weights` brings the weights."""
        ...

    def stats(self) -> EngineStats: ...

    async def stop(self) -> None:
        """Abort everything and leave nothing behind. Safe to call twice."""
        ...


@runtime_checkable
class TakesBroadcast(Protocol):
    """An engine whose processes can be members of a collective with the trainer (`weight_sync.broadcast.WeightGroup`)."""

    @property
    def broadcast_ranks(self) -> int:
        """How many members it needs."""
        ...

    async def join_broadcast(self, host: str, port: int, first_rank: int, world: int) -> None:
        """Meet the trainer and the other engines, with ranks from `first_rank`; leave an earlier group. Raises `EngineError`."""
        ...

    async def update_from_broadcast(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], version: int
    ) -> None:
        """As `InferenceEngine.update_weights`, with parameters that the trainer broadcasts in this order.

        Args:
            dtypes: as torch names them, e.g. `bfloat16`.
        """
        ...


class EngineError(Exception):
    """Base of what engines raise."""


class EngineStartError(EngineError):
    """The engine could not start: wrong model, options or version."""


class UnusableModel(EngineStartError):
    """No engine could start with this model: it cannot be read, or is no causal language model."""


class InvalidRequest(EngineError):
    """The request can never be served; the engine is unharmed."""
