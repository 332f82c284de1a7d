"""The protocol of inference engines, their statistics and their errors.

A new engine is one class with the methods of `InferenceEngine`; `builder` makes it by its name.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from agenticrun_workers.types import FinishReason, Generation, GenerationRequest

log = logging.getLogger(__name__)

ABORTED_UNSAMPLED = Generation(
    np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), FinishReason.ABORT
)
"""The result of a request that is aborted before its first token is sampled."""


STEP_SECONDS = 300.0
"""Longest time that an engine may need for one step. A first step may compile.

The limits of SGLang (`watchdog_timeout`) and vLLM (`VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`) are the
same.
"""
STREAM_SECONDS = 1.0
"""Time between two events of a server about the tokens of a request."""
STREAM_TOKENS = 8
"""Smallest number of tokens in such an event."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Load of one engine, as it reports it. Counters only grow."""

    policy_version: int
    running: int
    waiting: int
    generated_tokens: int
    prompt_tokens: int
    busy_seconds: float
    """Time with at least one request in computation."""
    aborted_tokens: int = 0
    """Sampled tokens of requests that were aborted, or restarted because of new weights."""
    seats: int = 1
    """Largest number of requests that the engine computes at once."""
    seat_seconds: float = 0.0
    """Sum over seats of the time with a request in computation."""
    kv_used: float = 0.0
    """Sum over polls (`check_health`) of the share of the KV cache that is in use."""
    kv_polls: int = 0
    computed_tokens: int | None = None
    """Tokens of prompts and responses computed so far, those of requests in flight included. It may
    count some twice: it only distinguishes a computing engine from a stuck one. None: the
    engine does not know."""
    prefilling: int = 0
    """Tokens in computation that `computed_tokens` will count all at once, in the end."""
    held: bool = False
    """It computes nothing on purpose: it is paused, sleeps, or waits for weights."""


class LoadMeter:
    """Measures how much of an engine is used.

    Args:
        seats: largest number of requests that the engine computes at once.
    """

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self.kv_used = 0.0
        """As in `EngineStats`."""
        self.kv_polls = 0
        self._running = 0
        self._held = False
        self._unreadable = False
        self._kv_tokens: int | None = None
        self._kv_growth = 0
        self._changed = time.perf_counter()
        self._busy_seconds = self._seat_seconds = 0.0

    @property
    def busy_seconds(self) -> float:
        """As in `EngineStats`."""
        self._count()
        return self._busy_seconds

    @property
    def seat_seconds(self) -> float:
        """As in `EngineStats`."""
        self._count()
        return self._seat_seconds

    @contextmanager
    def running(self, requests: int = 1) -> Iterator[None]:
        """Count requests as in computation inside the `with` block; those above `seats` wait."""
        self._count()
        self._running += requests
        try:
            yield
        finally:
            self._count()
            self._running -= requests

    @contextmanager
    def held(self) -> Iterator[None]:
        """Count nothing inside the `with` block: the requests wait for new weights."""
        self._count()
        self._held = True
        try:
            yield
        finally:
            self._count()
            self._held = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Log the first `EngineError` of the `with` block: an engine may serve without its load."""
        try:
            yield
        except EngineError as error:
            if not self._unreadable:
                log.warning("no rollout/kv_usage, because the load cannot be read: %s", error)
            self._unreadable = True

    def stream_interval(self, generated: int) -> int:
        """Return how many tokens a response gets in `STREAM_SECONDS`, but at least `STREAM_TOKENS`.

        A server sends the tokens of a request in events of so many tokens.

        Args:
            generated: tokens that the engine has sampled so far.
        """
        # Nothing is measured yet.
        if not (seconds := self.seat_seconds):
            return STREAM_TOKENS
        return max(STREAM_TOKENS, round(STREAM_SECONDS * generated / seconds))

    def poll_kv(self, share: float) -> None:
        """Record the share of the KV cache that is in use now."""
        self.kv_used += share
        self.kv_polls += 1

    def poll_kv_tokens(self, tokens: int) -> None:
        """Record the number of tokens in the KV cache. Each that is added was computed."""
        # Only growth counts: tokens that leave the cache were computed, too.
        self._kv_growth += max(0, tokens - (self._kv_tokens or 0))
        self._kv_tokens = tokens

    def computed(self, counted: int) -> int | None:
        """Return `EngineStats.computed_tokens`; None before the first poll, or if one failed.

        Args:
            counted: tokens that the engine has counted otherwise.
        """
        # Without the cache's numbers a stuck engine cannot be distinguished from a prefilling one.
        if self._unreadable or self._kv_tokens is None:
            return None
        return counted + self._kv_growth

    def _count(self) -> None:
        """Add the time since the last change."""
        now = time.perf_counter()
        # Time in which it waits for weights is the sync's, not the engine's.
        if not self._held:
            self._busy_seconds += (now - self._changed) * (self._running > 0)
            self._seat_seconds += (now - self._changed) * min(self._running, self.seats)
        self._changed = now


class InferenceEngine(Protocol):
    """Token ids in, token ids and log-probs out. All methods run on one asyncio event loop.

    `policy_version` counts the trainer's versions: 0 = the initial weights.
    """

    enforces_formats: bool = False
    """True if requests may have a `structural_tag`."""

    async def start(self) -> None:
        """Load the model and begin to serve.

        Raises:
            EngineStartError: the engine cannot start; `UnusableModel` if the model is the cause.
        """
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one response.

        Raises:
            InvalidRequest: the prompt is empty, holds ids outside the vocabulary, or does not fit.
        """
        ...

    async def abort(self, request_ids: list[str] | None = None) -> None:
        """End these requests, or all of them if None.

        Their `generate` returns the tokens sampled so far with finish reason `abort`.
        """
        ...

    async def pause(self) -> None:
        """Stop sampling after the current token. Requests stay, and new ones wait."""
        ...

    async def resume(self) -> None:
        """Continue after `pause`. Requests keep the tokens they have."""
        ...

    async def update_weights(self, parts: AsyncIterable[Path], version: int) -> None:
        """Load new weights, drop stale caches, and become `version`.

        Sampling stops at a token while weights change. Requests in flight keep their tokens, each
        with the version that sampled it, or restart where `staleness.partialRollout` is off.

        Args:
            parts: safetensors files, in memory or on disk, which together hold all parameters
                under their Hugging Face names. They arrive one by one and stay unchanged until
                this method returns.
            version: policy version of the new weights.

        Raises:
            EngineError: the update failed; the engine serves nothing until another one succeeds.
        """
        ...

    async def sleep(self) -> None:
        """Free the accelerator's memory for a trainer on the same device.

        Call it with no request in flight.
        """
        ...

    async def wake(self) -> None:
        """Allocate the memory again. The next `update_weights` loads the weights."""
        ...

    def stats(self) -> EngineStats: ...

    async def check_health(self) -> None:
        """Return when the engine's own processes have answered, during an update after it.

        Raises:
            EngineError: they do not answer, and were killed; or the engine has failed.
        """
        ...

    async def stop(self) -> None:
        """Abort all requests and release everything. Safe to call twice."""
        ...


@dataclass(slots=True)
class SampledTokens:
    """The tokens of a request in flight, with the log-prob and the policy version of each."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def extend(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        spans: Iterable[Mapping[str, Any]],
    ) -> None:
        """Add tokens that a server has sent.

        Args:
            tokens: the new ones.
            logprobs: one per new token.
            spans: the versions of the whole response, as both servers report them: `version`, and
                the tokens from `start` to before `end` that it sampled.

        Raises:
            ValueError: some tokens have not come, or lack their log-prob.
            TypeError: a token or a log-prob is no number of its kind.
            OverflowError: a token does not fit into 32 bits.
        """
        first, size = len(self.tokens), len(self.tokens) + len(tokens)
        # A server that lost some would shift all later log-probs by one.
        if len(logprobs) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens with {len(logprobs)} log-probs")
        versions_T = np.full(size, -1)
        for span in spans:
            if span["end"] > size:
                raise ValueError(f"versions of {span['end']} tokens, of which {size} have come")
            versions_T[span["start"] : span["end"]] = int(span["version"])
        self.tokens += array("i", tokens)
        self.logprobs += array("d", logprobs)
        self.versions += versions_T[first:].tolist()

    def since(self, start: int) -> Generation | None:
        """Return the tokens from number `start` on; None if there are none."""
        return self._generation(start, FinishReason.ABORT) if len(self) > start else None

    def response(self, reason: FinishReason) -> Generation:
        """Return all tokens as a finished response."""
        return self._generation(0, reason)

    def _generation(self, start: int, reason: FinishReason) -> Generation:
        return Generation(
            np.asarray(self.tokens[start:], np.int32),
            np.asarray(self.logprobs[start:], np.float32),
            np.asarray(self.versions[start:], np.int32),
            reason,
        )


@runtime_checkable
class ReportsProgress(Protocol):
    """An engine that shows what it has sampled for requests in flight.

    Clients keep these tokens. If the engine is lost, another one continues from them.
    """

    def progress(self, request_id: str, start: int) -> Generation | None:
        """Return the tokens of a request from number `start` on, but never a whole response.

        None if there are none yet, or if another engine must not continue from them: it would
        compute other log-probs than an undisturbed one (`deterministic`), or mix versions
        (`staleness.partialRollout: false`).
        """
        ...


@runtime_checkable
class SupportsBroadcast(Protocol):
    """An engine whose processes can join a collective with the trainer.

    See `weights.collective.WeightGroup`.
    """

    @property
    def broadcast_ranks(self) -> int:
        """Number of ranks that the engine needs in the collective."""
        ...

    async def join_broadcast(self, host: str, port: int, first_rank: int, world: int) -> None:
        """Join the collective with ranks from `first_rank`, and leave an earlier one.

        Raises:
            EngineError: the trainer cannot be reached.
        """
        ...

    async def update_from_broadcast(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], version: int
    ) -> None:
        """Load parameters that the trainer broadcasts in this order.

        Otherwise as `InferenceEngine.update_weights`.

        Args:
            names: Hugging Face names of the parameters.
            dtypes: torch's names, e.g. `bfloat16`.
            shapes: one per parameter.
            version: policy version of the new weights.
        """
        ...


class EngineError(Exception):
    """Base class of the errors that engines raise."""


class EngineStartError(EngineError):
    """The engine cannot start: wrong model, options or version."""


class UnusableModel(EngineStartError):
    """No engine can start with this model: it is unreadable or not a causal language model."""


class InvalidRequest(EngineError):
    """The engine can never serve this request. The engine itself is unharmed.

    Args:
        message: for logs.
        reason: for the client that sent the request. Default: the message.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = message if reason is None else reason
