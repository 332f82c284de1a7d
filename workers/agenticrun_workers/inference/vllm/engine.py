"""vLLM as an engine: its own server in an environment of its own, token ids over HTTP on the loopback.

New weights are files that the server's workers map and load while it is paused: see `vllm_plugin`. Requests in flight stay in the
server meanwhile, with the tokens they have, and it labels each token with the version it was sampled with.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agenticrun_workers.inference.busy_clock import BusyClock
from agenticrun_workers.inference.engine import EngineError, EngineStartError, EngineStats
from agenticrun_workers.inference.engine_http import EngineHttp
from agenticrun_workers.inference.model_files import Incoming, is_tied, shapes_of_model
from agenticrun_workers.inference.server_process import EngineProcess
from agenticrun_workers.inference.vllm.server import STOP_SECONDS, VllmServer
from agenticrun_workers.inference.vllm_messages import GENERATE, ID_PREFIX, from_vllm, to_vllm
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, SamplingParams

ABORT_SECONDS = 0.05
"""How long an abort may take before it is sent again: the server forgets those of requests that have not reached it yet."""
PROBE = GenerationRequest("probe", "probe", np.zeros(1, np.int32), SamplingParams(1))
"""The first request: a server that is healthy may still be unable to compute."""


@dataclass
class _Flight:
    """A request in flight."""

    request: GenerationRequest
    server_id: str = ""
    """Its id in the server; a response that begins again has another one. Empty: not there yet."""
    aborted: bool = False
    restarts: bool = False
    """New weights came: what was sampled is thrown away."""
    done: asyncio.Event = field(default_factory=asyncio.Event)


class VllmEngine:
    """See the module's docstring; the protocol is `InferenceEngine`.

    Args:
        folder: Hugging Face folder of the first weights, as safetensors.
        dtype: of weights and computation: float32 or bfloat16.
        max_length: longest sequence, prompt and response.
        version: policy version of the first weights.
        restart_on_update: new weights begin responses in flight again, so that each has one version
            (`staleness.partialRollout: false`).
        config: `strategy.config`, options of `vllm serve` under their own names.
        log_folder: where the server's log is kept.
        trust_remote_code: run the code that comes with the model.
        threads: of its computation, without a GPU.
        gpus: how many GPUs it has; 0: it computes on the CPU.

    Raises:
        ValueError: `config` holds an option that another field decides.
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
        trust_remote_code: bool = False,
        threads: int = 1,
        gpus: int = 0,
    ) -> None:
        self._server = VllmServer(
            folder, dtype, max_length, log_folder, config or {}, trust_remote_code, threads, gpus
        )
        self._version = version
        self._restart_on_update = restart_on_update
        self._flights: dict[str, _Flight] = {}
        self._process: EngineProcess | None = None
        self._changing = asyncio.Lock()
        self._paused = False
        self._refusal: str | None = None
        """Why nothing is served until an update succeeds."""
        self._sent = self._generated = self._prompted = self._aborted = 0
        self._busy = BusyClock()

    async def start(self) -> None:
        """See `InferenceEngine`."""
        folder = self._server.folder
        self._limits = self._server.limits()
        self._shapes, self._tied = shapes_of_model(folder), is_tied(folder)
        self._process = EngineProcess(self._server.process())
        await self._process.start()
        self._http, log = EngineHttp(self._process), self._process.log
        try:
            await self._workers("sample_by_request")
            await self._label(self._version)
            await self._http.post(GENERATE, to_vllm(PROBE, "probe"))
        except EngineError as error:
            await self.stop()
            raise EngineStartError(
                f"vLLM started, but cannot serve {folder}: see its log {log}. {error}"
            ) from error
        except BaseException:
            await self.stop()
            raise

    @property
    def url(self) -> str:
        """Where the server listens, once it has started."""
        assert self._process is not None, "started"
        return self._process.url

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine`."""
        if self._process is None or not self._process.alive:
            raise EngineError(
                self._process.failure() if self._process else "the engine is not running"
            )
        if self._refusal is not None:
            raise EngineError(f"{self._refusal}: nothing is served until an update succeeds")
        self._limits.check(request, self._flights)
        flight = self._flights[request.request_id] = _Flight(request)
        with self._busy.running():
            try:
                return await self._sample(flight)
            finally:
                del self._flights[request.request_id]
                flight.done.set()

    async def abort(self, request_ids: list[str] | None = None) -> None:
        """See `InferenceEngine`."""
        wanted = self._flights if request_ids is None else request_ids
        flights = [flight for each in list(wanted) if (flight := self._flights.get(each))]
        for flight in flights:
            flight.aborted = True
        while ids := [
            ID_PREFIX + flight.server_id for flight in flights if not flight.done.is_set()
        ]:
            await self._http.post("/abort_requests", {"request_ids": ids})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_SECONDS):
                    await asyncio.gather(*(flight.done.wait() for flight in flights))

    async def pause(self) -> None:
        """See `InferenceEngine`."""
        async with self._changing:
            self._paused = True
            await self._http.post("/pause?mode=keep&clear_cache=false", {})

    async def resume(self) -> None:
        """See `InferenceEngine`."""
        async with self._changing:
            self._paused = False
            await self._go_on()

    async def update_weights(self, parts: AsyncIterable[Path], version: int) -> None:
        """See `InferenceEngine`. After a failure, requests in flight wait for the next update, and new ones are refused."""
        async with self._updating(version) as incoming:
            async for part in parts:
                incoming.check(part)
                await self._workers("load_weights_file", path=str(part))

    @property
    def broadcast_ranks(self) -> int:
        """See `TakesBroadcast`."""
        return self._server.ranks

    async def join_broadcast(self, host: str, port: int, first_rank: int, world: int) -> None:
        """See `TakesBroadcast`."""
        async with self._changing:
            await self._workers(
                "join_weight_group", host=host, port=port, first_rank=first_rank, world=world
            )

    async def update_from_broadcast(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], version: int
    ) -> None:
        """See `TakesBroadcast`."""
        async with self._updating(version) as incoming:
            incoming.take({name: tuple(shape) for name, shape in zip(names, shapes, strict=True)})
            await self._workers("receive_weights", names=names, dtypes=dtypes, shapes=shapes)

    async def sleep(self) -> None:
        """See `InferenceEngine`. Without a GPU it only stops serving: vLLM cannot give the memory of CPUs back."""
        async with self._changing:
            if self._flights:
                raise EngineError(
                    f"{len(self._flights)} requests are in flight: the engine cannot sleep"
                )
            self._refusal = "the engine sleeps"
            await self._http.post("/pause?mode=keep", {})
            if self._server.gpus:
                await self._http.post("/sleep?level=2&mode=keep", {})

    async def wake(self) -> None:
        """See `InferenceEngine`."""
        async with self._changing:
            self._refusal = "the engine has no weights since it slept"
            if self._server.gpus:
                await self._http.post("/wake_up", {})
                # Waking lets the server go on, with weights that mean nothing.
                await self._http.post("/pause?mode=keep", {})

    def stats(self) -> EngineStats:
        """See `InferenceEngine`. Tokens count when their response is finished."""
        running = min(len(self._flights), self._server.seats)
        waiting = len(self._flights) - running
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
        if process.alive:
            # A server that is told to end drops requests in flight without an answer.
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self.abort()
        await process.stop()
        await self._http.close()

    async def _sample(self, flight: _Flight) -> Generation:
        """Until the response is finished by anything but new weights."""
        while True:
            flight.restarts = False
            flight.server_id = str(self._sent)
            self._sent += 1
            generation = from_vllm(
                await self._http.post(GENERATE, to_vllm(flight.request, flight.server_id))
            )
            self._prompted += len(flight.request.prompt_tokens)
            self._generated += len(generation.tokens_T)
            if generation.finish is FinishReason.ABORT:
                self._aborted += len(generation.tokens_T)
            if generation.finish is not FinishReason.ABORT or flight.aborted or not flight.restarts:
                return generation

    @contextlib.asynccontextmanager
    async def _updating(self, version: int) -> AsyncIterator[Incoming]:
        """The workers take weights inside; all parameters must have come in the end."""
        async with self._changing:
            self._refusal = None
            try:
                await self._hold()
                await self._workers("begin_weights")
                incoming = Incoming(self._shapes, tied=self._tied)
                yield incoming
                incoming.finish()
                await self._workers("finish_weights")
                await self._label(version)
            except BaseException as error:
                self._refusal = f"the last weight update failed ({error})"
                raise
            self._version = version
            await self._go_on()

    async def _hold(self) -> None:
        """Stop sampling, and drop what was computed with the old weights."""
        if not self._restart_on_update:
            await self._http.post("/pause?mode=keep", {})
            return
        for flight in self._flights.values():
            flight.restarts = True
        await self._http.post("/pause?mode=abort", {})

    async def _label(self, version: int) -> None:
        """Tokens from now on are of this version."""
        await self._http.post("/update_weight_version", {"new_version": str(version)})

    async def _go_on(self) -> None:
        if not self._paused and self._refusal is None:
            await self._http.post("/resume", {})

    async def _workers(self, method: str, **arguments: Any) -> None:
        """Call a method of `vllm_plugin` in every worker."""
        await self._http.post("/collective_rpc", {"method": method, "kwargs": arguments})
