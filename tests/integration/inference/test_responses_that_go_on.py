"""A response goes on at another engine when its engine is killed or frozen, and loses no token."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agenticrun_workers.inference import EngineStats, request_port
from agenticrun_workers.inference.actor import EngineActor
from agenticrun_workers.inference.client import GenerationClient
from agenticrun_workers.inference.pool import _death_of
from agenticrun_workers.inference.transformers.engine import TransformersEngine
from agenticrun_workers.launch import ActorHandle, ActorOptions, liveness
from agenticrun_workers.launch.ray_launcher import RayLauncher
from agenticrun_workers.models.pretrained import load_model
from agenticrun_workers.types import Generation, GenerationRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("ray_node")

NEW_TOKENS = 300
REQUESTS = 4
POLL_SECONDS = 0.5


class LongEngine(EngineActor):
    """The embedded engine with the tokens of long responses sent often."""

    async def health(self) -> EngineStats:
        await asyncio.sleep(POLL_SECONDS)
        return self._serving.stats()

    async def serve(self, folder: Path, version: int, pace: float) -> int:
        """Serve a model with at least `pace` seconds per token. Returns the process id."""
        request_port.PROGRESS_SECONDS = 0.05
        engine = self._engine = TransformersEngine(
            lambda: load_model(str(folder)), max_length=512, version=version
        )
        await engine.start()
        compute = engine.loaded.compute

        def slowly(batch: Any) -> Any:
            time.sleep(pace)
            return compute(batch)

        engine.loaded.compute = slowly  # type: ignore[assignment]
        return os.getpid()


def spawn(name: str) -> ActorHandle[LongEngine]:
    return RayLauncher().start(ActorOptions(max_concurrency=100), LongEngine, name)


def requests() -> list[GenerationRequest]:
    rng = np.random.default_rng(3)
    return [
        GenerationRequest(
            f"{number}",
            f"{number}",
            rng.integers(5, 31, size=20).astype(np.int32),
            SamplingParams(NEW_TOKENS, 0.8),
            seed=number,
        )
        for number in range(REQUESTS)
    ]


async def generated(client: GenerationClient) -> list[Generation]:
    return list(await asyncio.gather(*map(client.generate, requests())))


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_response_goes_on_from_the_tokens_it_has_when_its_engine_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: signal.Signals
) -> None:
    # Actors import this module, but cannot import these ones.
    from tiny_model import plain_logprobs, tiny_model
    from waiting import eventually_in_loop

    monkeypatch.setattr(liveness, "POLL_SECONDS", POLL_SECONDS)
    monkeypatch.setattr(liveness, "FROZEN_POLLS", 4)
    folder = tiny_model(tmp_path / "model")
    first, second = spawn("engine-0"), spawn("engine-1")
    pid = await first.call(lambda engine: engine.serve(folder, 3, 0.01))
    await second.call(lambda engine: engine.serve(folder, 4, 0.0))
    client = GenerationClient("c")
    client.set_engines({"first": first})
    running = asyncio.create_task(generated(client))

    def received() -> list[int]:
        link = client._links.get("first")
        waiting = link.in_flight.values() if link else ()
        return [len(each.progress.tokens_T) for each in waiting]

    await eventually_in_loop(
        lambda: len(received()) == REQUESTS and min(received()) > 20, 60, "tokens have come"
    )
    death = asyncio.create_task(_death_of(first, lambda stats: None))
    os.kill(pid, fault)
    had = received()
    await asyncio.wait_for(death, 60)
    client.set_engines({"second": second})
    responses = await asyncio.wait_for(running, 60)

    undisturbed = GenerationClient("d")
    undisturbed.set_engines({"second": second})
    expected = await asyncio.wait_for(generated(undisturbed), 60)
    model = load_model(str(folder))
    for asked, response, whole, kept in zip(requests(), responses, expected, had, strict=True):
        assert response.engine == "second"
        assert len(response.versions_T) == NEW_TOKENS == len(response.logprobs_T)
        before = int((response.versions_T == 3).sum())
        assert kept <= before < NEW_TOKENS
        np.testing.assert_array_equal(
            response.versions_T, np.repeat([3, 4], [before, NEW_TOKENS - before])
        )
        np.testing.assert_array_equal(response.tokens_T, whole.tokens_T)
        np.testing.assert_allclose(
            response.logprobs_T,
            plain_logprobs(model, asked.prompt_tokens, response.tokens_T, 0.8),
            atol=1e-4,
        )
    for each in (client, undisturbed):
        each.set_engines({})
    second.kill()
