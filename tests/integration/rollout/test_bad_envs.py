"""Bad environments in env workers (real Ray actors) cost one trajectory each, reported once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from agenticrun_api import Pipeline
from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.errors import RolloutFailed
from agenticrun_workers.launch.ray_launcher import RayHandle
from agenticrun_workers.models.source import TokenizerSource
from agenticrun_workers.models.tokenizer import build_task_tokenizer
from agenticrun_workers.rollout.controller import (
    RolloutController,
    StalenessGate,
)
from agenticrun_workers.rollout.env_pool import MAX_DEATHS, EnvPool
from agenticrun_workers.rollout.env_worker import EnvWorker
from agenticrun_workers.rollout.groups import EpisodeResult, EpisodeTask, GroupPlan
from agenticrun_workers.rollout.trajectory_store import TrajectoryStore
from agenticrun_workers.seeds import env_seed
from agenticrun_workers.types import EpisodeKey, RolloutPosition, StopReason, Stream
from rollout_fakes import FakeEngine

pytestmark = pytest.mark.usefixtures("ray_node")

TOKENIZER = build_task_tokenizer(["word"], 512)
SEED = 11

HANGS = 15.0
"""Step timeout in tests with a hang; the others must keep it even on a machine that stalls."""

COSTS = [
    ("raise", False, StopReason.ENV_ERROR, "ValueError: bad cell"),
    ("sys.exit", False, StopReason.ENV_ERROR, "SystemExit: 3 (bad_envs.py:"),
    ("nan", False, StopReason.ENV_ERROR, "step returned the reward nan"),
    ("bytes", False, StopReason.ENV_ERROR, "step returned an observation of bytes, not text"),
    (
        "10 MB",
        False,
        StopReason.ENV_ERROR,
        "step returned an observation of 10,000,000 characters; 1,048,576 are allowed",
    ),
    ("sleep", False, StopReason.TIMEOUT, "Bad.step took more than 15.0 s"),
    ("async sleep", False, StopReason.TIMEOUT, "Bad.step took more than 15.0 s"),
    ("hang in C", True, StopReason.TIMEOUT, "step took more than 15.0 s"),
    ("exit", True, StopReason.ENV_ERROR, "the environment's process ended itself with exit code 3"),
    ("segfault", True, StopReason.ENV_ERROR, "the environment's process was ended by SIGSEGV"),
]


def env(
    tag: str, *, isolated: bool = False, seconds: float = 60.0, **config: Any
) -> dict[str, Any]:
    return {
        "tag": tag.replace(" ", "-"),
        "type": "bad_envs:Bad",
        "config": config,
        "isolated": isolated,
        "stepTimeoutSeconds": seconds,
        "maxSteps": 2,
        "maxTokensPerStep": 2,
    }


def actor(cls: type, *arguments: Any) -> Any:
    remote: Any = ray.remote(cls).options(num_cpus=0, max_concurrency=1000)
    return RayHandle(remote.remote(*arguments))


class World:
    """Env workers with an engine that always says the same, and a store."""

    def __init__(self, folder: Path, workers: int, *envs: dict[str, Any]) -> None:
        TOKENIZER.save_pretrained(folder)
        tags = [each["tag"] for each in envs]
        document: dict[str, Any] = {
            "seed": SEED,
            "maxSteps": 1,
            "rolloutBatchSize": 8 * len(tags),
            "evalSteps": 0,
            "sequenceLength": 256,
            "envs": list(envs),
            "trainEnvs": {"groups": len(tags), "groupSize": 8, "tags": tags},
        }
        self.pipeline = Pipeline.model_validate(document)
        self.pool = EnvPool(self._spawn, workers)
        self.made = 0
        self._folder = folder
        self._actors: list[Any] = []

    async def start(self) -> None:
        answer_T = ChatFormat(TOKENIZER).answer("word")
        engine = actor(FakeEngine, answer_T)
        store = actor(TrajectoryStore)
        self._actors += [engine, store]
        await self.pool.start()
        await self.pool.set_endpoints({"engine-0": engine}, [store])

    async def stop(self) -> None:
        await self.pool.stop()
        for actor in self._actors:
            actor.kill()

    async def play(self, *groups: list[EpisodeTask]) -> list[list[EpisodeResult]]:
        """Run these groups, given by their members."""
        playing = asyncio.gather(
            *(asyncio.gather(*map(self.pool.run, members)) for members in groups)
        )
        done, _ = await asyncio.wait({playing}, timeout=120)
        assert done, f"{self.made} workers were made: {await self._state()}"
        return await playing

    async def _state(self) -> dict[str, str]:
        """Return the state of each actor, to find one that is stuck."""
        actors = list(self._actors)
        told = [
            actor.call(
                lambda actor: actor.__ray_call__(
                    lambda held: {name: repr(value) for name, value in vars(held).items()}
                )
            )
            for actor in actors
        ]
        answers = await asyncio.gather(
            *(asyncio.wait_for(answer, 5) for answer in told), return_exceptions=True
        )
        return {str(actor): repr(answer) for actor, answer in zip(actors, answers, strict=True)}

    async def _spawn(self) -> Any:
        worker = actor(EnvWorker, f"env-worker-{self.made}", self.pipeline)
        self.made += 1
        self._actors.append(worker)
        await worker.call(lambda actor: actor.describe())
        await worker.call(lambda actor: actor.setup(TokenizerSource(str(self._folder))))
        return worker


@asynccontextmanager
async def running(folder: Path, workers: int, *envs: dict[str, Any]) -> AsyncIterator[World]:
    world = World(folder, workers, *envs)
    try:
        await world.start()
        yield world
    finally:
        await world.stop()


def group(number: int, tag: str, members: int = 4) -> list[EpisodeTask]:
    keys = [EpisodeKey(Stream.TRAIN, number, member) for member in range(members)]
    return [EpisodeTask(key, tag) for key in keys]


def groups(count: int, tag: str) -> list[list[EpisodeTask]]:
    return [group(number, tag) for number in range(count)]


async def test_each_way_to_misbehave_costs_one_trajectory_with_its_reason(tmp_path: Path) -> None:
    envs = [
        env(
            does,
            isolated=isolated,
            seconds=HANGS if reason is StopReason.TIMEOUT else 60.0,
            does=does,
            marker=str(tmp_path / does),
        )
        for does, isolated, reason, _ in COSTS
    ]
    async with running(tmp_path, 1, *envs) as world:
        played = await world.play(
            *(group(number, each["tag"], members=8) for number, each in enumerate(envs))
        )
        assert world.made == 1
    for (does, _, reason, message), results in zip(COSTS, played, strict=True):
        (bad,) = [result for result in results if result.stop_reason is not StopReason.COMPLETED]
        assert (bad.stop_reason, message in bad.error) == (reason, True), (does, bad.error)


async def test_one_that_ends_its_worker_once_costs_nothing(tmp_path: Path) -> None:
    async with running(
        tmp_path, 1, env("exit", does="exit", marker=str(tmp_path / "exit"))
    ) as world:
        played = await world.play(*groups(8, "exit"))
        assert world.made == 2
    assert {result.stop_reason for results in played for result in results} == {
        StopReason.COMPLETED
    }


async def test_a_level_that_always_ends_its_worker_is_given_up_and_all_others_play_on(
    tmp_path: Path,
) -> None:
    guilty = 2
    async with running(
        tmp_path, 2, env("exit", does="exit", seed=env_seed(SEED, Stream.TRAIN, guilty))
    ) as world:
        played = await world.play(*groups(6, "exit"))
        more = await world.play(group(7, "exit", members=1))
        assert world.made <= 2 + 3
    for number, results in enumerate([*played, *more]):
        expected = StopReason.ENV_ERROR if number == guilty else StopReason.COMPLETED
        assert {result.stop_reason for result in results} == {expected}
    error = played[guilty][0].error
    assert "3 env workers died while they played it: the environment 'exit' may end" in error
    assert "set isolated: true in its entry of spec.pipeline.envs" in error


async def test_one_that_ends_every_worker_ends_the_run_with_its_name(tmp_path: Path) -> None:
    async with running(tmp_path, 2, env("exit", does="exit", seed="any"), env("good")) as world:
        with pytest.raises(RolloutFailed) as failed:
            await world.play(*groups(20, "exit"))
    words = str(failed.value)
    assert f"{MAX_DEATHS} env workers died in a row" in words
    assert "while they ran 'exit': the environment 'exit' may end its process" in words
    assert "set isolated: true in its entry of spec.pipeline.envs" in words


async def test_a_thousand_failures_are_counted_and_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seed = env_seed(SEED, Stream.TRAIN, 1)
    async with running(tmp_path, 1, env("raise", does="raise", seed=seed), env("good")) as world:
        plan = GroupPlan(("raise",), 250, max_rerolls=3)
        controller = RolloutController(
            world.pool, StalenessGate(3, 16, 0), plan, discard=nothing, position=RolloutPosition()
        )
        with caplog.at_level(logging.WARNING):
            controller.advance(0, 0)
            batch = await asyncio.wait_for(controller.batch(), 120)
    assert [group.number for group in batch.groups] == [0, 2, 3]
    assert len(batch.counts.untrainable) == 1000
    assert {result.stop_reason for result in batch.counts.untrainable} == {StopReason.ENV_ERROR}
    assert len({result.error for result in batch.counts.untrainable}) > 900
    (told,) = [
        record.getMessage() for record in caplog.records if "bad cell" in record.getMessage()
    ]
    assert told.startswith("episodes of 'raise' end with env_error: ValueError: bad cell")


async def nothing(results: list[EpisodeResult]) -> None: ...
