"""SGLang as an engine: a server in an environment of its own, token ids by its native /generate.

- Weights: the files are linked into one folder. The server reads it when all files have come and
  their names and shapes are checked. Sampling continues until then, and a bad file never reaches
  the server. Requests in flight are retracted, which drops their keys and values; they continue
  with the new weights, and SGLang reports the version of each token.
- Log-probs at any temperature, and seeds: see `plugin`.
- A token id outside the vocabulary ends the whole server, so this engine checks requests.
- The server sends the tokens of a request about once a second, which are kept here: see
  `LoadMeter.stream_interval`. A request that is aborted while the server is paused returns those
  that have come.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from agenticrun_workers.inference.engine import (
    EngineError,
    EngineStartError,
    EngineStats,
    InferenceEngine,
    LoadMeter,
    ReportsProgress,
    SampledTokens,
    SupportsBroadcast,
)
from agenticrun_workers.inference.model_files import RequestLimits, ServedModel, UpdateCheck
from agenticrun_workers.inference.server_process import (
    ServerClient,
    ServerProcess,
    readable_answer,
)
from agenticrun_workers.inference.sglang.server import (
    GENERATE,
    LOADS,
    SglangControl,
    SglangOptions,
    computed_prompt_tokens,
    generate_body,
    read_event,
    read_load,
)
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, SamplingParams

BOUNDLESS_TEMPERATURE = 1e6
FLAT = 0.01
ABORT_SECONDS = 0.05
"""Time after which an abort is repeated: the server drops it if the request has not arrived yet."""
PATIENCE_SECONDS = 1.0
"""Longest wait for aborts by a paused server, which does not answer requests that it holds."""
DRAIN_SECONDS = 5.0


@dataclass
class _InFlight:
    """A request in flight. `rid` is its id in the server; a restart gets a new one."""

    rid: str
    caller: asyncio.Task[Any]
    sampled: SampledTokens = field(default_factory=SampledTokens)
    """The tokens that have come."""
    ended: bool = False
    """All of them have come."""
    restarts: bool = False
    """New weights came: restart when the server returns it as aborted."""
    abandoned: bool = False
    """Aborted, but a paused server does not answer it."""
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class _Server:
    """A server that was started."""

    http: ServerClient
    control: SglangControl
    model: ServedModel


class SglangEngine(InferenceEngine, SupportsBroadcast, ReportsProgress):
    """The engine SGLang; see the module's docstring. Implements `InferenceEngine`.

    Args:
        folder: Hugging Face folder of the first weights, as safetensors; needed by `start` only.
        dtype: float32, bfloat16 or float16.
        max_length: longest sequence, prompt and response.
        log_folder: where the server's log goes; it stays there.
        version: policy version of the first weights.
        restart_on_update: new weights restart the responses in flight, so that each has one version
            (`staleness.partialRollout: false`).
        config: SGLang's own options (`strategy.config`).
        threads: CPU threads of the server's computation.
        gpus: number of GPUs for tensor parallelism; 0: compute on the CPU.
        shares_gpus: a trainer has the GPUs while the engine sleeps.
        trust_remote_code: run the Python code in the model's folder.
        enforces_formats: take requests with a `structural_tag`, unless `config` prevents it. The
            folder needs a tokenizer then.

    Raises:
        ValueError: `config` has an option that another field decides.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        max_length: int,
        log_folder: Path,
        version: int = 0,
        restart_on_update: bool = False,
        config: Mapping[str, Any] | None = None,
        threads: int = 1,
        gpus: int = 0,
        shares_gpus: bool = False,
        trust_remote_code: bool = False,
        enforces_formats: bool = False,
    ) -> None:
        self._options = SglangOptions(
            folder,
            dtype,
            max_length,
            version,
            log_folder,
            config or {},
            threads,
            gpus,
            shares_gpus,
            trust_remote_code,
            enforces_formats,
        )
        self.enforces_formats = self._options.enforces_formats
        self._restart_on_update = restart_on_update
        self._version = version
        self._process: ServerProcess | None = None
        self._started: _Server | None = None
        """None until `start`."""
        self._in_flight: dict[str, _InFlight] = {}
        self._rids = itertools.count()
        self._refusal = "the engine has not started"
        self._paused = False
        self._changing = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._load = LoadMeter(self._options.max_requests)
        self._generated = self._prompted = self._aborted = 0

    @property
    def url(self) -> str:
        """URL of the server, once it has started."""
        assert self._process is not None, "started"
        return self._process.url

    @override
    async def start(self) -> None:
        options = self._options
        limits = RequestLimits.of_model(options.folder, options.max_length)
        model = ServedModel.read(options.folder, limits)
        process = self._process = ServerProcess(options.spec())
        http = ServerClient(process)
        self._started = _Server(http, SglangControl(http), model)
        await process.start()
        # Allowed already, because the probe below is a request like any other.
        self._refusal = ""
        try:
            with readable_answer():
                self._load.seats = read_load(await http.check(LOADS)).seats
            await self._check_plugin(process.log)
        except EngineStartError:
            await self.stop()
            raise
        except EngineError as error:
            await self.stop()
            raise EngineStartError(
                f"SGLang started, but cannot serve {options.folder}: see its log {process.log}. "
                f"{error}"
            ) from error
        except BaseException:
            await self.stop()
            raise

    @override
    async def generate(self, request: GenerationRequest) -> Generation:
        if self._refusal:
            raise EngineError(self._refusal)
        self._server.model.limits.check(request, self._in_flight)
        caller = asyncio.current_task()
        assert caller is not None, "a coroutine runs in a task"
        flight = self._in_flight[request.request_id] = _InFlight("", caller)
        with self._load.running():
            try:
                while True:
                    # Ids have one length: SGLang aborts every request with the given prefix.
                    flight.rid, flight.restarts = f"{next(self._rids):016x}", False
                    flight.sampled, flight.ended = SampledTokens(), False
                    finish = await self._sample(request, flight)
                    if finish is FinishReason.ABORT:
                        self._aborted += len(flight.sampled)
                    if not flight.restarts or finish is not FinishReason.ABORT:
                        return flight.sampled.response(finish)
            finally:
                del self._in_flight[request.request_id]
                flight.done.set()

    @override
    def progress(self, request_id: str, start: int) -> Generation | None:
        flight = self._in_flight.get(request_id)
        if flight is None or flight.ended or self._restart_on_update:
            return None
        return flight.sampled.since(start)

    @override
    async def abort(self, request_ids: list[str] | None = None) -> None:
        wanted = list(self._in_flight) if request_ids is None else request_ids
        flights = [flight for each in wanted if (flight := self._in_flight.get(each))]
        loop = asyncio.get_running_loop()
        patience = loop.time() + PATIENCE_SECONDS
        while pending := [flight for flight in flights if not flight.done.is_set()]:
            for flight in pending:
                flight.restarts = False
                # A paused server holds requests without an answer, so their callers are cancelled.
                if loop.time() > patience and (self._paused or self._refusal):
                    flight.abandoned = True
                    flight.caller.cancel()
            if request_ids is None:
                await self._server.control.abort_all()
            else:
                await asyncio.gather(
                    *(self._server.control.abort(flight.rid) for flight in pending)
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_SECONDS):
                    await asyncio.gather(*(flight.done.wait() for flight in pending))

    @override
    async def pause(self) -> None:
        async with self._changing:
            self._paused = True
            await self._server.control.pause()

    @override
    async def resume(self) -> None:
        """After a failed update, requests still wait for the next one."""
        async with self._changing:
            self._paused = False
            await self._resume_server()

    @override
    async def update_weights(self, parts: AsyncIterable[Path], version: int) -> None:
        """After a failure, running requests wait for the next update; new requests are refused."""
        # SGLang loads a folder: links put files of several places into one.
        with tempfile.TemporaryDirectory(prefix="agenticrun-weights-") as folder:
            async with self._updating(version) as check:
                links = itertools.count()
                async for part in parts:
                    check.add_file(part)
                    (Path(folder) / f"part-{next(links):05d}.safetensors").symlink_to(
                        part.resolve()
                    )
                # Before sampling stops: an incomplete update must not interrupt anything.
                check.finish()
                with self._load.held():
                    # As late as possible: until here the server samples with the old weights.
                    await self._server.control.retract()
                    await self._server.control.load_folder(Path(folder), version)

    @property
    @override
    def broadcast_ranks(self) -> int:
        return self._options.processes

    @override
    async def join_broadcast(self, host: str, port: int, first_rank: int, world: int) -> None:
        await self._server.control.join_group(host, port, first_rank, world)

    @override
    async def update_from_broadcast(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], version: int
    ) -> None:
        async with self._updating(version) as check:
            check.add({name: tuple(shape) for name, shape in zip(names, shapes, strict=True)})
            check.finish()
            with self._load.held():
                await self._server.control.retract()
                await self._server.control.receive(names, dtypes, shapes, version)

    @override
    async def sleep(self) -> None:
        """On a CPU it frees nothing: SGLang cannot."""
        if self._in_flight:
            raise EngineError(
                f"{len(self._in_flight)} requests are in flight: the engine cannot sleep"
            )
        self._refusal = "the engine sleeps"
        # SGLang ends itself if memory is released while a scheduler is busy.
        await self._server.control.flush()
        if self._options.gpus:
            await self._server.control.release_memory()

    @override
    async def wake(self) -> None:
        if self._options.gpus:
            await self._server.control.resume_memory()
        self._refusal = (
            "the engine has no weights since it slept: nothing is served until an update succeeds"
        )

    @override
    def stats(self) -> EngineStats:
        """Counts tokens when the server sends them."""
        running = min(len(self._in_flight), self._load.seats)
        waiting = len(self._in_flight) - running
        return EngineStats(
            self._version,
            running,
            waiting,
            self._generated,
            self._prompted,
            self._load.busy_seconds,
            self._aborted,
            self._load.seats,
            self._load.seat_seconds,
            self._load.kv_used,
            self._load.kv_polls,
            self._load.computed(self._prompted + self._generated),
            held=self._paused or bool(self._refusal),
        )

    @override
    async def check_health(self) -> None:
        """Its scheduler answers between two steps, also while it sleeps."""
        async with self._changing:
            await self._server.http.check("/server_info")
            answer = await self._server.http.check(LOADS)
        with self._load.reading(), readable_answer():
            load = read_load(answer)
            self._load.seats = load.seats
            self._load.poll_kv(load.kv_used)
            self._load.poll_kv_tokens(load.kv_tokens)

    @override
    async def stop(self) -> None:
        # Taken first: a second call finds nothing to stop.
        process, self._process = self._process, None
        if process is None:
            return
        self._refusal = "the engine has stopped"
        if process.alive and self._in_flight:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    await self.abort()
        await process.stop()
        await self._server.http.close()

    @property
    def _server(self) -> _Server:
        assert self._started is not None, "start comes first"
        return self._started

    async def _check_plugin(self, log: Path) -> None:
        """Raise `EngineStartError` if the plug-in does not work.

        SGLang ignores a plug-in that fails, and would silently record log-probs at another
        temperature. The check: at a boundless temperature all tokens are equally likely. And the
        first of two tokens mostly comes in an event of its own, which has versions by the plug-in
        only.
        """
        sampling = SamplingParams(2, record_temperature=BOUNDLESS_TEMPERATURE)
        generation = await self.generate(
            GenerationRequest("plug-in", "", np.zeros(1, np.int32), sampling)
        )
        expected = -math.log(self._server.model.limits.vocabulary)
        flat = np.allclose(generation.logprobs_T[:1], expected, rtol=0, atol=FLAT)
        if not len(generation.tokens_T) or not flat or generation.versions_T[0] < 0:
            raise EngineStartError(
                f"SGLang runs without AgenticRun's plug-in: look for `plugin` in {log}"
            )

    async def _sample(self, request: GenerationRequest, flight: _InFlight) -> FinishReason:
        """Collect the tokens of a request until it ends."""
        body = generate_body(request, flight.rid, self._load.stream_interval(self._generated))
        finish = None
        try:
            async with aclosing(self._server.http.events(GENERATE, body)) as events:
                async for event in events:
                    had = len(flight.sampled)
                    with readable_answer():
                        finish = read_event(request, event, flight.sampled)
                        if finish is not None:
                            flight.ended = True
                            self._prompted += computed_prompt_tokens(event)
                    self._generated += len(flight.sampled) - had
        except asyncio.CancelledError:
            # Our own cancellation, see `abort`: the caller gets the tokens so far.
            if flight.abandoned:
                flight.caller.uncancel()
                return FinishReason.ABORT
            # Without this, the server would notice the closed connection only after seconds.
            # Referenced, because asyncio keeps only weak references to tasks.
            self._background.add(
                task := asyncio.create_task(self._server.control.abort(flight.rid))
            )
            task.add_done_callback(self._background.discard)
            raise
        if finish is None:
            raise EngineError("the server's answer ended before the response")
        return finish

    @asynccontextmanager
    async def _updating(self, version: int) -> AsyncIterator[UpdateCheck]:
        """Load weights inside the `with` block. The caller adds every parameter to the check."""
        async with self._changing:
            try:
                yield self._server.model.update_check()
                # After the load: requests that restart must find the new weights.
                if self._restart_on_update:
                    for flight in self._in_flight.values():
                        flight.restarts = True
                    await self._server.control.abort_all()
            except BaseException as error:
                self._refusal = (
                    f"the last weight update failed ({error}): "
                    "nothing is served until another succeeds"
                )
                # The server may be the reason of the failure.
                with contextlib.suppress(EngineError):
                    await self._server.control.pause()
                raise
            self._version, self._refusal = version, ""
            await self._resume_server()

    async def _resume_server(self) -> None:
        if not self._paused and not self._refusal:
            await self._server.control.resume()
