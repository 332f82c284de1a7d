"""The embedded engine: continuous batching on any causal language model of transformers.

It runs on a CPU or a GPU. Requests join and leave between two forward passes. Each session
(trajectory) keeps its keys and values between turns, so a turn computes only its new tokens. A
weight update drops them, and requests in flight continue from the tokens they have.

Why not the `generate_batch` of transformers: it keeps no cache between the turns of a session, its
weights cannot change while requests are in flight, and its paged attention costs more per step than
a whole forward pass of the tiny models that this engine is for. Large models belong on SGLang or
vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections import ChainMap
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from agenticrun_workers.inference.engine import (
    EngineError,
    EngineStats,
    InferenceEngine,
    LoadMeter,
    ReportsProgress,
    SupportsBroadcast,
    UnusableModel,
)
from agenticrun_workers.inference.model_files import RequestLimits
from agenticrun_workers.inference.transformers.caches import (
    Caches,
    Forward,
    PrivateCaches,
    RunningRequest,
    SessionCaches,
    SharedPrefix,
)
from agenticrun_workers.inference.transformers.parity import check_parity, refuse_states
from agenticrun_workers.models.heads import UnsupportedModel
from agenticrun_workers.models.pretrained import ModelLoadError
from agenticrun_workers.models.stored_names import stored_buffers, stored_parts
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest
from agenticrun_workers.weights.buckets import SafetensorsReader
from agenticrun_workers.weights.collective import WeightGroup

log = logging.getLogger(__name__)


@dataclass
class LoadedModel:
    """A model that can compute."""

    model: PreTrainedModel
    compute: Forward
    limits: RequestLimits
    weights: EngineWeights


class TransformersEngine(InferenceEngine, SupportsBroadcast, ReportsProgress):
    """The embedded engine; see the module's docstring. Implements `InferenceEngine`.

    Args:
        load: loads the model; `start` calls it in the engine's thread.
        max_length: longest sequence, prompt and response.
        max_sessions: number of sessions that keep their cache, and of requests computed at once.
        max_step_tokens: most tokens, with padding, of one forward pass.
        version: policy version of the weights that `load` returns.
        batch_invariant: compute each request alone and without a cached prefix, so that no bit of
            its result depends on other requests (`pipeline.deterministic`).
        restart_on_update: new weights restart the responses in flight, so that each has one version
            (`staleness.partialRollout: false`).
    """

    def __init__(
        self,
        load: Callable[[], PreTrainedModel],
        *,
        max_length: int,
        max_sessions: int = 256,
        max_step_tokens: int = 8192,
        version: int = 0,
        batch_invariant: bool = False,
        restart_on_update: bool = False,
    ) -> None:
        self._load = load
        self._loaded: LoadedModel | None = None
        """None until `start`."""
        self._max_length = max_length
        self._max_sessions = max_sessions
        self._max_step_tokens = max_step_tokens
        self._version = version
        self._batch_invariant = batch_invariant
        self._restart_on_update = restart_on_update
        self._caches = self._new_caches()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._waiting: dict[str, RunningRequest] = {}
        self._running: dict[str, RunningRequest] = {}
        self._work = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._ready = asyncio.Event()
        """Set while the model has weights."""
        self._refusal: str | None = None
        """Why new requests are refused instead of waiting for `_ready`, or None."""
        self._between_steps = asyncio.Lock()
        self._server: asyncio.Task[None] | None = None
        self._generated = self._prompted = self._aborted = 0
        self._computed = self._prefilling = 0
        """As in `EngineStats`; changed in the engine's thread."""
        self._load_meter = LoadMeter(max_sessions)
        self._logged_bytes = 0

    @override
    async def start(self) -> None:
        try:
            self._loaded = await self._in_thread(self._load_checked)
        except (ModelLoadError, UnsupportedModel) as error:
            raise UnusableModel(str(error)) from error
        self._ready.set()
        self._server = asyncio.create_task(self._serve(), name="transformers-engine")

    @override
    async def generate(self, request: GenerationRequest) -> Generation:
        self._check(request)
        running = RunningRequest(
            request, asyncio.get_running_loop().create_future(), request.session
        )
        self._waiting[request.request_id] = running
        self._work.set()
        try:
            return await running.done
        finally:
            self._waiting.pop(request.request_id, None)

    @override
    def progress(self, request_id: str, start: int) -> Generation | None:
        running = self._running.get(request_id)
        # Another engine must not continue from these tokens, see `ReportsProgress`.
        if running is None or self._batch_invariant or self._restart_on_update:
            return None
        return running.sampled.since(start)

    @override
    async def abort(self, request_ids: list[str] | None = None) -> None:
        # The step in progress would otherwise write into slots that are already free.
        async with self._between_steps:
            for request_id in (
                [*self._waiting, *self._running] if request_ids is None else request_ids
            ):
                if (running := self._waiting.pop(request_id, None)) or (
                    running := self._running.get(request_id)
                ):
                    self._release(running, FinishReason.ABORT)

    @override
    async def pause(self) -> None:
        self._open.clear()
        # Returns when the step in progress has ended: nothing is sampled after that.
        async with self._between_steps:
            pass

    @override
    async def resume(self) -> None:
        self._open.set()

    @override
    async def update_weights(self, parts: AsyncIterable[Path], version: int) -> None:
        """After a failure, running requests wait for the next update; new requests are refused."""
        async with self._updating(version):
            async for part in parts:
                await self._in_thread(self.loaded.weights.copy, part)

    broadcast_ranks = 1
    """Number of ranks of the engine in a broadcast."""

    @override
    async def join_broadcast(self, host: str, port: int, first_rank: int, world: int) -> None:
        await self._in_thread(self.loaded.weights.join, host, port, first_rank, world)

    @override
    async def update_from_broadcast(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], version: int
    ) -> None:
        """Fails as `update_weights` does."""
        async with self._updating(version):
            await self._in_thread(self.loaded.weights.receive, names, dtypes, shapes)

    @override
    async def sleep(self) -> None:
        """Frees the memory of weights and caches, on CPUs too."""
        async with self._between_steps:
            if self._waiting or self._running:
                in_flight = len(self._waiting) + len(self._running)
                raise EngineError(f"{in_flight} requests are in flight: the engine cannot sleep")
            self._ready.clear()
            self._refusal = "the engine sleeps"
            self._caches = self._new_caches()
            await self._in_thread(self.loaded.weights.drop)

    @override
    async def wake(self) -> None:
        async with self._between_steps:
            await self._in_thread(self.loaded.weights.allocate)
            self._refusal = "the engine has no weights since it slept"

    @override
    def stats(self) -> EngineStats:
        return EngineStats(
            self._version,
            len(self._running),
            len(self._waiting),
            self._generated,
            self._prompted,
            self._load_meter.busy_seconds,
            self._aborted,
            self._load_meter.seats,
            self._load_meter.seat_seconds,
            self._load_meter.kv_used,
            self._load_meter.kv_polls,
            self._computed,
            self._prefilling,
            held=not (self._open.is_set() and self._ready.is_set()),
        )

    @override
    async def check_health(self) -> None:
        """It has no process of its own."""
        self._check_running()
        held = sum(running.cached for running in self._running.values())
        self._load_meter.poll_kv(held / (self._max_sessions * self._max_length))
        # Logged when it grows, for a user who wonders where the pod's memory went.
        if (size := self._caches.nbytes) > self._logged_bytes:
            log.info("keys and values of sessions take %.1f MiB", size / 2**20)
            self._logged_bytes = size

    @override
    async def stop(self) -> None:
        if self._server is not None:
            # Before the server ends, so that every request gets an answer.
            await self.abort()
            self._server.cancel()
            await asyncio.gather(self._server, return_exceptions=True)
            self._server = None
        self._thread.shutdown()

    @property
    def loaded(self) -> LoadedModel:
        """The model and what computes with it. `start` comes first."""
        assert self._loaded is not None, "start comes first"
        return self._loaded

    def _load_checked(self) -> LoadedModel:
        model = self._load()
        refuse_states(model)
        forward = Forward(model)
        # Before anything is sampled: a model that the cache breaks would train on wrong log-probs.
        check_parity(model, forward, self._max_length)
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        limits = RequestLimits(vocabulary, self._max_length)
        return LoadedModel(model, forward, limits, EngineWeights(model))

    def _new_caches(self) -> Caches:
        if self._batch_invariant:
            return PrivateCaches(self._max_length)
        return SessionCaches(self._max_sessions, self._max_length)

    @asynccontextmanager
    async def _updating(self, version: int) -> AsyncIterator[None]:
        """Change the weights inside the `with` block; compute nothing until that has succeeded."""
        async with self._between_steps:
            self._ready.clear()
            self._refusal = None
            try:
                self.loaded.weights.begin()
                yield
                self.loaded.weights.finish()
            # Half of the new weights may be there: nothing may be sampled until an update succeeds.
            except BaseException as error:
                self._refusal = f"the last weight update failed ({error})"
                raise
            self._version = version
            self._caches.invalidate()  # keys and values of the old weights
            for running in self._running.values():
                # Their tokens stay, but each has to be computed again with the new weights.
                running.cached = 0
                if self._restart_on_update:
                    self._aborted += running.restart()
            self._ready.set()

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _check_running(self) -> None:
        if self._server is None:
            raise EngineError("the engine is not running")
        if self._server.done():
            raise EngineError("the engine has failed") from self._server.exception()

    def _check(self, request: GenerationRequest) -> None:
        self._check_running()
        if self._refusal is not None:
            raise EngineError(f"{self._refusal}: nothing is served until an update succeeds")
        self.loaded.limits.check(request, ChainMap(self._waiting, self._running))

    async def _serve(self) -> None:
        """Compute step after step. The event loop is free while a step is computed."""
        try:
            while True:
                await self._open.wait()
                await self._ready.wait()
                if not self._waiting and not self._running:
                    self._work.clear()
                    await self._work.wait()
                # A turn for the event loop, even if the lock is free: requests and aborts come in
                # here.
                await asyncio.sleep(0)
                async with self._between_steps:
                    # Either may have changed while this waited for the lock.
                    if self._open.is_set() and self._ready.is_set():
                        step = self._next_step()
                        with self._load_meter.running(len(self._running)):
                            results = await self._in_thread(self._forward, step)
                        for batch, sampled in zip(step.batches, results, strict=True):
                            self._deliver(batch, *sampled)
        except Exception as error:
            # No step will follow: callers would wait forever.
            for running in [*self._waiting.values(), *self._running.values()]:
                if not running.done.done():
                    running.done.set_exception(EngineError(f"the engine failed: {error}"))
            raise

    def _next_step(self) -> Step:
        """Admit waiting requests, and return the batches of the next step."""
        admitted = []
        while self._waiting and len(self._running) < self._max_sessions:
            request_id = min(self._waiting, key=lambda each: self._waiting[each].request.priority)
            running = self._waiting.pop(request_id)
            # Its caller has gone while it waited.
            if running.done.done():
                continue
            self._caches.open(running)
            self._running[request_id] = running
            admitted.append(running)
        shared = self._caches.share(self._running.values())
        self._prompted += sum(running.pending for running in admitted)
        leaders = {prefix.leader for prefix in shared if not prefix.computed}
        others = [running for running in self._running.values() if running not in leaders]
        return Step(self._batches(leaders), shared, self._batches(others))

    def _batches(self, requests: Collection[RunningRequest]) -> list[list[RunningRequest]]:
        return in_batches(requests, self._max_step_tokens, one_by_one=self._batch_invariant)

    def _forward(self, step: Step) -> list[tuple[list[int], list[float]]]:
        """Compute the pending tokens of each request and sample its next one.

        Runs in the engine's thread, once for all batches.
        """
        # Requests that were decoded in the last step come first: they have the first slots.
        self._caches.arrange([*step.others, *step.leaders])
        results = [self._forward_batch(batch) for batch in step.leaders]
        for prefix in step.shared:
            prefix.copy()
        return results + [self._forward_batch(batch) for batch in step.others]

    def _forward_batch(self, batch: list[RunningRequest]) -> tuple[list[int], list[float]]:
        # Set before the step, so that a long prompt does not look like a stuck engine.
        self._prefilling = len(batch) * max(running.pending for running in batch)
        sampled = self.loaded.compute(batch)
        self._computed += self._prefilling
        self._prefilling = 0
        return sampled

    def _deliver(
        self, batch: list[RunningRequest], tokens: list[int], logprobs: list[float]
    ) -> None:
        for running, token, logprob in zip(batch, tokens, logprobs, strict=True):
            running.cached += running.pending
            running.sampled.append(token, logprob, self._version)
            self._generated += 1
            sampling = running.request.sampling
            if running.done.cancelled():
                self._release(running, FinishReason.ABORT)
            elif token in sampling.stop_token_ids:
                self._release(running, FinishReason.STOP)
            elif len(running.sampled) >= sampling.max_new_tokens:
                self._release(running, FinishReason.LENGTH)

    def _release(self, running: RunningRequest, reason: FinishReason) -> None:
        """End a request."""
        if self._running.pop(running.request.request_id, None) is not None:
            self._caches.close(running)
        # Aborted tokens are work that no trajectory has.
        if reason is FinishReason.ABORT:
            self._aborted += len(running.sampled)
        running.finish(reason)


@dataclass(frozen=True)
class Step:
    """One forward pass: one token of each request."""

    leaders: list[list[RunningRequest]]
    """Batches of requests whose keys and values others copy."""
    shared: list[SharedPrefix]
    """Copied between `leaders` and `others`."""
    others: list[list[RunningRequest]]

    @property
    def batches(self) -> list[list[RunningRequest]]:
        """All batches, in the order in which they are computed."""
        return self.leaders + self.others


def in_batches(
    requests: Iterable[RunningRequest], max_tokens: int, *, one_by_one: bool
) -> list[list[RunningRequest]]:
    """Split requests into batches with about the same number of pending tokens per row.

    Args:
        requests: the requests in flight.
        max_tokens: most tokens, with padding, of a batch of several requests.
        one_by_one: make each request a batch of its own.
    """
    if one_by_one:
        return [[running] for running in requests]
    batches: list[list[RunningRequest]] = []
    for running in sorted(requests, key=lambda r: (r.pending, r.slot.number)):
        last = batches[-1] if batches else []
        fits = bool(last) and (len(last) + 1) * running.pending <= max_tokens
        if (
            fits
            # Padding costs as much as tokens, so lengths in a batch differ by a factor of two at
            # most.
            and running.pending <= 2 * last[0].pending
            # Decoding apart from prompts: its rows would be padded to the length of a prompt.
            and (running.pending == 1) == (last[0].pending == 1)
        ):
            last.append(running)
        else:
            batches.append([running])
    return batches


class EngineWeights:
    """Copies new weights into the parameters of a model, in their own dtype and on their device.

    An update is `begin`, then `copy` for every file or one `receive`, then `finish`. The model must
    not compute during an update, or after one that failed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._parameters: dict[str, Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **stored_buffers(model),
        }
        self._shapes = {
            name: tuple(parameter.shape) for name, parameter in self._parameters.items()
        }
        self._weights = self._views()
        self._seen: set[int] = set()
        """Addresses of the weights that have come; tied ones have the same."""
        self._reader = SafetensorsReader()
        self._device = model.device
        self._group: WeightGroup | None = None

    def begin(self) -> None:
        """Begin an update: no parameter is up to date."""
        self._seen.clear()
        self._reader.forget()

    def join(self, host: str, port: int, rank: int, world: int) -> None:
        """Join the collective that `receive` listens to. Raises `EngineError`."""
        self._group = None
        try:
            self._group = WeightGroup(host, port, rank, world, self._device)
        except RuntimeError as error:
            raise EngineError(
                f"the engine could not reach the trainer at {host}:{port}: {error}"
            ) from error

    @torch.no_grad()
    def receive(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        """Copy the parameters of one broadcast.

        Raises:
            EngineError: the broadcast broke off, or the names or shapes are another model's.
        """
        group = self._group
        assert group is not None, "join comes first"
        try:
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
                self._copy(name, group.receive(tuple(shape), getattr(torch, dtype)))
        except RuntimeError as error:
            # The other ranks wait in the collective: closing ends their wait, too.
            group.close()
            self._group = None
            raise EngineError(f"the broadcast broke off: {error}") from error

    @torch.no_grad()
    def copy(self, part: Path) -> None:
        """Copy the parameters of one file.

        Raises:
            EngineError: the file is unreadable, or its names or shapes are another model's.
        """
        try:
            for name, value in self._reader.parameters(part):
                self._copy(name, value)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{part} cannot be read as a safetensors file: {error}") from error

    def finish(self) -> None:
        """Raise `EngineError` if a parameter has not come."""
        missing = [
            name for name, weight in self._weights.items() if weight.data_ptr() not in self._seen
        ]
        if missing:
            raise EngineError(
                f"the new weights lack {len(missing)} parameters, {missing[0]} among them"
            )

    def drop(self) -> None:
        """Free the memory of all parameters."""
        self._weights = {}
        for parameter in self._parameters.values():
            # The parameter stays, because the decoder and the names of weights refer to it.
            parameter.data = parameter.data.new_empty(0)

    def allocate(self) -> None:
        """Allocate the memory that `drop` freed, uninitialised. Tied parameters stay tied."""
        for name, parameter in self._parameters.items():
            # Tied parameters share one tensor: the second one has its memory already.
            if tuple(parameter.shape) != self._shapes[name]:
                parameter.data = parameter.data.new_empty(self._shapes[name])
        self._weights = self._views()

    def _views(self) -> dict[str, Tensor]:
        """Return views of the parameters and buffers under the names that exports have."""
        return {
            weight: view
            for name, parameter in self._parameters.items()
            for weight, view in stored_parts(self._model, name, parameter).items()
        }

    def _copy(self, name: str, value: Tensor) -> None:
        held = self._weights.get(name)
        # Weights of another model: to copy some of them would leave a mix.
        if held is None or held.shape != value.shape:
            shape = None if held is None else tuple(held.shape)
            raise EngineError(
                f"weights for {name} have shape {tuple(value.shape)}, the model has {shape}"
            )
        held.copy_(value)
        self._seen.add(held.data_ptr())
