"""SGLang as an engine: its own server, in its own environment, as a child process; token ids in and out by its native /generate.

- Weights: the files are linked into one folder, which the server reads when all have come and their names and shapes have been
  checked, so sampling goes on meanwhile, and a bad file never reaches the server. Requests in flight are retracted, which drops
  their keys and values; they go on under the new weights, and SGLang reports which tokens had which version.
- Log-probs at any temperature, and seeds: `sglang_plugin`.
- An id outside the vocabulary ends the whole server, so requests are checked here.
- Aborted while they wait or are paused, requests come back with what the server had sent us by then, which may be less than was sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import tempfile
from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agenticrun_workers.inference.busy_clock import BusyClock
from agenticrun_workers.inference.engine import EngineError, EngineStartError, EngineStats, InvalidRequest
from agenticrun_workers.inference.engine_http import EngineHttp
from agenticrun_workers.inference.engine_process import EngineProcess
from agenticrun_workers.inference.model_files import Incoming, is_tied, read_limits, shapes_of_model
from agenticrun_workers.inference.request_limits import RequestLimits
from agenticrun_workers.inference.sglang_requests import computed_prompt_tokens, generate_body, read_generation
from agenticrun_workers.inference.sglang_server import SglangOptions
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, SamplingParams

BOUNDLESS_TEMPERATURE = 1e6
FLAT = 0.01
DRAIN_SECONDS = 5.0
CONTROL_SECONDS = 600.0
"""Longest wait for the answer to anything but a request: the server answers between two steps."""


@dataclass
class InFlight:
    """A request that the server works on, under a name of the server's own."""

    rid: str
    again: bool = False
    """Whether it begins again when it comes back."""


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
        version: int = 0,
        restart_on_update: bool = False,
        config: Mapping[str, Any] | None = None,
        log_folder: Path,
        threads: int = 1,
        gpus: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        self._options = SglangOptions(folder, dtype, max_length, version, log_folder, config or {}, threads, gpus, trust_remote_code)
        self._restart_on_update = restart_on_update
        self._version = version
        self._process: EngineProcess | None = None
        self._in_flight: dict[str, InFlight] = {}
        self._rids = itertools.count()
        self._refusal = "the engine has not started"
        self._paused = False
        self._background: set[asyncio.Task[Any]] = set()
        self._control = asyncio.Lock()
        self._busy = BusyClock()
        self._generated = self._prompted = self._aborted = 0

    async def start(self) -> None:
        """See `InferenceEngine`."""
        options = self._options
        vocabulary, longest = read_limits(options.folder)
        if longest is not None and options.max_length > longest:
            raise EngineStartError(f"sequences of {options.max_length} tokens do not fit into the model's context of {longest}")
        self._limits = RequestLimits(vocabulary, options.max_length)
        self._shapes, self._tied = shapes_of_model(options.folder), is_tied(options.folder)
        self._process = EngineProcess(options.server())
        await self._process.start()
        self._http = EngineHttp(self._process)
        self._refusal = ""
        try:
            await self._check_plugin()
        except BaseException:
            await self.stop()
            raise

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine`."""
        if self._refusal:
            raise EngineError(self._refusal)
        self._limits.check(request, self._in_flight)
        with self._busy.running():
            try:
                while True:
                    # Of one length, because SGLang aborts every request whose name begins with the given one.
                    flight = self._in_flight[request.request_id] = InFlight(f"{next(self._rids):016x}")
                    generation = await self._ask(request, flight)
                    if not flight.again or generation.finish is not FinishReason.ABORT:
                        return generation
            finally:
                del self._in_flight[request.request_id]

    async def abort(self, request_ids: list[str] | None = None) -> None:
        """See `InferenceEngine`."""
        if request_ids is None:
            await self._abort_all(again=False)
        else:
            flights = [self._in_flight[request_id] for request_id in request_ids if request_id in self._in_flight]
            for flight in flights:
                flight.again = False
            await asyncio.gather(*(self._post("/abort_request", {"rid": flight.rid}) for flight in flights))

    async def pause(self) -> None:
        """See `InferenceEngine`."""
        async with self._control:
            self._paused = True
            await self._post("/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        """See `InferenceEngine`. After a failed update, requests wait for the next one all the same."""
        async with self._control:
            self._paused = False
            await self._go_on()

    async def update_weights(self, parts: AsyncIterable[Path], version: int) -> None:
        """See `InferenceEngine`. After a failure, requests in flight wait for the next update, and new ones are refused."""
        async with self._control:
            with tempfile.TemporaryDirectory(prefix="agenticrun-weights-") as folder:
                try:
                    await self._collect(parts, Path(folder))
                    await self._load(Path(folder), version)
                except BaseException as error:
                    self._refusal = f"the last weight update failed ({error}): nothing is served until another succeeds"
                    await self._post("/pause_generation", {"mode": "in_place"})
                    raise
            self._version, self._refusal = version, ""
            await self._go_on()

    async def sleep(self) -> None:
        """See `InferenceEngine`. On a CPU it frees nothing: SGLang has no way to."""
        if self._in_flight:
            raise EngineError(f"{len(self._in_flight)} requests are in flight: the engine cannot sleep")
        self._refusal = "the engine sleeps"
        if self._options.gpus:
            await self._post("/release_memory_occupation", {})

    async def wake(self) -> None:
        """See `InferenceEngine`."""
        if self._options.gpus:
            await self._post("/resume_memory_occupation", {})
        self._refusal = "the engine has no weights since it slept: nothing is served until an update succeeds"

    def stats(self) -> EngineStats:
        """See `InferenceEngine`. The server has its own queue; all requests in flight count as running."""
        running = len(self._in_flight)
        return EngineStats(self._version, running, 0, self._generated, self._prompted, self._busy.seconds, self._aborted)

    async def stop(self) -> None:
        """See `InferenceEngine`."""
        process, self._process = self._process, None
        if process is None:
            return
        self._refusal = "the engine has stopped"
        if process.alive and self._in_flight:
            with contextlib.suppress(EngineError, TimeoutError):
                await self._drain()
        await process.stop()
        await self._http.close()

    async def _check_plugin(self) -> None:
        """SGLang goes on without a plug-in that fails, and would then record log-probs at another temperature without a word.

        At a boundless temperature all tokens are equally likely.
        """
        sampling = SamplingParams(1, record_temperature=BOUNDLESS_TEMPERATURE)
        generation = await self.generate(GenerationRequest("plug-in", "", np.zeros(1, np.int32), sampling))
        if abs(generation.logprobs_T[0] + math.log(self._limits.vocabulary)) > FLAT:
            raise EngineStartError(f"SGLang runs without AgenticRun's plug-in: look for its name in {self._process and self._process.log}")

    async def _ask(self, request: GenerationRequest, flight: InFlight) -> Generation:
        try:
            answer = await self._http.post("/generate", generate_body(request, flight.rid))
        except asyncio.CancelledError:
            # The server would notice some seconds later that nobody listens.
            self._background.add(task := asyncio.create_task(self._post("/abort_request", {"rid": flight.rid})))
            task.add_done_callback(self._background.discard)
            raise
        generation = read_generation(request, answer)
        self._generated += len(generation.tokens_T)
        self._prompted += computed_prompt_tokens(answer)
        if generation.finish is FinishReason.ABORT:
            self._aborted += len(generation.tokens_T)
        return generation

    async def _collect(self, parts: AsyncIterable[Path], folder: Path) -> None:
        """Link all files into one folder, where the server finds them."""
        incoming, links = Incoming(self._shapes, tied=self._tied), itertools.count()
        async for part in parts:
            incoming.check(part)
            (folder / f"part-{next(links):05d}.safetensors").symlink_to(part.resolve())
        incoming.finish()

    async def _load(self, folder: Path, version: int) -> None:
        await self._post("/pause_generation", {"mode": "retract"})
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        answer = await self._post("/update_weights_from_disk", body)
        if not answer["success"]:
            raise EngineError(f"SGLang could not load the weights: {answer['message']}")
        if self._restart_on_update:
            await self._abort_all(again=True)

    async def _abort_all(self, *, again: bool) -> None:
        for flight in self._in_flight.values():
            flight.again = again
        await self._post("/abort_request", {"abort_all": True})

    async def _go_on(self) -> None:
        if not self._paused and not self._refusal:
            await self._post("/continue_generation", {})

    async def _drain(self) -> None:
        """Let requests in flight come back with what they have."""
        async with asyncio.timeout(DRAIN_SECONDS):
            await self._post("/continue_generation", {})
            await self._abort_all(again=False)
            while self._in_flight:
                await asyncio.sleep(0.01)

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            return await self._http.post(path, body, seconds=CONTROL_SECONDS)
        except InvalidRequest as error:
            raise EngineError(str(error)) from error
