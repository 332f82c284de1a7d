"""Requests go on while a real server of SGLang or vLLM below them is killed and frozen.

A drill of minutes for each engine: `make drills` sets AGENTICRUN_SERVER_FAULTS=1. Each fault hits
the server that has replaced the one before.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from agenticrun_api import Pipeline
from agenticrun_workers.inference import actor as actor_module
from agenticrun_workers.inference import server_process
from agenticrun_workers.inference.actor import EngineActor
from agenticrun_workers.inference.client import GenerationClient, _EngineLink
from agenticrun_workers.inference.pool import EnginePool
from agenticrun_workers.inference.request_port import Answer, Progress
from agenticrun_workers.launch import ActorHandle, ActorOptions
from agenticrun_workers.launch.ray_launcher import RayLauncher
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.types import GenerationRequest, SamplingParams

pytestmark = [
    pytest.mark.usefixtures("ray_node"),
    pytest.mark.skipif(
        not os.environ.get("AGENTICRUN_SERVER_FAULTS"), reason="a drill: AGENTICRUN_SERVER_FAULTS=1"
    ),
]

STUCK_SECONDS = float(os.environ.get("AGENTICRUN_FROZEN_SECONDS", "60"))
"""Instead of five minutes: a server that does not answer is frozen, one that computes nothing is
stuck."""
REPLACE_SECONDS = 1200.0
"""To notice the fault, and to start another server on a busy machine."""
IN_FLIGHT = 6
NEW_TOKENS = 40
SERVER = "server"
CONFIGS: dict[str, dict[str, int]] = {
    "sglang": {},
    "vllm": {
        "kv_cache_memory_bytes": 64 * 2**20,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 64,
    },
}
FAULTS = {
    "sglang": [
        (SERVER, signal.SIGKILL),
        ("scheduler", signal.SIGSTOP),
        ("scheduler", signal.SIGKILL),
        (SERVER, signal.SIGSTOP),
    ],
    "vllm": [
        (SERVER, signal.SIGKILL),
        ("EngineCore", signal.SIGSTOP),
        ("EngineCore", signal.SIGKILL),
        (SERVER, signal.SIGSTOP),
    ],
}
"""A part of a process title, and what happens to that process. Five engines that die without a
weight update between them end a run."""


class ImpatientEngine(EngineActor):
    """The real actor with shorter limits."""

    async def be_impatient(self) -> int:
        """Return the process id."""
        for module in (server_process, actor_module):
            vars(module)["STEP_SECONDS"] = STUCK_SECONDS
        return os.getpid()


class CountingClient(GenerationClient):
    """Counts the answers to each request."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.answers: Counter[str] = Counter()

    def _deliver(self, link: _EngineLink, answer: Answer | Progress) -> None:
        if isinstance(answer, Answer):
            self.answers[answer.request_id] += 1
        super()._deliver(link, answer)


class Drill:
    """A pool with one engine, and requests that never end."""

    def __init__(self, engine: str, folder: Path) -> None:
        self._pipeline = Pipeline.model_validate(
            {
                "maxSteps": 1,
                "evalSteps": 0,
                "rolloutBatchSize": 2,
                "sequenceLength": 512,
                "envs": [{"tag": "A", "type": "frozen_lake"}],
                "trainEnvs": {"groups": 1, "groupSize": 2, "tags": ["A"]},
                "actorInfer": {"strategy": {"name": engine, "config": CONFIGS[engine]}},
            }
        )
        self._source = ModelSource(str(folder))
        self._actors: dict[str, int] = {}
        self.client = CountingClient("c")
        self.pool = EnginePool(self._spawn, 1, self._changed)
        self.asked: list[str] = []
        self.answered = 0

    async def _spawn(self, name: str, _: int) -> ActorHandle[EngineActor]:
        handle = RayLauncher().start(ActorOptions(max_concurrency=100), ImpatientEngine, name)
        self._actors[name] = await handle.call(lambda engine: engine.be_impatient())
        await handle.call(lambda engine: engine.start(self._pipeline, self._source, 1))
        return handle

    async def _changed(self, engines: dict[str, ActorHandle[EngineActor]]) -> None:
        self.client.set_engines(engines)

    async def ask(self, number: int) -> None:
        """Send one request after the other."""
        rng = np.random.default_rng(number)
        while True:
            request = GenerationRequest(
                f"{number}.{len(self.asked)}",
                f"{number}",
                rng.integers(5, 31, size=20).astype(np.int32),
                SamplingParams(NEW_TOKENS, 0.8),
                seed=number,
            )
            self.asked.append(request.request_id)
            generation = await self.client.generate(request)
            assert len(generation.tokens_T) == len(generation.logprobs_T) == NEW_TOKENS
            assert np.isfinite(generation.logprobs_T).all()
            assert (generation.versions_T == 0).all()
            self.answered += 1

    def has_replaced(self, name: str) -> bool:
        """Return True if others serve, and not the engine of this name."""
        return bool(self.pool.engines) and name not in self.pool.engines

    def processes(self) -> list[psutil.Process]:
        """The processes of the server that serves now, without those that supervise it."""
        (name,) = self.pool.engines
        found = psutil.Process(self._actors[name]).children(recursive=True)
        return [
            process for process in found if "process_supervisor" not in " ".join(process.cmdline())
        ]


@pytest.mark.parametrize("engine", list(FAULTS))
@pytest.mark.timeout(7200)
async def test_requests_go_on_when_a_server_or_its_scheduler_is_killed_or_frozen(
    engine: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Actors import this module, but cannot import these ones.
    from processes import lives
    from tiny_model import tiny_model
    from waiting import eventually_in_loop

    drill = Drill(engine, tiny_model(tmp_path / "model"))
    await drill.pool.start()
    asking = [asyncio.create_task(drill.ask(number)) for number in range(IN_FLIGHT)]

    async def ten_more(told: str) -> None:
        enough = drill.answered + 10
        await eventually_in_loop(
            lambda: drill.answered >= enough or any(task.done() for task in asking), 300, told
        )
        for task in asking:
            assert not task.done(), task.exception()

    for title, fault in FAULTS[engine]:
        told = f"{title}, {fault.name}"
        await ten_more(f"ten responses before {told}")
        processes, (name,) = drill.processes(), drill.pool.engines
        victim = processes[0]
        if title != SERVER:
            (victim,) = (each for each in processes[1:] if title in " ".join(each.cmdline()))
        began, answered = asyncio.get_running_loop().time(), drill.answered
        victim.send_signal(fault)
        await eventually_in_loop(
            partial(drill.has_replaced, name),
            REPLACE_SECONDS,
            f"another server serves after {told}",
        )
        seconds = asyncio.get_running_loop().time() - began
        await ten_more(f"ten responses after {told}")
        assert not [each for each in processes if lives(each.pid)], told
        (message,) = (each for each in caplog.messages if f"{name} died and is replaced" in each)
        print(f"{engine}: {told}: {seconds:.0f} s, {drill.answered - answered} responses later:")
        print("   ", message.splitlines()[0][:300])
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    answered_once = [request for request, times in drill.client.answers.items() if times == 1]
    assert len(answered_once) == len(drill.client.answers) >= drill.answered
    assert len(drill.asked) == len(set(drill.asked)) == drill.answered + IN_FLIGHT
    handles = list(drill.pool.engines.values())
    left = drill.processes()
    await drill.pool.stop()
    drill.client.set_engines({})
    for handle in handles:
        handle.kill()
    await eventually_in_loop(
        lambda: not [each for each in left if lives(each.pid)], 60, "the last server is gone"
    )
