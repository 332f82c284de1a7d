"""Agents that make several trajectories of one episode.

Each is stored, counted and credited as a member of its group.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_api import Pipeline
from agenticrun_workers.agents import ChatFormat, Episode, Generate
from agenticrun_workers.driver.credit import CreditAssigner
from agenticrun_workers.driver.evaluation import summarize
from agenticrun_workers.driver.metrics import validation_metrics
from agenticrun_workers.envs import FrozenLake
from agenticrun_workers.models.source import TokenizerSource
from agenticrun_workers.models.tokenizer import build_task_tokenizer
from agenticrun_workers.rollout.controller import Group
from agenticrun_workers.rollout.env_pool import EnvPool
from agenticrun_workers.rollout.env_worker import EnvWorker
from agenticrun_workers.rollout.groups import (
    EpisodeResult,
    EpisodeTask,
    GroupPlan,
    VersionBounds,
    as_episode,
)
from agenticrun_workers.rollout.trajectory_store import TrajectoryStore
from agenticrun_workers.types import EpisodeKey, StopReason, Stream, Trajectory, Turn
from rollout_fakes import Remote, result

Scores = list[list[float]]
"""Of each trajectory, by member."""


class Branching:
    """RolloutBackend with as many trajectories per member as there are scores.

    `broken` names (member, branch) with env_error.
    """

    def __init__(self, scores: Scores, broken: frozenset[tuple[int, int]] = frozenset()) -> None:
        self.scores = scores
        self.broken = broken
        self.tasks: list[EpisodeTask] = []

    def set_bounds(self, bounds: VersionBounds) -> None: ...

    def abort(self, group: int) -> None: ...

    async def run(self, task: EpisodeTask) -> EpisodeResult:
        self.tasks.append(task)
        branches = range(len(self.scores[task.key.member]))
        return as_episode([self.trajectory(task, branch) for branch in branches])

    def trajectory(self, task: EpisodeTask, branch: int) -> EpisodeResult:
        group, member = task.key.group, task.key.member
        stop = StopReason.ENV_ERROR if (member, branch) in self.broken else StopReason.COMPLETED
        one = result(
            group, member, stop=stop, score=self.scores[member][branch], attempt=task.attempt
        )
        return replace(one, key=replace(one.key, branch=branch))


def played(
    scores: Scores, *broken: tuple[int, int], size: int | None = None
) -> tuple[Group, Branching]:
    async def nothing_is_stale(stale: list[EpisodeResult]) -> None:
        raise AssertionError(stale)

    backend = Branching(scores, frozenset(broken))
    group = Group.of(GroupPlan(("A",), size or len(scores)), 7)
    asyncio.run(group.run(backend, VersionBounds(), nothing_is_stale))
    return group, backend


def pipeline(name: str, agent: str = "multi_turn") -> Pipeline:
    return Pipeline.model_validate(
        {
            "maxSteps": 1,
            "rolloutBatchSize": 8,
            "valBatchSize": 4,
            "sequenceLength": 64,
            "envs": [{"tag": "A", "type": "frozen_lake", "agent": {"type": agent}}],
            "trainEnvs": {"groups": 4, "groupSize": 2, "tags": ["A"]},
            "valEnvs": {"groups": 2, "tags": ["A"]},
            "algorithm": {"name": name}
            | (
                {"lossAggMode": "seq-mean-token-sum-norm", "lossAggNorm": 8}
                if name == "dr_grpo"
                else {}
            ),
        }
    )


def advantages(name: str, scores_N: np.ndarray) -> np.ndarray:
    """The estimators' definitions (rl-semantics), over all trajectories of the group."""
    if name == "rloo":
        return np.array([score - np.delete(scores_N, i).mean() for i, score in enumerate(scores_N)])
    centred: np.ndarray = scores_N - scores_N.mean()
    if name != "dr_grpo" and scores_N.std(ddof=1) > 1e-6:
        centred /= scores_N.std(ddof=1)
    return centred


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo"])
@given(
    scores=st.lists(
        st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=4), min_size=2, max_size=4
    )
)
def test_the_baseline_of_a_group_is_over_all_of_its_trajectories(name: str, scores: Scores) -> None:
    group, _ = played(scores)
    assert group.scores == [score for member in scores for score in member]
    credits, _ = CreditAssigner(pipeline(name)).assign(list(group.results), None)
    expected = advantages(name, np.array(group.scores))
    keys = [
        EpisodeKey(Stream.TRAIN, 7, m, b)
        for m, member in enumerate(scores)
        for b in range(len(member))
    ]
    assert list(credits) == keys
    first = [credit_K[0] for credit_K in credits.values() if credit_K is not None]
    np.testing.assert_allclose(first, expected, atol=1e-6)


def test_a_broken_trajectory_is_left_out_and_its_episode_is_not_played_again() -> None:
    found, backend = played([[1.0, 2.0, 3.0], [4.0]], (0, 0))
    assert [(r.key.member, r.key.branch) for r in found.results] == [(0, 1), (0, 2), (1, 0)]
    assert [(r.key.member, r.key.branch) for r in found.untrainable] == [(0, 0)]
    assert (found.rerolled, len(backend.tasks)) == (0, 2)


def test_an_episode_whose_trajectories_are_all_broken_is_played_again() -> None:
    found, backend = played([[1.0, 2.0], [4.0]], (0, 0), (0, 1))
    assert [task.key.member for task in backend.tasks] == [0, 1, 0, 0]
    assert not found.results
    assert len(found.untrainable) == 6
    assert [r.score for r in found.surplus] == [4.0]


def test_what_an_environment_measures_is_counted_once_per_episode() -> None:
    """Member 0 solved it in one trajectory, member 1 failed in three."""
    group, _ = played([[1.0], [0.0, 0.0, 0.0]])
    metrics = validation_metrics(list(group.results))
    assert [metrics["val/A/success"], metrics["val/A/score"]] == pytest.approx([0.5, 0.5])
    summary = summarize(group.results, [1, 2])["A"]
    assert (summary.episodes, summary.success, summary.pass_at) == (2, 0.5, {1: 0.5, 2: 1.0})


class ThreeWays:
    """Says one word and tells three stories of it, worth their numbers; the second breaks."""

    def __init__(self, tokenizer: object, limits: object) -> None: ...

    async def collect_trajectory(
        self, episode: Episode, env: object, generate: Generate
    ) -> list[Trajectory]:
        word = np.array([5], np.int32)
        turns = [
            Turn(word, word, np.zeros(1, np.float32), np.zeros(1, np.int32), float(n))
            for n in range(3)
        ]
        stops = (StopReason.COMPLETED, StopReason.TIMEOUT, StopReason.COMPLETED)
        return [
            Trajectory(episode.key, episode.tag, (turn,), stop)
            for turn, stop in zip(turns, stops, strict=True)
        ]


async def test_every_trajectory_lies_in_the_store_before_its_episode_is_told(
    tmp_path: Path,
) -> None:
    tokenizer = build_task_tokenizer(FrozenLake().vocabulary(), 64)
    tokenizer.save_pretrained(tmp_path)
    store = TrajectoryStore()
    told = await _play(pipeline("grpo", f"{__name__}:ThreeWays"), tmp_path, store)
    assert [(r.key.member, r.key.branch, [o.key.branch for o in r.others]) for r in told] == [
        (0, 0, [2, 1]),
        (1, 0, [2, 1]),
    ]
    kept = [r for episode in told for r in episode.trajectories if r.trainable]
    assert [(r.key.branch, r.score) for r in kept] == [(0, 0.0), (2, 2.0)] * 2
    assert [t.score for t in await store.get([r.key for r in kept])] == [0.0, 2.0] * 2
    assert await store.size() == 4
    assert [r.transcript.count("--- end") for r in told[0].trajectories] == [1, 1, 1]
    assert ChatFormat(tokenizer).shown(np.array([5], np.int32)) in told[0].transcript


class NoWay(ThreeWays):
    async def collect_trajectory(self, *arguments: Any) -> list[Trajectory]:
        return []


async def test_no_trajectory_at_all_is_one_lost_episode(tmp_path: Path) -> None:
    build_task_tokenizer(FrozenLake().vocabulary(), 64).save_pretrained(tmp_path)
    told = await _play(pipeline("grpo", f"{__name__}:NoWay"), tmp_path, TrajectoryStore())
    assert {(r.stop_reason, r.error) for r in told} == {
        ("env_error", "ValueError: collect_trajectory returned no trajectory")
    }


async def _play(asked: Pipeline, folder: Path, store: TrajectoryStore) -> list[EpisodeResult]:
    async def spawn() -> Remote:
        worker = EnvWorker("w", asked)
        await worker.describe()
        await worker.setup(TokenizerSource(str(folder)))
        return Remote(worker)

    pool = EnvPool(spawn, 1)
    await pool.start()
    await pool.set_endpoints({}, [Remote(store)])
    try:
        return await asyncio.wait_for(
            asyncio.gather(
                *(
                    pool.run(
                        EpisodeTask(EpisodeKey(Stream.TRAIN, 0, member), "A", transcript=not member)
                    )
                    for member in range(2)
                )
            ),
            20,
        )
    finally:
        await pool.stop()
