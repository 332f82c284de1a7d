"""EngineActor: the process that holds an engine and serves it to many clients."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import ray

from agenticrun_api import Pipeline, Role
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.inference.incoming_weights import IncomingWeights
from agenticrun_workers.inference.request_port import Address, RequestPort
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.placement import Placement, here
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest
from agenticrun_workers.weights.buckets import TORCH_NAMES, Shape
from agenticrun_workers.weights.mapping import Verifier

if TYPE_CHECKING:
    from agenticrun_workers.inference import EngineStats, InferenceEngine, TakesBroadcast

LOG_FOLDER = "AGENTICRUN_LOG_FOLDER"
"""Environment variable: where servers of engines log. Default: Ray's own logs, which its dashboard shows."""

NOTHING = Generation(
    np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), FinishReason.ABORT
)
"""Of a request that is given up before the engine has heard of it."""


def log_folder() -> Path:
    """`LOG_FOLDER`. Ray's own is this session's: `session_latest` is that of whoever began one last on this machine."""
    if chosen := os.environ.get(LOG_FOLDER):
        return Path(chosen)
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name(), "logs")


class EngineActor:
    """Serves one engine to many clients. torch is imported by `start`, because the driver imports this module."""

    def __init__(self, name: str) -> None:
        self._name = name
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._port = RequestPort(self._generate, self._abort, host)
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._verifier = Verifier()
        self._awake = True
        self._waiting: dict[str, asyncio.Event] = {}
        """Requests that came while the engine sleeps, by id. One that is given up is not in here any more when its event is set."""
        self._sampling: set[asyncio.Task[None]] = set()
        """Requests that have reached the engine."""

    async def placement(self) -> Placement:
        return here(self._name, Role.INFERENCE)

    async def until_death(self) -> None:
        """Never returns: the caller's future fails when this process dies, or its engine serves nothing any more."""
        await self._broken

    async def use_gpus(self, gpus: tuple[str, ...]) -> None:
        """Compute on exactly these, which Ray has given to a trainer's ranks. Before `start`; also for servers of the engine's own."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)

    async def start(self, pipeline: Pipeline, source: ModelSource, gpus: int, threads: int) -> None:
        """Load the model and serve, on these many GPUs and torch threads. Raises `InvalidConfig`."""
        import torch

        from agenticrun_workers.inference import EngineStartError, UnusableModel
        from agenticrun_workers.inference.builder import build_engine

        torch.set_num_threads(threads)
        logs = log_folder()
        with source.folder() as folder:
            self._engine: InferenceEngine = build_engine(
                pipeline, source, folder, gpus=gpus, threads=threads, logs=logs
            )
            try:
                await self._engine.start()
            except EngineStartError as error:
                field = (
                    "spec.model.path"
                    if isinstance(error, UnusableModel)
                    else "spec.pipeline.actorInfer.strategy"
                )
                raise InvalidConfig(field, str(error)) from error

    async def sleep(self) -> None:
        """Leave the device to a trainer. Requests under way are given up, later ones wait for the next weights."""
        self._awake = False
        await self._engine.abort()
        await asyncio.gather(*self._sampling)
        await self._engine.sleep()

    async def wake(self) -> None:
        """Take the device back. There are no weights before the next update."""
        await self._engine.wake()

    async def begin_update(self, version: int) -> None:
        """Stop sampling, and take the buckets that follow as the weights of this policy version."""
        self._verifier.forget()
        self._incoming = IncomingWeights(self._engine, version, self._verifier)

    async def take_bucket(self, path: str, checksum: int) -> None:
        """A file with some of the weights. Raises `CorruptBucket`, and `EngineError` of an update that has failed."""
        await self._incoming.take(Path(path), checksum)

    async def finish_update(self) -> None:
        """All weights are there. Returns when requests under way go on with them. Raises `EngineError`."""
        await self._incoming.finish()
        self._awake = True
        for woken in self._waiting.values():
            woken.set()

    async def broadcast_ranks(self) -> int:
        """How many members of a broadcast this engine is. Raises `InvalidConfig` for one that takes none."""
        return self._broadcasts().broadcast_ranks

    async def join_broadcast(self, host: str, port: int, first_rank: int, world: int) -> None:
        """Meet the trainer and the other engines. Raises `EngineError`."""
        await self._broadcasts().join_broadcast(host, port, first_rank, world)

    async def update_from_broadcast(self, shapes: tuple[Shape, ...], version: int) -> None:
        """Take these parameters, as the trainer broadcasts them, as policy version `version`. Raises `EngineError`."""
        dtypes = [TORCH_NAMES[shape.dtype] for shape in shapes]
        sizes = [list(shape.shape) for shape in shapes]
        await self._broadcasts().update_from_broadcast(
            [shape.name for shape in shapes], dtypes, sizes, version
        )

    async def requests_address(self) -> Address:
        """Where clients send their requests."""
        return await self._port.address()

    async def stats(self) -> EngineStats:
        return self._engine.stats()

    async def _generate(self, request: GenerationRequest) -> Generation:
        while not self._awake:
            woken = self._waiting[request.request_id] = asyncio.Event()
            await woken.wait()
            if self._waiting.get(request.request_id) is not woken:
                return NOTHING
            del self._waiting[request.request_id]
        task = asyncio.current_task()
        assert task is not None
        self._sampling.add(task)
        task.add_done_callback(self._sampling.discard)
        try:
            return await self._engine.generate(request)
        except Exception as error:
            self._notice(error)
            raise

    async def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if woken := self._waiting.pop(request_id, None):
                woken.set()
        await self._engine.abort(request_ids)

    def _broadcasts(self) -> TakesBroadcast:
        from agenticrun_workers.inference import TakesBroadcast

        if not isinstance(self._engine, TakesBroadcast):
            advice = "takes no broadcasts: choose Auto, ObjectStore or Disk"
            raise InvalidConfig(
                "spec.pipeline.weightSync.transport", f"{type(self._engine).__name__} {advice}"
            )
        return self._engine

    def _notice(self, error: Exception) -> None:
        """An engine that cannot serve is replaced; one that refuses a request is fine."""
        from agenticrun_workers.inference import EngineError, InvalidRequest

        if (
            isinstance(error, EngineError)
            and not isinstance(error, InvalidRequest)
            and not self._broken.done()
        ):
            self._broken.set_exception(error)
