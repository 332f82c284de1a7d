"""vLLM as an engine: a server in an environment of its own, token ids over HTTP on the loopback.

New weights are files that the server's workers map and load while the server is paused: see
`plugin`. Requests in flight stay in the server with the tokens they have, and the server labels
each token with the version that sampled it. The server sends the tokens of a request about once a
second, which are kept here: see `LoadMeter.stream_interval`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from agenticrun_workers.inference.engine import (
    STEP_SECONDS,
    EngineError,
    EngineStartError,
    EngineStats,
    InferenceEngine,
    LoadMeter,
    ReportsProgress,
    SampledTokens,
    SupportsBroadcast,
)
from agenticrun_workers.inference.model_files import ServedModel, UpdateCheck
from agenticrun_workers.inference.server_process import (
    UPDATE_SECONDS,
    ServerClient,
    ServerProcess,
    readable_answer,
)
from agenticrun_workers.inference.vllm.server import STOP_SECONDS, VllmServer
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, SamplingParams

KV_USAGE = "vllm:kv_cache_usage_perc{"
CACHE = "vllm:cache_config_info{"
PROMPT_TOKENS = "vllm:prompt_tokens_total{"
RESPONSE_TOKENS = "vllm:generation_tokens_total{"
LABEL = re.compile(r'(\w+)="([^"]*)"')
GENERATE = "/inference/v1/generate"
ID_PREFIX = "generate-tokens-"
"""The server's prefix of request ids. `/abort_requests` ignores ids without it."""
SEED_BITS = 2**64 - 1
ABORT_SECONDS = 0.05
"""Time after which an abort is repeated: the server drops it if the request has not arrived yet."""
PROBE = GenerationRequest("probe", "probe", np.zeros(1, np.int32), SamplingParams(2))
"""The first request: a healthy server may still be unable to compute.

The first of its two tokens comes in an event of its own.
"""


@dataclass
class _InFlight:
    """A request in flight."""

    request: GenerationRequest
    sampled: SampledTokens = field(default_factory=SampledTokens)
    """The tokens that have come."""
    ended: bool = False
    """All of them have come."""
    server_id: str = ""
    """Its id in the server; a restart gets a new one. Empty until the request is sent."""
    aborted: bool = False
    restarts: bool = False
    """New weights came: drop the sampled tokens and restart."""
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class _Started:
    """A server that was started."""

    http: ServerClient
    model: ServedModel


class VllmEngine(InferenceEngine, SupportsBroadcast, ReportsProgress):
    """The engine vLLM; see the module's docstring. Implements `InferenceEngine`.

    Args:
        folder: Hugging Face folder of the first weights, as safetensors.
        dtype: float32 or bfloat16.
        max_length: longest sequence, prompt and response.
        log_folder: where the server's log goes; it stays there.
        version: policy version of the first weights.
        restart_on_update: new weights restart the responses in flight, so that each has one version
            (`staleness.partialRollout: false`).
        config: vLLM's own options (`strategy.config`).
        trust_remote_code: run the Python code in the model's folder.
        threads: CPU threads of the server's computation.
        gpus: number of GPUs; 0: compute on the CPU.
        shares_gpus: a trainer has the GPUs while the engine sleeps.
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
        trust_remote_code: bool = False,
        threads: int = 1,
        gpus: int = 0,
        shares_gpus: bool = False,
        enforces_formats: bool = False,
    ) -> None:
        self._server = VllmServer(
            folder,
            dtype,
            max_length,
            log_folder,
            config or {},
            trust_remote_code,
            threads,
            gpus,
            shares_gpus,
            enforces_formats,
        )
        self.enforces_formats = self._server.enforces_formats
        self._version = version
        self._restart_on_update = restart_on_update
        self._in_flight: dict[str, _InFlight] = {}
        self._process: ServerProcess | None = None
        self._started: _Started | None = None
        """None until `start`."""
        self._changing = asyncio.Lock()
        self._paused = False
        self._refusal: str | None = None
        """Why new requests are refused until an update succeeds, or None."""
        self._sent = self._generated = self._prompted = self._aborted = 0
        self._counted = 0
        """Tokens that the server has counted: those of a prompt when all of it is computed."""
        self._load = LoadMeter(self._server.max_requests)

    @override
    async def start(self) -> None:
        folder = self._server.folder
        model = ServedModel.read(folder, self._server.limits())
        process = self._process = ServerProcess(self._server.spec())
        self._started = _Started(ServerClient(process), model)
        await process.start()
        # The server is up, but may lack our plug-in: no request is served before that is known.
        try:
            await self._workers("sample_by_request")
            await self._label(self._version)
            await self._check_plugin()
        except EngineError as error:
            await self.stop()
            raise EngineStartError(
                f"vLLM started, but cannot serve {folder}: see its log {process.log}. {error}"
            ) from error
        except BaseException:
            await self.stop()
            raise

    @property
    def url(self) -> str:
        """URL of the server, once it has started."""
        assert self._process is not None, "started"
        return self._process.url

    @override
    async def generate(self, request: GenerationRequest) -> Generation:
        if self._process is None or not self._process.alive:
            raise EngineError(
                self._process.failure() if self._process else "the engine is not running"
            )
        if self._refusal is not None:
            raise EngineError(f"{self._refusal}: nothing is served until an update succeeds")
        self._running.model.limits.check(request, self._in_flight)
        flight = self._in_flight[request.request_id] = _InFlight(request)
        with self._load.running():
            try:
                return await self._sample(flight)
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
        wanted = self._in_flight if request_ids is None else request_ids
        flights = [flight for each in list(wanted) if (flight := self._in_flight.get(each))]
        for flight in flights:
            flight.aborted = True
        # Repeated: the server drops an abort of a request that it has not read yet.
        while ids := [
            ID_PREFIX + flight.server_id for flight in flights if not flight.done.is_set()
        ]:
            await self._http.post("/abort_requests", {"request_ids": ids}, seconds=STEP_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_SECONDS):
                    await asyncio.gather(*(flight.done.wait() for flight in flights))

    @override
    async def pause(self) -> None:
        async with self._changing:
            self._paused = True
            await self._http.post("/pause?mode=keep&clear_cache=false", {}, seconds=STEP_SECONDS)

    @override
    async def resume(self) -> None:
        async with self._changing:
            self._paused = False
            await self._resume_server()

    @override
    async def update_weights(self, parts: AsyncIterable[Path], version: int) -> None:
        """After a failure, running requests wait for the next update; new requests are refused."""
        async with self._updating(version) as check:
            async for part in parts:
                check.add_file(part)
                await self._workers("load_weights_file", path=str(part))

    @property
    @override
    def broadcast_ranks(self) -> int:
        return self._server.ranks

    @override
    async def join_broadcast(self, host: str, port: int, first_rank: int, world: int) -> None:
        async with self._changing:
            await self._workers(
                "join_weight_group", host=host, port=port, first_rank=first_rank, world=world
            )

    @override
    async def update_from_broadcast(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], version: int
    ) -> None:
        async with self._updating(version) as check:
            check.add({name: tuple(shape) for name, shape in zip(names, shapes, strict=True)})
            await self._workers("receive_weights", names=names, dtypes=dtypes, shapes=shapes)

    @override
    async def sleep(self) -> None:
        """Without a GPU the engine only stops serving: vLLM cannot free memory on CPUs."""
        async with self._changing:
            if self._in_flight:
                raise EngineError(
                    f"{len(self._in_flight)} requests are in flight: the engine cannot sleep"
                )
            self._refusal = "the engine sleeps"
            # Keeps the requests that the server still counts, and drops the cache.
            await self._http.post("/pause?mode=keep", {}, seconds=STEP_SECONDS)
            if self._server.gpus:
                await self._http.post("/sleep?level=2&mode=keep", {}, seconds=UPDATE_SECONDS)

    @override
    async def wake(self) -> None:
        async with self._changing:
            self._refusal = "the engine has no weights since it slept"
            if self._server.gpus:
                await self._http.post("/wake_up", {}, seconds=UPDATE_SECONDS)
                # Waking resumes the server, with uninitialised weights.
                await self._http.post("/pause?mode=keep", {}, seconds=STEP_SECONDS)

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
            self._load.computed(self._counted),
            held=self._paused or self._refusal is not None,
        )

    @override
    async def check_health(self) -> None:
        """Its core answers between two steps, also while it sleeps."""
        # Not during an update: a server that loads weights answers late.
        async with self._changing:
            await self._http.check("/is_paused")
            metrics = await self._http.check("/metrics")
        with self._load.reading(), readable_answer():
            load = read_load(metrics)
            self._load.poll_kv(load.kv_used)
            self._load.poll_kv_tokens(load.kv_tokens)
            self._counted = load.counted

    @override
    async def stop(self) -> None:
        # Taken first: a second call finds nothing to stop.
        process, self._process = self._process, None
        if process is None:
            return
        if process.alive:
            # On SIGTERM the server drops requests in flight without an answer.
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self.abort()
        await process.stop()
        await self._http.close()

    @property
    def _running(self) -> _Started:
        assert self._started is not None, "start comes first"
        return self._started

    @property
    def _http(self) -> ServerClient:
        return self._running.http

    async def _check_plugin(self) -> None:
        """Raise `EngineError` if the server cannot compute, or runs without `plugin.register`.

        At its best: tokens that come in one event have versions without it, too.
        """
        probe = _InFlight(PROBE, server_id="probe")
        await self._collect(probe)
        if min(probe.sampled.versions, default=-1) < 0:
            raise EngineError("AgenticRun's plug-in does not work in this server")

    async def _sample(self, flight: _InFlight) -> Generation:
        """Sample a response. New weights may restart it."""
        while True:
            flight.restarts = flight.ended = False
            flight.sampled = SampledTokens()
            # A new id, because the server may still be ending the earlier try.
            flight.server_id = str(self._sent)
            self._sent += 1
            finish = await self._collect(flight)
            self._prompted += len(flight.request.prompt_tokens)
            if finish is FinishReason.ABORT:
                self._aborted += len(flight.sampled)
            # Only an abort of our own update restarts it: the caller's abort is an answer.
            if finish is not FinishReason.ABORT or flight.aborted or not flight.restarts:
                return flight.sampled.response(finish)

    async def _collect(self, flight: _InFlight) -> FinishReason:
        """Send a request and collect its tokens until it ends."""
        interval = self._load.stream_interval(self._generated)
        body = to_vllm(flight.request, flight.server_id, interval)
        finish = None
        async with contextlib.aclosing(self._http.events(GENERATE, body)) as events:
            async for event in events:
                had = len(flight.sampled)
                with readable_answer():
                    finish = read_event(event, flight.sampled)
                # `progress` must not hand a whole response to another engine.
                flight.ended = finish is not None
                self._generated += len(flight.sampled) - had
        # The connection ended in order, but the response did not.
        if finish is None:
            raise EngineError("the server's answer ended before the response")
        return finish

    @contextlib.asynccontextmanager
    async def _updating(self, version: int) -> AsyncIterator[UpdateCheck]:
        """Hold the server during an update. The caller adds every parameter to the check."""
        async with self._changing:
            self._refusal = None
            try:
                with self._load.held():
                    # From here on the time is the sync's: the engine is not idle while the server
                    # pauses.
                    await self._hold()
                    await self._workers("begin_weights")
                    check = self._running.model.update_check()
                    yield check
                    check.finish()
                    await self._workers("finish_weights")
                    await self._label(version)
            except BaseException as error:
                self._refusal = f"the last weight update failed ({error})"
                raise
            self._version = version
            await self._resume_server()

    async def _hold(self) -> None:
        """Stop sampling, and drop the cache of the old weights."""
        # Kept requests continue with the new weights from the tokens that they have.
        if not self._restart_on_update:
            await self._http.post("/pause?mode=keep", {}, seconds=STEP_SECONDS)
            return
        for flight in self._in_flight.values():
            # Set before the pause, because the aborted answers come at once.
            flight.restarts = True
        await self._http.post("/pause?mode=abort", {}, seconds=STEP_SECONDS)

    async def _label(self, version: int) -> None:
        """Set the version of the tokens from now on."""
        await self._http.post(
            "/update_weight_version", {"new_version": str(version)}, seconds=STEP_SECONDS
        )

    async def _resume_server(self) -> None:
        # After a failed update, or while the caller has paused the engine, the server stays paused.
        if not self._paused and self._refusal is None:
            await self._http.post("/resume", {}, seconds=STEP_SECONDS)

    async def _workers(self, method: str, **arguments: Any) -> None:
        """Call a method of the plug-in in every worker."""
        body = {"method": method, "kwargs": arguments}
        await self._http.post("/collective_rpc", body, seconds=UPDATE_SECONDS)


@dataclass(frozen=True)
class Load:
    """Use of a server, over all its cores."""

    kv_used: float
    """Mean share of the KV caches that is in use."""
    kv_tokens: int
    """Tokens for which there is room in that share."""
    counted: int
    """Tokens of prompts and responses that the server has counted."""


def read_load(metrics: bytes) -> Load:
    """Read Prometheus' text.

    Raises:
        ValueError: it lacks a metric.
        KeyError: it lacks a label.
    """
    lines = metrics.decode().splitlines()
    shares = _values(lines, KV_USAGE)
    caches = [dict(LABEL.findall(line)) for line in lines if line.startswith(CACHE)]
    sizes = [int(cache["num_gpu_blocks"]) * int(cache["block_size"]) for cache in caches]
    return Load(
        sum(shares) / len(shares),
        round(sum(share * size for share, size in zip(shares, sizes, strict=True))),
        int(sum(_values(lines, PROMPT_TOKENS) + _values(lines, RESPONSE_TOKENS))),
    )


def _values(lines: list[str], metric: str) -> list[float]:
    """Return the values of a metric, one per core. Raises ValueError if there is none."""
    found = [float(line.rsplit(None, 1)[1]) for line in lines if line.startswith(metric)]
    if not found:
        raise ValueError(f"no metric {metric}")
    return found


def to_vllm(request: GenerationRequest, server_id: str, interval: int) -> dict[str, Any]:
    """Return the JSON body of a request.

    Args:
        request: the request.
        server_id: its id in the server.
        interval: number of new tokens after which the server sends them.
    """
    sampling = request.sampling
    tag = sampling.structural_tag
    formats = {} if tag is None else {"structured_outputs": {"structural_tag": tag}}
    return {
        "request_id": server_id,
        "token_ids": request.prompt_tokens.tolist(),
        "priority": request.priority,
        "stream": True,
        "sampling_params": {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
            "stream_interval": interval,
            **formats,
            "extra_args": {
                "seed": request.seed & SEED_BITS,
                "sampled": request.sampled,
                "record_temperature": sampling.record_temperature or sampling.temperature or 1.0,
            },
        },
    }


def read_event(event: Mapping[str, Any], sampled: SampledTokens) -> FinishReason | None:
    """Add the new tokens of an event to those of the request. Returns how the response has ended.

    Versions are the labels of `/update_weight_version`.
    """
    choice = event["choices"][0]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    sampled.extend(choice["token_ids"], logprobs, choice["weight_versions"] or ())
    return FinishReason(choice["finish_reason"]) if choice["finish_reason"] else None
