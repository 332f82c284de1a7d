"""Conformance tests of inference engines, on the real engine.

A test module subclasses one of the classes and offers two engines. Both serve `tiny_model`s:
`engine` the weights of seed 0 (A) and later others; `fresh` those of seed 1 (B), and it restarts
responses when new weights come. Each starts once for the whole module. The tests are in
`sampling_conformance`, `request_conformance` and `update_conformance`, in this order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from agenticrun_workers.inference import (
    EngineError,
    InferenceEngine,
    request_port,
    server_process,
)
from agenticrun_workers.inference.actor import EngineActor
from agenticrun_workers.inference.client import GenerationClient
from agenticrun_workers.inference.engine import SupportsBroadcast
from agenticrun_workers.inference.server_process import ServerProcess, listeners
from agenticrun_workers.inference.transformers.engine import TransformersEngine
from agenticrun_workers.launch import Node, liveness
from agenticrun_workers.launch.node import shared_node
from agenticrun_workers.models.pretrained import ModelLoader, load_model
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.trainer.fsdp2 import fsdp2_policy
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.types import FinishReason
from agenticrun_workers.weights.collective import WeightGroup
from engine_checks import (
    EXACT,
    Models,
    ObservedEngine,
    SamplingOptions,
    ask,
    files,
    prompt,
    same_logprobs,
)
from processes import family, lives
from ragged_samples import LOSSES, batch
from rollout_fakes import Remote
from tiny_model import CONTEXT, tiny_model, weight_parts
from update_conformance import UpdateConformance
from waiting import eventually_in_loop

__all__ = [
    "EngineConformance",
    "Models",
    "ServerConformance",
    "ask",
    "check_mixture",
    "files",
    "prompt",
    "same_logprobs",
]


class EngineConformance(UpdateConformance):
    """Tests of every engine.

    The test module has the fixtures `engine`, `fresh` and `models`, and a loop.
    """


class ServerEngine(ObservedEngine, SupportsBroadcast, Protocol):
    _process: ServerProcess | None


async def meet(engine: SupportsBroadcast) -> WeightGroup:
    """The trainer's end of a group with one engine."""
    listener, world = socket.create_server(("127.0.0.1", 0)), 1 + engine.broadcast_ranks
    port = listener.getsockname()[1]
    joining = asyncio.to_thread(
        WeightGroup, "127.0.0.1", port, 0, world, torch.device("cpu"), listener
    )
    trainer, _ = await asyncio.gather(joining, engine.join_broadcast("127.0.0.1", port, 1, world))
    return trainer


async def broadcast(engine: SupportsBroadcast, weights: dict[str, Tensor], version: int) -> None:
    """Update an engine as a trainer does that broadcasts."""
    trainer = await meet(engine)

    def send_all() -> None:
        for weight in weights.values():
            trainer.send(weight)

    shapes = [list(weight.shape) for weight in weights.values()]
    dtypes = ["float32"] * len(weights)
    update = engine.update_from_broadcast(list(weights), dtypes, shapes, version)
    await asyncio.gather(update, asyncio.to_thread(send_all))


async def check_mixture(make: Callable[[Path], ServerEngine], folder: Path) -> None:
    """Check that an engine samples from a mixture of experts with the weights of its trainer.

    They come in files, then in a broadcast.

    Args:
        make: returns the engine of the model in a folder.
        folder: for models and weights.
    """
    first, second, third = (folder / name for name in ("first", "second", "third"))
    tiny_model(first, experts=5)
    policy = fsdp2_policy(ModelLoader(ModelSource(str(first))), OptimizerSpec(1e-2))
    samples = batch(load_model(str(first)), LOSSES["ppo"])
    for trained in (second, third):
        policy.train_step(samples, LOSSES["ppo"])
        policy.export_folder(trained, {})
    engine = make(first)

    async def check(served: Path) -> None:
        plain = load_model(str(served))
        requests = [ask(prompt(length, length), 20, seed=length) for length in (3, 30, 60)]
        generations = await asyncio.gather(*map(engine.generate, requests))
        for request, generation in zip(requests, generations, strict=True):
            same_logprobs(plain, request, generation)

    await engine.start()
    try:
        await check(first)
        await engine.update_weights(files(weight_parts(second, folder / "parts")), 1)
        await check(second)
        await broadcast(engine, load_file(third / "model.safetensors"), 2)
        await check(third)
    finally:
        await engine.stop()


def actor_of(engine: ServerEngine) -> EngineActor:
    """The actor of an engine that has started."""
    shared_node.set(Node("here", "127.0.0.1"))
    actor = EngineActor("engine")
    actor._engine = engine
    return actor


def processes(engine: ServerEngine) -> list[int]:
    """Return the pids of relay, supervisor, server, and what the server started."""
    assert engine._process is not None
    assert engine._process._supervisor is not None
    return family(engine._process._supervisor.pid)


class ServerConformance(EngineConformance):
    """Of engines that are servers of their own. The last tests end both engines."""

    async def test_the_same_seed_samples_the_same_as_in_the_embedded_engine(
        self, engine: InferenceEngine, models: Models
    ) -> None:
        """Also with top_k, top_p or min_p, and after a pause in the middle of the response."""
        embedded = TransformersEngine(partial(load_model, str(models.a)), max_length=CONTEXT)
        await embedded.start()
        cuts: list[SamplingOptions] = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}]
        requests = [
            ask(prompt(9 + n, n), 100, 0.8, seed=2**61 + n, **cuts[n % 4]) for n in range(8)
        ]
        responses = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0.05)
        await engine.pause()
        await engine.resume()
        for request, generation in zip(requests, await asyncio.gather(*responses), strict=True):
            assert (
                generation.tokens_T.tolist() == (await embedded.generate(request)).tokens_T.tolist()
            )
        await embedded.stop()

    async def test_weights_come_by_the_trainers_broadcast_too(
        self, engine: ServerEngine, models: Models
    ) -> None:
        version = next(self._versions)
        await broadcast(engine, load_file(models.b / "model.safetensors"), version)
        request = ask(prompt(5), 6, 0.0)
        generation = await engine.generate(request)
        same_logprobs(models.plain_b, request, generation)
        assert set(generation.versions_T.tolist()) == {version}

    async def test_after_a_trainer_is_lost_in_its_broadcast_the_engine_takes_the_next_weights(
        self, engine: ServerEngine, models: Models
    ) -> None:
        weights = load_file(models.b / "model.safetensors")
        trainer = await meet(engine)
        names, shapes = list(weights), [list(weight.shape) for weight in weights.values()]
        update = asyncio.create_task(
            engine.update_from_broadcast(names, ["float32"] * len(names), shapes, 10_000)
        )
        await asyncio.to_thread(trainer.send, next(iter(weights.values())))
        del trainer
        with pytest.raises(EngineError):
            await asyncio.wait_for(update, 30)
        with pytest.raises(EngineError, match="update"):
            await engine.generate(ask(prompt(4), 2))
        await self.load(engine, models.parts_a)
        request = ask(prompt(5), 6, 0.0)
        same_logprobs(models.plain_a, request, await engine.generate(request))

    @pytest.mark.usefixtures("short_events")
    async def test_requests_of_a_server_that_is_frozen_and_killed_go_on_at_another(
        self,
        engine: ServerEngine,
        fresh: ServerEngine,
        models: Models,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It is healthy while it samples, and while it is paused."""
        old, new = [await self.load(each, models.parts_a) for each in (engine, fresh)]
        requests = [ask(prompt(4, n), 450, 0.8, seed=n) for n in range(3)]
        expected = await asyncio.gather(*map(fresh.generate, requests))
        sampled = fresh.stats().generated_tokens
        monkeypatch.setattr(request_port, "PROGRESS_SECONDS", 0.05)
        first, second = actor_of(engine), actor_of(fresh)
        client = GenerationClient("c")
        client.set_engines({"first": Remote(first)})
        responses = [asyncio.create_task(client.generate(request)) for request in requests]
        await engine.check_health()

        def received() -> list[int]:
            flights = client._links["first"].in_flight.values()
            return [len(waiting.progress.tokens_T) for waiting in flights]

        await eventually_in_loop(
            lambda: len(received()) == 3 and min(received()) > 20, 60, "tokens have come"
        )
        await engine.pause()  # so that none is finished before the kill
        late = asyncio.create_task(engine.generate(ask(prompt(4), 450)))
        await asyncio.sleep(0.3)
        await engine.check_health()
        pids = processes(engine)
        for pid in pids[3:] or pids[2:]:
            os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(liveness, "POLL_SECONDS", 0.5)
        monkeypatch.setattr(server_process, "STEP_SECONDS", 5.0)
        with pytest.raises(EngineError, match="not answered in 5 s: the server is frozen"):
            await engine.check_health()
        with pytest.raises(EngineError, match="was killed"):
            await asyncio.wait_for(late, 90)
        had = received()
        with pytest.raises(EngineError, match="was killed"):
            await first.health()
        await first.close()
        client.set_engines({"second": Remote(second)})
        for response, whole, kept in zip(
            await asyncio.wait_for(asyncio.gather(*responses), 90), expected, had, strict=True
        ):
            before = int((response.versions_T == old).sum())
            assert kept <= before < 450
            assert response.versions_T.tolist() == [old] * before + [new] * (450 - before)
            assert response.tokens_T.tolist() == whole.tokens_T.tolist()
            np.testing.assert_allclose(response.logprobs_T, whole.logprobs_T, atol=EXACT)
            sampled += 450 - before
        assert fresh.stats().generated_tokens == sampled, "none is sampled twice"
        client.set_engines({})
        await second._port.close()
        with pytest.raises(EngineError):
            await engine.generate(ask(prompt(4), 2))
        assert not [pid for pid in pids if lives(pid)]
        await engine.stop()

    async def test_a_stopped_engine_leaves_no_process_no_port_and_no_file_but_its_log(
        self, fresh: ServerEngine
    ) -> None:
        pids = processes(fresh)
        port, log = int(fresh._process.url.rpartition(":")[2]), fresh._process.log  # type: ignore[union-attr]
        folders = {
            entry
            for entry in Path(tempfile.gettempdir()).iterdir()
            if entry.name.startswith("agenticrun-engine-")
        }
        assert len(pids) >= 4
        await fresh.pause()  # so that it is not finished before the stop
        response = asyncio.create_task(fresh.generate(ask(prompt(4), 450)))
        await asyncio.sleep(0.3)
        await fresh.stop()
        await fresh.stop()
        assert (await response).finish is FinishReason.ABORT
        assert not [pid for pid in pids if lives(pid)]
        assert not listeners(port)
        assert len({folder for folder in folders if folder.exists()}) < len(folders)
        assert log.exists()
