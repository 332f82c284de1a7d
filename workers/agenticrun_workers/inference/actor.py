"""EngineActor: the process that owns an engine and serves it to many clients."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from agenticrun_api import Pipeline, Role
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.inference.engine import (
    ABORTED_UNSAMPLED,
    STEP_SECONDS,
    EngineError,
    EngineStats,
    InferenceEngine,
    InvalidRequest,
    ReportsProgress,
    SupportsBroadcast,
)
from agenticrun_workers.inference.request_port import Address, RequestPort
from agenticrun_workers.launch import NodeMetrics, current_node
from agenticrun_workers.launch.liveness import POLL_SECONDS
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.placement import Placement, current_placement
from agenticrun_workers.tracing import (
    ASLEEP,
    ENGINE,
    REQUESTS_IN_FLIGHT,
    TOKENS,
    WEIGHTS,
    Recorder,
    Traced,
)
from agenticrun_workers.types import Generation, GenerationRequest
from agenticrun_workers.weights.buckets import TORCH_NAMES, CorruptBucket, TensorSpec, Verifier

if TYPE_CHECKING:
    from agenticrun_workers.inference.model_files import RequestLimits

log = logging.getLogger(__name__)

LOG_FOLDER = "AGENTICRUN_LOG_FOLDER"
"""Environment variable: folder for logs of engine servers. Default: Ray's, for its dashboard."""

GAUGES = {
    "agenticrun_engine_running": "Requests in computation.",
    "agenticrun_engine_waiting": "Requests that wait for a seat.",
    "agenticrun_engine_seats": "Largest number of requests that the engine computes at once.",
    "agenticrun_engine_policy_version": "Version of the weights.",
}
COUNTERS = {
    "agenticrun_engine_generated_tokens": "Sampled tokens.",
    "agenticrun_engine_prompt_tokens": "Tokens of prompts.",
    "agenticrun_engine_aborted_tokens": "Sampled tokens of aborted or restarted requests.",
    "agenticrun_engine_busy_seconds": "Time with at least one request in computation.",
    "agenticrun_engine_kv_used": "Sum over polls of the used share of the KV cache.",
    "agenticrun_engine_kv_polls": "Polls of the KV cache.",
}
"""Metrics of an engine for Prometheus, which cannot reach its server on the loopback."""


def _shown(stats: EngineStats) -> dict[str, float]:
    names = (*GAUGES, *COUNTERS)
    return {name: getattr(stats, name.removeprefix("agenticrun_engine_")) for name in names}


def log_folder() -> Path:
    """Return the folder for logs of engine servers.

    Without `LOG_FOLDER` it is that of this Ray session.
    """
    if chosen := os.environ.get(LOG_FOLDER):
        return Path(chosen)
    from agenticrun_workers.launch.ray_launcher import session_logs

    return session_logs()


class EngineActor(Traced):
    """Serves one engine to many clients.

    Only `start` imports engines, because the driver imports this module.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.recorder = Recorder(name, ENGINE, self._load)
        node = current_node()
        self._gpus, self._shares_gpus = node.gpus, False
        self._engine: InferenceEngine | None = None
        """None until `start`."""
        self._incoming: IncomingWeights | None = None
        """The weight update that has begun last."""
        self._port = RequestPort(self._generate, self._abort, node.address, progress=self._progress)
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._verifier = Verifier()
        self._closing = asyncio.Event()
        self._awake = True
        self._limits: RequestLimits | None = None
        """None until `start`."""
        self._waiting: dict[str, asyncio.Event] = {}
        """Requests that arrived while the engine sleeps, by id. `_abort` removes a request before
        it sets the event."""
        self._sampling: set[asyncio.Task[None]] = set()
        """Tasks of the requests that have reached the engine."""
        self._watcher: asyncio.Task[None] | None = None

    async def placement(self) -> Placement:
        return current_placement(self._name, Role.INFERENCE)

    async def close(self) -> None:
        """Stop the engine. Needed only where the actor is not a process of its own."""
        await self._port.close()
        self._closing.set()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._engine is not None:
            await self._engine.stop()

    async def health(self) -> EngineStats:
        """Return after some seconds: a poll that fails at once when this process dies.

        Raises:
            EngineError: the engine has stopped serving.
        """
        await asyncio.wait({self._broken}, timeout=POLL_SECONDS)
        if self._broken.done():
            self._broken.result()
        return self._serving.stats()

    async def use_gpus(self, gpus: tuple[str, ...]) -> None:
        """Compute on exactly these GPUs, which Ray has assigned to a trainer's ranks.

        Call it before `start`. It also holds for an engine's server process.
        """
        self._gpus, self._shares_gpus = gpus, True
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)

    async def start(self, pipeline: Pipeline, source: ModelSource, threads: int) -> None:
        """Load the model and serve it.

        Args:
            pipeline: names the engine and its options.
            source: where the model comes from.
            threads: CPU threads of the computation.

        Raises:
            MissingGpus: the engine has GPUs, and this process does not see them.
            EngineStartError: the engine cannot start; `UnusableModel` if the model is the cause.
        """
        from agenticrun_workers.inference.builder import build_engine
        from agenticrun_workers.inference.model_files import RequestLimits

        logs = log_folder()
        with source.folder() as folder:
            engine = self._engine = build_engine(
                pipeline,
                source,
                folder,
                owner=f"inference engine {self._name}",
                gpus=self._gpus,
                threads=threads,
                logs=logs,
                shares_gpus=self._shares_gpus,
            )
            await engine.start()
            self._limits = RequestLimits.of_model(Path(folder), pipeline.sequence_length)
        self._port.seats = engine.stats().seats
        self._watcher = asyncio.create_task(self._watch(), name="engine-health")

    async def sleep(self) -> None:
        """Leave the device to a trainer.

        Requests in flight are aborted; later ones wait for the next weights.
        """
        # First, so that no request begins while the running ones end.
        self._awake = False
        await self._serving.abort()
        await asyncio.gather(*self._sampling)
        await self._serving.sleep()

    async def wake(self) -> None:
        """Take the device back. The engine has no weights until the next update."""
        await self._serving.wake()

    async def begin_update(self, version: int) -> None:
        """Stop sampling. The buckets that follow are the weights of this policy version."""
        self._verifier.forget()
        if self.recorder.on:
            self.recorder.open(WEIGHTS, 0, WEIGHTS, {"version": version})
        self._incoming = IncomingWeights(self._serving, version, self._verifier)

    async def take_bucket(self, path: str, checksum: int) -> None:
        """Load a file with some of the weights.

        Raises:
            CorruptBucket: the file does not match its checksum.
            EngineError: the update has failed.
        """
        await self._update.take(Path(path), checksum)

    async def finish_update(self) -> None:
        """Complete the update after the last bucket, and continue the requests in flight.

        Raises:
            EngineError: the update has failed.
        """
        await self._update.finish()
        self.recorder.close(WEIGHTS)
        # Only with complete weights: every waiting request samples from one version.
        self._awake = True
        for woken in self._waiting.values():
            woken.set()

    async def broadcast_ranks(self) -> int:
        """Return the number of ranks that this engine needs in a broadcast.

        Raises:
            InvalidConfig: the engine does not support broadcasts.
        """
        return self._broadcast_engine().broadcast_ranks

    async def join_broadcast(self, host: str, port: int, first_rank: int, world: int) -> None:
        """Join the collective of the trainer and the other engines. Raises `EngineError`."""
        await self._broadcast_engine().join_broadcast(host, port, first_rank, world)

    async def update_from_broadcast(self, shapes: tuple[TensorSpec, ...], version: int) -> None:
        """Load these parameters, as the trainer broadcasts them, as policy version `version`.

        Raises:
            EngineError: the update has failed.
        """
        dtypes = [TORCH_NAMES[shape.dtype] for shape in shapes]
        sizes = [list(shape.shape) for shape in shapes]
        with self.recorder.span(WEIGHTS, version=version):
            await self._broadcast_engine().update_from_broadcast(
                [shape.name for shape in shapes], dtypes, sizes, version
            )

    async def sample(self, requests: list[GenerationRequest]) -> list[Generation]:
        """Answer requests of the driver together. Raises `EngineError`."""
        return list(await asyncio.gather(*map(self._sample, requests)))

    async def requests_address(self) -> Address:
        """Return the address to which clients send their requests."""
        return await self._port.address()

    async def stats(self) -> EngineStats:
        return self._serving.stats()

    @property
    def _serving(self) -> InferenceEngine:
        assert self._engine is not None, "start comes first"
        return self._engine

    @property
    def _update(self) -> IncomingWeights:
        assert self._incoming is not None, "begin_update comes first"
        return self._incoming

    def _load(self) -> dict[str, float]:
        stats = self._serving.stats()
        return {
            REQUESTS_IN_FLIGHT: self._port.load.requests,
            "requests computing": stats.running,
            "requests waiting": stats.waiting,
            TOKENS: stats.generated_tokens,
            ASLEEP: float(not self._awake),
        }

    async def _generate(self, request: GenerationRequest) -> Generation:
        if not self.recorder.on:
            return await self._sample(request)
        tokens = len(request.prompt_tokens)
        name = request.request_id.rpartition("/")[2]
        self.recorder.count(REQUESTS_IN_FLIGHT, self._port.load.requests)
        with self.recorder.track(name, id=request.request_id, prompt_tokens=tokens) as track:
            try:
                generation = await self._sample(request)
            finally:
                if self.recorder.on:
                    self.recorder.count(REQUESTS_IN_FLIGHT, self._port.load.requests - 1)
            track.note(tokens=len(generation.tokens_T), finish=generation.finish.value)
            return generation

    async def _sample(self, request: GenerationRequest) -> Generation:
        # A loop, because the engine may sleep again before this task has its turn.
        while not self._awake:
            woken = self._waiting[request.request_id] = asyncio.Event()
            await woken.wait()
            # `_abort` has removed it: its caller no longer waits.
            if self._waiting.get(request.request_id) is not woken:
                return ABORTED_UNSAMPLED
            del self._waiting[request.request_id]
        task = asyncio.current_task()
        assert task is not None
        self._sampling.add(task)
        task.add_done_callback(self._sampling.discard)
        try:
            return self._checked(request, await self._serving.generate(request))
        except Exception as error:
            self._record_failure(error)
            if self._broken.done():
                # This process will be killed. Only then its clients ask another engine.
                await self._closing.wait()
            raise

    def _progress(self, request_id: str, start: int) -> Generation | None:
        engine = self._engine
        sampled = (
            engine.progress(request_id, start) if isinstance(engine, ReportsProgress) else None
        )
        if sampled is None or self._limits is None:
            return sampled
        try:
            return self._limits.check_tokens(sampled)
        except EngineError as error:
            self._record_failure(error)
            return None

    def _checked(self, request: GenerationRequest, generation: Generation) -> Generation:
        """Return what the engine sampled. Raises `EngineError` if a trainer must not see it."""
        if self._limits is None:
            return generation
        return self._limits.check_generation(request, generation)

    async def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if woken := self._waiting.pop(request_id, None):
                woken.set()
        try:
            await self._serving.abort(request_ids)
        except EngineError as error:  # other requests of the client continue
            self._record_failure(error)

    async def _watch(self) -> None:
        """Poll the engine until it fails, because a frozen engine fails no request."""
        logged = ""
        pace = Pace()
        metrics = NodeMetrics({"engine": self._name}, GAUGES, COUNTERS)
        while not self._broken.done():
            await asyncio.sleep(POLL_SECONDS)
            try:
                await self._serving.check_health()
                stats = self._serving.stats()
                self._port.seats = stats.seats
                metrics.show(_shown(stats))
                pace.check(stats)
            except EngineError as error:
                self._record_failure(error)
            # An unexpected error says nothing about the engine, so polling continues.
            except Exception as error:
                if repr(error) != logged:
                    log.exception("the health of %s cannot be checked", self._name)
                logged = repr(error)

    def _broadcast_engine(self) -> SupportsBroadcast:
        engine = self._serving
        if not isinstance(engine, SupportsBroadcast):
            advice = "does not support broadcasts: choose Auto, ObjectStore or Disk"
            raise InvalidConfig(
                "spec.pipeline.weightSync.transport", f"{type(engine).__name__} {advice}"
            )
        return engine

    def _record_failure(self, error: Exception) -> None:
        """Report an engine that cannot serve as broken. One that refuses a request is not."""
        if (
            isinstance(error, EngineError)
            and not isinstance(error, InvalidRequest)
            and not self._broken.done()
        ):
            self._broken.set_exception(error)


MIN_TOKENS = 30
"""Tokens that an engine with requests has to compute in `STEP_SECONDS`: one in ten seconds."""
MIN_PREFILL = 10.0
"""Tokens of prompts, computed at once, that an engine has to compute per second."""


class Pace:
    """Distinguishes an engine that computes, however slowly, from one that only answers polls.

    Counts the polls at which the engine has requests, from one at which it has computed another
    `MIN_TOKENS` to the next. Why tokens of all requests together: one step per minute is slow for
    a request alone, but may be the best that a CPU can do for a full batch.
    """

    def __init__(self) -> None:
        self._polls = 0
        self._computed = 0

    def check(self, stats: EngineStats) -> None:
        """Take the statistics of the next poll.

        Raises:
            EngineError: the engine is stuck, or so slow that no episode would end.
        """
        requests = stats.running + stats.waiting
        if stats.computed_tokens is None or stats.held or not requests:
            return
        computed = stats.computed_tokens - self._computed
        if computed >= MIN_TOKENS:
            self._polls, self._computed = 0, stats.computed_tokens
            return
        self._polls += 1
        seconds = self._polls * POLL_SECONDS
        if seconds >= STEP_SECONDS + stats.prefilling / MIN_PREFILL:
            raise EngineError(
                f"the engine answers polls, but has computed {computed} tokens in {seconds:.0f} s "
                f"(requests in flight: {requests}): it is stuck. Its log, or the kernel's (dmesg: "
                "Xid, a fault of a GPU), says more. If it only is that slow: raise "
                "spec.roles.inference.cpus or gpus, or take a smaller model"
            )


class IncomingWeights:
    """A weight update of an engine whose buckets arrive one call after the other.

    The engine's update begins at once: the engine stops sampling and loads each bucket on arrival.
    """

    def __init__(self, engine: InferenceEngine, version: int, verifier: Verifier) -> None:
        self._verifier = verifier
        self._arrived: asyncio.Queue[Path | CorruptBucket | None] = asyncio.Queue()
        self._update = asyncio.create_task(
            engine.update_weights(self._parts(), version), name=f"update to version {version}"
        )

    async def take(self, path: Path, checksum: int) -> None:
        """Pass a bucket on to the engine.

        Raises:
            CorruptBucket: the file does not match its checksum; the update fails.
            EngineError: the engine's update has failed.
        """
        # Raises the error of a failed update now, and not after all buckets have been read.
        if self._update.done():
            await self._update
        try:
            await asyncio.to_thread(self._verifier.check, path, checksum)
        except CorruptBucket as corrupt:
            # The engine waits for this bucket: its update must fail, too.
            self._arrived.put_nowait(corrupt)
            raise
        self._arrived.put_nowait(path)

    async def finish(self) -> None:
        """Complete the update after the last bucket. Raises what the engine's update raises."""
        self._arrived.put_nowait(None)
        await self._update

    async def _parts(self) -> AsyncIterator[Path]:
        while (part := await self._arrived.get()) is not None:
            if isinstance(part, CorruptBucket):
                raise part
            yield part
