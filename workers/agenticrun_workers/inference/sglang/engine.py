"""SGLang as an engine: its own server, in its own environment, as a child process; token ids in and out by its native /generate.

- Weights: the files are linked into one folder, which the server reads when all have come and their names and shapes have been
  checked, so sampling goes on meanwhile, and a bad file never reaches the server. Requests in flight are retracted, which drops
  their keys and values; they go on under the new weights, and SGLang reports which tokens had which version.
- Log-probs at any temperature, and seeds: `sglang_plugin`.
- An id outside the vocabulary ends the whole server, so requests are checked here.
- Requests that are aborted while the server is paused come back with the tokens that it had sent by then: maybe fewer than were sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agenticrun_workers.inference.busy_clock import BusyClock
from agenticrun_workers.inference.engine import EngineError, EngineStartError, EngineStats
from agenticrun_workers.inference.engine_http import EngineHttp
from agenticrun_workers.inference.model_files import Incoming, is_tied, shapes_of_model
from agenticrun_workers.inference.request_limits import RequestLimits
from agenticrun_workers.inference.server_process import EngineProcess
from agenticrun_workers.inference.sglang.api import SglangControl
from agenticrun_workers.inference.sglang.server import SglangOptions
from agenticrun_workers.inference.sglang_requests import (
    NOTHING,
    computed_prompt_tokens,
    generate_body,
    read_generation,
)
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, SamplingParams

BOUNDLESS_TEMPERATURE = 1e6
FLAT = 0.01
ABORT_SECONDS = 0.05
"""How long an abort may take before it is sent again: the server forgets those of requests that it has not read yet."""
PATIENCE_SECONDS = 1.0
"""After which a paused server is not waited for: it answers no request that it holds."""
DRAIN_SECONDS = 5.0


@dataclass
class InFlight:
    """A request in flight. `rid` is its name in the server; a response that begins again has another one."""

    rid: str
    caller: asyncio.Task[Any]
    again: bool = False
    """Whether it begins again when it comes back aborted."""
    given_up: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)


class SglangEngine:
    """See the module's docstring; the protocol is `InferenceEngine`.

    Args:
        folder: the model, as a Hugging Face folder with safetensors files; read until `start` returns.
        dtype: float32 or bfloat16.
        max_length: longest sequence, prompt and response.
        version: policy version of the weights in `folder`.
        restart_on_update: new weights begin responses in flight again (`staleness.partialRollout: false`).
        config: SGLang's own options (`strategy.config`). Raises `ValueError` for those that we own.
        log_folder: where the server's log goes; it stays there.
        threads: of the server's matrix products on a CPU.
        gpus: how many the server spans by tensor parallelism; 0: it runs on the CPU.
        trust_remote_code: whether the model's folder may bring Python code.
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
        trust_remote_code: bool = False,
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
            trust_remote_code,
        )
        self._restart_on_update = restart_on_update
        self._version = version
        self._process: EngineProcess | None = None
        self._in_flight: dict[str, InFlight] = {}
        self._rids = itertools.count()
        self._refusal = "the engine has not started"
        self._paused = False
        self._changing = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._busy = BusyClock()
        self._generated = self._prompted = self._aborted = 0

    @property
    def url(self) -> str:
        """Of the server, once it serves."""
        assert self._process is not None, "started"
        return self._process.url

    async def start(self) -> None:
        """See `InferenceEngine`."""
        options = self._options
        self._limits = RequestLimits.of_model(options.folder, options.max_length)
        self._shapes, self._tied = shapes_of_model(options.folder), is_tied(options.folder)
        self._process = EngineProcess(options.server())
        await self._process.start()
        self._http = EngineHttp(self._process)
        self._server = SglangControl(self._http)
        self._refusal = ""
        try:
            await self._check_plugin(self._process.log)
        except BaseException:
            await self.stop()
            raise

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine`."""
        if self._refusal:
            raise EngineError(self._refusal)
        self._limits.check(request, self._in_flight)
        caller = asyncio.current_task()
        assert caller is not None, "a coroutine runs in a task"
        flight = self._in_flight[request.request_id] = InFlight("", caller)
        with self._busy.running():
            try:
                while True:
                    # Of one length, because SGLang aborts every request whose name begins with the given one.
                    flight.rid, flight.again = f"{next(self._rids):016x}", False
                    generation = await self._ask(request, flight)
                    if not flight.again or generation.finish is not FinishReason.ABORT:
                        return generation
            finally:
                del self._in_flight[request.request_id]
                flight.done.set()

    async def abort(self, request_ids: list[str] | None = None) -> None:
        """See `InferenceEngine`."""
        wanted = list(self._in_flight) if request_ids is None else request_ids
        flights = [flight for each in wanted if (flight := self._in_flight.get(each))]
        loop = asyncio.get_running_loop()
        patience = loop.time() + PATIENCE_SECONDS
        while pending := [flight for flight in flights if not flight.done.is_set()]:
            for flight in pending:
                flight.again = False
                if loop.time() > patience and (self._paused or self._refusal):
                    flight.given_up = True
                    flight.caller.cancel()
            if request_ids is None:
                await self._server.abort_all()
            else:
                await asyncio.gather(*(self._server.abort(flight.rid) for flight in pending))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_SECONDS):
                    await asyncio.gather(*(flight.done.wait() for flight in pending))

    async def pause(self) -> None:
        """See `InferenceEngine`."""
        async with self._changing:
            self._paused = True
            await self._server.hold()

    async def resume(self) -> None:
        """See `InferenceEngine`. After a failed update, requests wait for the next one all the same."""
        async with self._changing:
            self._paused = False
            await self._go_on()

    async def update_weights(self, parts: AsyncIterable[Path], version: int) -> None:
        """See `InferenceEngine`. After a failure, requests in flight wait for the next update, and new ones are refused."""
        with tempfile.TemporaryDirectory(prefix="agenticrun-weights-") as folder:
            async with self._updating(version) as incoming:
                links = itertools.count()
                async for part in parts:
                    incoming.check(part)
                    (Path(folder) / f"part-{next(links):05d}.safetensors").symlink_to(
                        part.resolve()
                    )
                incoming.finish()
                await self._server.retract()
                await self._server.load_folder(Path(folder), version)

    @property
    def broadcast_ranks(self) -> int:
        """See `TakesBroadcast`."""
        return self._options.processes

    async def join_broadcast(self, host: str, port: int, first_rank: int, world: int) -> None:
        """See `TakesBroadcast`."""
        await self._server.join_group(host, port, first_rank, world)

    async def update_from_broadcast(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], version: int
    ) -> None:
        """See `TakesBroadcast`."""
        async with self._updating(version) as incoming:
            incoming.take({name: tuple(shape) for name, shape in zip(names, shapes, strict=True)})
            incoming.finish()
            await self._server.retract()
            await self._server.receive(names, dtypes, shapes, version)

    async def sleep(self) -> None:
        """See `InferenceEngine`. On a CPU it frees nothing: SGLang has no way to."""
        if self._in_flight:
            raise EngineError(
                f"{len(self._in_flight)} requests are in flight: the engine cannot sleep"
            )
        self._refusal = "the engine sleeps"
        if self._options.gpus:
            await self._server.release_memory()

    async def wake(self) -> None:
        """See `InferenceEngine`."""
        if self._options.gpus:
            await self._server.resume_memory()
        self._refusal = (
            "the engine has no weights since it slept: nothing is served until an update succeeds"
        )

    def stats(self) -> EngineStats:
        """See `InferenceEngine`. Tokens count when their response is finished."""
        running = min(len(self._in_flight), self._options.seats)
        waiting = len(self._in_flight) - running
        return EngineStats(
            self._version,
            running,
            waiting,
            self._generated,
            self._prompted,
            self._busy.seconds,
            self._aborted,
        )

    async def stop(self) -> None:
        """See `InferenceEngine`."""
        process, self._process = self._process, None
        if process is None:
            return
        self._refusal = "the engine has stopped"
        if process.alive and self._in_flight:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    await self.abort()
        await process.stop()
        await self._http.close()

    async def _check_plugin(self, log: Path) -> None:
        """SGLang goes on without a plug-in that fails, and would then record log-probs at another temperature without a word.

        At a boundless temperature all tokens are equally likely.
        """
        sampling = SamplingParams(1, record_temperature=BOUNDLESS_TEMPERATURE)
        generation = await self.generate(
            GenerationRequest("plug-in", "", np.zeros(1, np.int32), sampling)
        )
        if abs(generation.logprobs_T[0] + math.log(self._limits.vocabulary)) > FLAT:
            raise EngineStartError(
                f"SGLang runs without AgenticRun's plug-in: look for `plugin` in {log}"
            )

    async def _ask(self, request: GenerationRequest, flight: InFlight) -> Generation:
        try:
            answer = await self._http.post("/generate", generate_body(request, flight.rid))
        except asyncio.CancelledError:
            if flight.given_up:
                flight.caller.uncancel()
                return NOTHING
            # The server would notice some seconds later that nobody listens.
            self._background.add(task := asyncio.create_task(self._server.abort(flight.rid)))
            task.add_done_callback(self._background.discard)
            raise
        generation = read_generation(request, answer)
        self._generated += len(generation.tokens_T)
        self._prompted += computed_prompt_tokens(answer)
        if generation.finish is FinishReason.ABORT:
            self._aborted += len(generation.tokens_T)
        return generation

    @asynccontextmanager
    async def _updating(self, version: int) -> AsyncIterator[Incoming]:
        """The server takes weights inside; all parameters must come."""
        async with self._changing:
            try:
                yield Incoming(self._shapes, tied=self._tied)
                if self._restart_on_update:
                    for flight in self._in_flight.values():
                        flight.again = True
                    await self._server.abort_all()
            except BaseException as error:
                self._refusal = f"the last weight update failed ({error}): nothing is served until another succeeds"
                with contextlib.suppress(EngineError):
                    await self._server.hold()
                raise
            self._version, self._refusal = version, ""
            await self._go_on()

    async def _go_on(self) -> None:
        if not self._paused and not self._refusal:
            await self._server.go_on()
