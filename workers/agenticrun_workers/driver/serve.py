"""`agenticrun serve`: one engine in this process behind the OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agenticrun_api import AgenticRun
from agenticrun_workers.agents import AgentLimits, ChatFormat
from agenticrun_workers.agents.outside.policy_endpoint import PolicyEndpoint
from agenticrun_workers.agents.outside.session import Policy, RequestRefused
from agenticrun_workers.inference import InferenceEngine, InvalidRequest
from agenticrun_workers.inference.builder import build_engine
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.models.tokenizer import load_tokenizer
from agenticrun_workers.types import Generation, GenerationRequest

HEALTH_SECONDS = 5.0
"""Time between two looks at the engine."""


@dataclass(frozen=True)
class Served:
    """The address to serve at, and the name to serve under."""

    name: str
    host: str
    port: int
    api_key: str | None
    gpus: int


async def serve(
    run: AgenticRun, served: Served, logs: Path, listening: Callable[[str], None]
) -> None:
    """Serve the model of a run until the process gets SIGINT or SIGTERM.

    Args:
        run: `spec.model.path` names the weights; `pipeline` the engine, the length of sequences,
            and how requests are sampled that do not say it.
        logs: folder for the output of the engine's server.
        listening: called with the base_url when requests are answered.

    Raises:
        InvalidConfig: an option of the engine cannot work.
        EngineError: the engine cannot start, or fails.
        MissingGpus: there are fewer GPUs than asked for.
        OSError: the address cannot be listened at.
    """
    source, pipeline = ModelSource.of(run.spec.model), run.spec.pipeline
    tokenizer = load_tokenizer(source.tokenizer())
    sampling = pipeline.actor_infer.generating
    limits = AgentLimits(
        max_turns=1,  # each request has a session of its own
        max_tokens_per_step=pipeline.sequence_length,
        sequence_length=pipeline.sequence_length,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
    )
    chat = ChatFormat(tokenizer)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    # As handlers, so that the engine's server is stopped in order.
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    with source.folder() as folder:
        engine = build_engine(
            pipeline,
            source,
            folder,
            owner=served.name,
            gpus=[str(gpu) for gpu in range(served.gpus)],
            threads=os.cpu_count() or 1,
            logs=logs,
            # Nothing is trained on these answers, so their log-probs may be those of masked tokens.
            enforces_formats=True,
        )
        policy = Policy(tokenizer, chat, limits, served.name, engine.enforces_formats)
        try:
            # Before the port opens, so that a client which connects is answered.
            await engine.start()
            endpoint = PolicyEndpoint(
                policy, _Generate(engine), served.host, served.port, served.api_key
            )
            async with endpoint.listening() as url:
                listening(url)
                await _until(ended, engine)
        finally:
            await engine.stop()


async def _until(ended: asyncio.Event, engine: InferenceEngine) -> None:
    """Return when `ended` is set. Raises `EngineError` if the engine fails."""
    while not ended.is_set():
        try:
            await asyncio.wait_for(ended.wait(), HEALTH_SECONDS)
        except TimeoutError:
            # A dead engine must end the process: whatever supervises it starts another.
            await engine.check_health()


class _Generate:
    """Samples responses, and ends those whose client has gone."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine

    async def __call__(self, request: GenerationRequest) -> Generation:
        try:
            return await self._engine.generate(request)
        except InvalidRequest as error:
            raise RequestRefused(error.reason) from error
        except asyncio.CancelledError:
            # Otherwise the engine would sample to the end, for no one.
            await self._engine.abort([request.request_id])
            raise
