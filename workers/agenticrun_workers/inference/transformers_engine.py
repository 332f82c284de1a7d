"""An inference engine inside the process: continuous batching on any causal language model of transformers, on CPU or GPU.

Requests join and leave between two forward passes. Each session (trajectory) keeps its keys and values between turns, so a
turn only computes its new tokens; a weight update drops them, and requests in flight go on from the tokens they have.

Why not transformers' own `generate_batch`: it keeps no cache between the turns of a session, its weights cannot change while
requests are in flight, and its paged attention costs more per step than a whole forward pass of the tiny models this engine
is for. Large models belong on SGLang or vLLM.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from agenticrun_workers.inference.engine import EngineError, EngineStartError, EngineStats, InvalidRequest
from agenticrun_workers.inference.sampling import sample_tokens, uniforms
from agenticrun_workers.inference.slot_cache import SlotCache
from agenticrun_workers.models.heads import UnsupportedModel, split_model
from agenticrun_workers.models.loading import ModelLoadError
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, IntArray


@dataclass
class _Session:
    """A slot of the cache and the tokens whose keys and values it holds."""

    slot: int
    cached_T: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    busy: bool = False


@dataclass
class _Running:
    """A request in flight."""

    request: GenerationRequest
    done: asyncio.Future[Generation]
    session: str
    slot: int = -1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached: int = 0
    """Leading tokens of `context_T` whose keys and values the slot holds."""

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


class TransformersEngine:
    """See the module's docstring; the protocol is `InferenceEngine`.

    Args:
        load: makes the model; called in the engine's thread by `start`.
        max_length: longest sequence, prompt and response.
        max_sessions: how many sessions keep their cache; also the number of requests computed at once.
        max_step_tokens: most tokens (with padding) of one forward pass.
        version: policy version of the weights that `load` returns.
    """

    def __init__(
        self,
        load: Callable[[], PreTrainedModel],
        *,
        max_length: int,
        max_sessions: int = 256,
        max_step_tokens: int = 8192,
        version: int = 0,
    ) -> None:
        self._load = load
        self._max_length = max_length
        self._max_sessions = max_sessions
        self._max_step_tokens = max_step_tokens
        self._version = version
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._waiting: OrderedDict[str, _Running] = OrderedDict()
        self._running: dict[str, _Running] = {}
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._free_slots = list(range(max_sessions - 1, -1, -1))
        self._work = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._between_steps = asyncio.Lock()
        self._server: asyncio.Task[None] | None = None
        self._generated = self._prompted = 0
        self._busy = 0.0

    async def start(self) -> None:
        """See `InferenceEngine`."""
        try:
            self._model = await self._in_thread(self._load)
            self._decoder, self._head = await self._in_thread(split_model, self._model)
        except (ModelLoadError, UnsupportedModel) as error:
            raise EngineStartError(str(error)) from error
        self._vocabulary = int(self._model.get_input_embeddings().weight.shape[0])
        self._parameters = dict(self._model.named_parameters())
        self._cache = SlotCache()
        self._server = asyncio.create_task(self._serve(), name="transformers-engine")

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine`."""
        self._check(request)
        running = _Running(request, asyncio.get_running_loop().create_future(), request.session)
        self._waiting[request.request_id] = running
        self._work.set()
        try:
            return await running.done
        finally:
            self._waiting.pop(request.request_id, None)

    async def abort(self, request_ids: list[str] | None = None) -> None:
        """See `InferenceEngine`."""
        async with self._between_steps:
            for request_id in [*self._waiting, *self._running] if request_ids is None else request_ids:
                if (running := self._waiting.pop(request_id, None)) or (running := self._running.get(request_id)):
                    self._release(running, FinishReason.ABORT)

    async def pause(self) -> None:
        """See `InferenceEngine`."""
        self._open.clear()
        async with self._between_steps:
            pass

    async def resume(self) -> None:
        """See `InferenceEngine`."""
        self._open.set()

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """See `InferenceEngine`. Raises `EngineError` and changes nothing if a name or shape is wrong."""
        for name, value in weights.items():
            held = self._parameters.get(name)
            if held is None or tuple(held.shape) != tuple(value.shape):
                shape = None if held is None else tuple(held.shape)
                raise EngineError(f"weights for {name} have shape {tuple(value.shape)}, the model has {shape}")
        async with self._between_steps:
            await self._in_thread(self._copy, weights)
            self._version = version
            for session in self._sessions.values():
                session.cached_T = session.cached_T[:0]
            for running in self._running.values():
                running.cached = 0

    def stats(self) -> EngineStats:
        """See `InferenceEngine`."""
        return EngineStats(self._version, len(self._running), len(self._waiting), self._generated, self._prompted, self._busy)

    async def stop(self) -> None:
        """See `InferenceEngine`."""
        if self._server is not None:
            await self.abort()
            self._server.cancel()
            await asyncio.gather(self._server, return_exceptions=True)
            self._server = None
        self._thread.shutdown()

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _check(self, request: GenerationRequest) -> None:
        ids_T, sampling = request.prompt_tokens, request.sampling
        if self._server is None:
            raise EngineError("the engine is not running")
        if self._server.done():
            raise EngineError("the engine has failed") from self._server.exception()
        if request.request_id in self._waiting or request.request_id in self._running:
            raise InvalidRequest(f"request {request.request_id} is already in flight")
        if not len(ids_T):
            raise InvalidRequest("the prompt is empty")
        if int(ids_T.min()) < 0 or int(ids_T.max()) >= self._vocabulary:
            raise InvalidRequest(f"token ids must be in [0, {self._vocabulary}): {int(ids_T.min())}..{int(ids_T.max())}")
        if sampling.max_new_tokens < 1 or len(ids_T) + sampling.max_new_tokens > self._max_length:
            raise InvalidRequest(f"{len(ids_T)} prompt tokens and {sampling.max_new_tokens} new ones do not fit into {self._max_length}")

    async def _serve(self) -> None:
        """Step after step for ever, with the event loop free while a step is computed."""
        try:
            while True:
                await self._open.wait()
                if not self._waiting and not self._running:
                    self._work.clear()
                    await self._work.wait()
                await asyncio.sleep(0)
                async with self._between_steps:
                    if self._open.is_set():
                        self._admit()
                        for batch in self._batches():
                            sampled = await self._in_thread(self._forward, batch)
                            self._deliver(batch, *sampled)
        except Exception as error:
            for running in [*self._waiting.values(), *self._running.values()]:
                if not running.done.done():
                    running.done.set_exception(EngineError(f"the engine failed: {error}"))
            raise

    def _admit(self) -> None:
        """Give waiting requests a slot, their session's own where it still has one."""
        while self._waiting and len(self._running) < self._max_sessions:
            request_id, running = self._waiting.popitem(last=False)
            if running.done.done():
                continue
            if running.session in self._sessions and self._sessions[running.session].busy:
                running.session = request_id
            session = self._sessions.get(running.session)
            if session is None:
                session = self._sessions[running.session] = _Session(self._take_slot())
            session.busy = True
            self._sessions.move_to_end(running.session)
            prompt_T = running.request.prompt_tokens
            running.slot = session.slot
            running.cached = min(_common_prefix(session.cached_T, prompt_T), len(prompt_T) - 1)
            self._prompted += len(prompt_T) - running.cached
            self._running[request_id] = running

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        oldest = next(name for name, session in self._sessions.items() if not session.busy)
        return self._sessions.pop(oldest).slot

    def _batches(self) -> list[list[_Running]]:
        """Requests in flight, split so that rows of one batch have about the same number of tokens to compute."""
        batches: list[list[_Running]] = []
        for running in sorted(self._running.values(), key=lambda r: (r.pending, r.slot)):
            last = batches[-1] if batches else []
            fits = bool(last) and (len(last) + 1) * running.pending <= self._max_step_tokens
            if fits and running.pending <= 2 * last[0].pending and (running.pending == 1) == (last[0].pending == 1):
                last.append(running)
            else:
                batches.append([running])
        return [sorted(batch, key=lambda r: r.slot) for batch in batches]

    @torch.inference_mode()
    def _forward(self, batch: list[_Running]) -> tuple[list[int], list[float]]:
        """Compute the pending tokens of each request and sample its next one. Runs in the engine's thread."""
        began = time.perf_counter()
        device = self._model.device
        pending_B = torch.tensor([running.pending for running in batch])
        starts_B = torch.tensor([running.cached for running in batch])
        width = int(pending_B.max())
        visible = int((starts_B + width).max())
        ids_BQ = torch.zeros(len(batch), width, dtype=torch.long)
        for row, running in enumerate(batch):
            ids_BQ[row, : running.pending] = torch.from_numpy(running.pending_T)
        positions_BQ = starts_B[:, None] + torch.arange(width)
        mask_B1QK = (torch.arange(visible) <= positions_BQ[..., None])[:, None]
        self._cache.select(torch.tensor([r.slot for r in batch], device=device), starts_B.to(device), width, visible)
        hidden_BQH = self._decoder(
            input_ids=ids_BQ.to(device),
            position_ids=positions_BQ.to(device),
            attention_mask=mask_B1QK.to(device),
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        last_BH = hidden_BQH[torch.arange(len(batch), device=device), (pending_B - 1).to(device)]
        seeds_B = np.array([running.request.seed for running in batch], np.uint64)
        indices_B = np.array([len(running.tokens) for running in batch], np.uint64)
        tokens_B, logprobs_B = sample_tokens(
            self._head(last_BH), [running.request.sampling for running in batch], uniforms(seeds_B, indices_B)
        )
        result = tokens_B.tolist(), logprobs_B.tolist()
        self._busy += time.perf_counter() - began
        return result

    def _deliver(self, batch: list[_Running], tokens: list[int], logprobs: list[float]) -> None:
        for running, token, logprob in zip(batch, tokens, logprobs, strict=True):
            running.cached += running.pending
            running.tokens.append(token)
            running.logprobs.append(logprob)
            running.versions.append(self._version)
            self._generated += 1
            sampling = running.request.sampling
            if running.done.cancelled():
                self._release(running, FinishReason.ABORT)
            elif token in sampling.stop_token_ids:
                self._release(running, FinishReason.STOP)
            elif len(running.tokens) >= sampling.max_new_tokens:
                self._release(running, FinishReason.LENGTH)

    def _release(self, running: _Running, reason: FinishReason) -> None:
        """End a request; its session keeps what was computed."""
        if self._running.pop(running.request.request_id, None) is not None:
            session = self._sessions[running.session]
            session.busy = False
            session.cached_T = running.context_T[: running.cached]
        running.finish(reason)

    @torch.no_grad()
    def _copy(self, weights: Mapping[str, Any]) -> None:
        for name, value in weights.items():
            self._parameters[name].copy_(torch.as_tensor(value))


def _common_prefix(a_T: IntArray, b_T: IntArray) -> int:
    length = min(len(a_T), len(b_T))
    different = np.flatnonzero(a_T[:length] != b_T[:length])
    return int(different[0]) if len(different) else length
