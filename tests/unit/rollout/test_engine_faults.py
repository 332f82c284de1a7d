"""Engines fail in every way while a run plays: it goes on, and no trainer sees what is garbage.

`make drills` sets AGENTICRUN_ENGINE_FAULTS to the number of repetitions.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agenticrun_api import Pipeline, Role
from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.envs import FrozenLake
from agenticrun_workers.inference import EngineError
from agenticrun_workers.inference import actor as actor_module
from agenticrun_workers.inference.actor import EngineActor
from agenticrun_workers.inference.engine import ABORTED_UNSAMPLED, EngineStats
from agenticrun_workers.inference.model_files import RequestLimits
from agenticrun_workers.launch import Node
from agenticrun_workers.launch.node import shared_node
from agenticrun_workers.models.tokenizer import build_task_tokenizer, words_of
from agenticrun_workers.placement import Placement
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, Trajectory
from leaks import nothing_left_behind
from rollout_world import World

REPETITIONS = int(os.environ.get("AGENTICRUN_ENGINE_FAULTS", "3"))
LAKE = FrozenLake()
TOKENIZER = build_task_tokenizer(
    [*LAKE.vocabulary(), *words_of(LAKE.instruction), *map(str, range(10))], 512
)
VOCABULARY = len(TOKENIZER)
STEPS, GROUPS, GROUP_SIZE = 8, 4, 4

FAULTS = {
    "errors": "CUDA error: an illegal memory access",
    "ids outside the vocabulary": "token ids outside",
    "negative ids": "token ids outside",
    "NaN": "log-probs that are not finite",
    "no log-probs": "0 log-probs",
    "too long": "tokens instead of",
    "empty": "without a token",
    "nothing": "does not answer",
    "polls only": "it is stuck",
    "slow": "",
}
"""What the log says about an engine with this fault; a slow one is not replaced."""


class Model:
    """An engine that moves in random directions, until it falls ill."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        chat = ChatFormat(TOKENIZER)
        self._answers = [chat.answer(move) for move in ("Up", "Down", "Left", "Right")]
        self._in_flight: dict[str, asyncio.Event] = {}
        self.fault = ""
        self.version = 0
        self._computed = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        aborted = self._in_flight[request.request_id] = asyncio.Event()
        tokens_T = self._rng.choice(self._answers)
        seconds = len(tokens_T) * 0.3 if self.fault == "slow" else self._rng.uniform(0, 0.02)
        try:
            silent = self.fault in ("nothing", "polls only")
            async with asyncio.timeout(None if silent else seconds):
                await aborted.wait()
            return ABORTED_UNSAMPLED
        except TimeoutError:
            return self._made(tokens_T)
        finally:
            del self._in_flight[request.request_id]

    def _made(self, tokens_T: Any) -> Generation:
        size = len(tokens_T)
        self._computed += size
        good = Generation(
            tokens_T,
            np.full(size, -1.0, np.float32),
            np.full(size, self.version, np.int32),
            FinishReason.STOP,
        )
        match self.fault:
            case "errors":
                raise EngineError(FAULTS["errors"])
            case "ids outside the vocabulary":
                return replace(good, tokens_T=tokens_T + VOCABULARY)
            case "negative ids":
                return replace(good, tokens_T=-tokens_T - 1)
            case "NaN":
                return replace(good, logprobs_T=good.logprobs_T * np.nan)
            case "no log-probs":
                return replace(good, logprobs_T=good.logprobs_T[:0])
            case "too long":
                return Generation(
                    np.repeat(tokens_T, 99),
                    np.repeat(good.logprobs_T, 99),
                    np.repeat(good.versions_T, 99),
                    FinishReason.STOP,
                )
            case "empty":
                return replace(ABORTED_UNSAMPLED, finish=FinishReason.STOP)
        return good

    async def abort(self, request_ids: list[str] | None = None) -> None:
        for request_id in [*self._in_flight] if request_ids is None else request_ids:
            if request_id in self._in_flight:
                self._in_flight[request_id].set()

    async def check_health(self) -> None:
        if self.fault == "nothing":
            raise EngineError("the server does not answer")

    def stats(self) -> EngineStats:
        running, computed = len(self._in_flight), self._computed
        return EngineStats(self.version, running, 0, 0, 0, 0.0, computed_tokens=computed)

    async def stop(self) -> None:
        await self.abort()


class Actor(EngineActor):
    """The real actor on a fake model."""

    async def placement(self) -> Placement:
        return Placement(self._name, Role.INFERENCE, "node", "pod", 1)

    def serve(self, model: Model) -> None:
        self._engine = model  # type: ignore[assignment]
        self._limits = RequestLimits(VOCABULARY, 512)
        self._watcher = asyncio.create_task(self._watch(), name="engine-health")


class FakeWorld(World):
    """A run on fake models. One fault begins at a random moment of each of the first steps."""

    def __init__(self, folder: Path, rng: random.Random, faults: list[str]) -> None:
        super().__init__(folder, rng, PIPELINE)
        self._faults = faults
        self.models: dict[str, Model] = {}

    async def engine(self, name: str) -> EngineActor:
        actor, model = Actor(name), Model(self.rng)
        model.version = self.version
        actor.serve(model)
        self.models[name] = model
        return actor

    async def sync(self) -> None:
        for model in self.models.values():
            model.version = self.version

    async def strike(self) -> None:
        for fault in self._faults[self.version : self.version + 1]:
            await asyncio.sleep(self.rng.uniform(0, 0.1))
            healthy = [name for name in self.engine_pool.engines if not self.models[name].fault]
            if healthy:
                self.models[self.rng.choice(healthy)].fault = fault

    def check(self, trajectory: Trajectory) -> None:
        assert trajectory.turns
        for turn in trajectory.turns:
            size = len(turn.response_T)
            assert 0 < size == len(turn.logprobs_T) == len(turn.versions_T)
            assert 0 <= turn.response_T.min() <= turn.response_T.max() < VOCABULARY
            assert (turn.logprobs_T == -1.0).all()


PIPELINE = Pipeline.model_validate(
    {
        "maxSteps": STEPS,
        "rolloutBatchSize": GROUPS * GROUP_SIZE,
        "sequenceLength": 512,
        "evalSteps": 0,
        "envs": [{"tag": "A", "type": "frozen_lake", "maxSteps": 5, "maxTokensPerStep": 4}],
        "trainEnvs": {"groups": GROUPS, "groupSize": GROUP_SIZE, "tags": ["A"]},
    }
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(actor_module, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(actor_module, "STEP_SECONDS", 3.0)
    monkeypatch.setattr(actor_module, "MIN_TOKENS", 1)
    shared_node.set(Node("here", "127.0.0.1"))
    TOKENIZER.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("repetition", range(REPETITIONS))
async def test_faults_of_engines_cost_no_episode_and_leave_nothing_behind(
    folder: Path, repetition: int, caplog: pytest.LogCaptureFixture
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    faults = rng.sample(list(FAULTS), 3)
    async with nothing_left_behind():
        world = FakeWorld(folder, rng, faults)
        await world.start()
        position = await world.train(STEPS)
        await world.close()
    told = f"seed {seed}: {faults}"
    assert world.lost_nothing(position), told
    for name, model in world.models.items():
        if model.fault and model.fault != "slow" and name not in world.engine_pool.engines:
            assert any(
                f"{name} died and is replaced" in message and FAULTS[model.fault] in message
                for message in caplog.messages
            ), (told, name, model.fault, caplog.messages)
    struck = [model.fault for model in world.models.values() if model.fault]
    assert struck, told
