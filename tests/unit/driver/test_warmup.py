"""The supervised warm-up: what is played, what is trained on, and what happens to the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agenticrun_api import Pipeline
from agenticrun_workers.driver.warmup import CHUNK_STEPS, Warmup
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.rollout.groups import EpisodeResult, EpisodeTask
from agenticrun_workers.types import EpisodeKey, StopReason, Stream
from rollout_fakes import FakeBackend

Keys = list[list[tuple[EpisodeKey, int]]]


class Run:
    """A warm-up on fakes that write down what they are asked."""

    def __init__(self, *, fails: tuple[int, ...] = (), ranks: int = 2, **warmup: Any) -> None:
        pipeline = Pipeline.model_validate(
            {
                "maxSteps": 1,
                "rolloutBatchSize": 2,
                "evalSteps": 0,
                "warmup": warmup or None,
                "envs": [{"tag": "A", "type": "x"}, {"tag": "B", "type": "x"}],
                "trainEnvs": {"groups": 2, "groupSize": 2, "tags": ["A", "B"]},
            }
        )
        self.parts = ranks
        self.backend = FakeBackend(
            lambda task: StopReason.ENV_ERROR if task.key.group in fails else StopReason.COMPLETED
        )
        self.trained: list[Keys] = []
        self.trained_at_end: int | None = None
        self.kept: set[EpisodeKey] = set()
        self.most_kept = 0
        self.warmup = Warmup(self, self, pipeline, self.discard)  # type: ignore[arg-type]

    async def run(self, task: EpisodeTask) -> EpisodeResult:
        result = replace(await self.backend.run(task), key=task.key)
        if result.trainable:
            self.kept.add(result.key)
        self.most_kept = max(self.most_kept, len(self.kept))
        return result

    async def warm_up(self, keys: Keys) -> dict[str, float]:
        self.trained.append(keys)
        return {"warmup/loss": 1.0}

    async def end_warm_up(self) -> None:
        self.trained_at_end = len(self.trained)

    async def discard(self, results: list[EpisodeResult]) -> None:
        self.kept -= {result.key for result in results}

    async def metrics(self) -> list[dict[str, float]]:
        return [metrics async for metrics in self.warmup.steps()]

    def groups(self) -> list[list[int]]:
        """Groups that each step trained on, over all ranks."""
        return [sorted(key.group for share in step for key, _ in share) for step in self.trained]


async def test_each_step_trains_on_the_next_groups_over_all_ranks() -> None:
    run = Run(steps=3, batchSize=4)
    assert len(await run.metrics()) == 3
    assert run.groups() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [[len(share) for share in step] for step in run.trained] == [[2, 2]] * 3


async def test_episodes_that_fail_are_said_with_their_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await Run(steps=3, batchSize=4, fails=(1, 6)).metrics()
    assert [record.getMessage() for record in caplog.records] == [
        "warm-up episodes of 'B' end with env_error: ",
        "warm-up episodes of 'A' end with env_error: ",
    ]


async def test_random_play_is_of_the_training_environments_and_a_data_set_plays_nothing() -> None:
    for source, dataset, random_policy in (
        ("RandomValidActions", None, True),
        ("Dataset", {"path": "x.jsonl"}, False),
    ):
        run = Run(steps=2, batchSize=2, source=source, dataset=dataset)
        await run.metrics()
        assert {(t.key.stream, t.random_policy, t.demonstration) for t in run.backend.tasks} == {
            (Stream.WARMUP, random_policy, not random_policy)
        }
        assert [(t.key.group, t.key.member) for t in run.backend.tasks] == [
            (group, 0) for group in range(4)
        ]
        assert [t.tag for t in run.backend.tasks] == ["A", "B", "A", "B"]


async def test_what_fails_is_left_out_of_its_own_step_and_counted() -> None:
    run = Run(steps=2, batchSize=3, fails=(1, 2))
    assert [metrics["warmup/discarded"] for metrics in await run.metrics()] == [2.0, 0.0]
    assert run.groups() == [[0], [3, 4, 5]]


async def test_a_step_with_nothing_to_train_on_ends_the_run_with_the_reason() -> None:
    with pytest.raises(
        InvalidConfig, match="none of the 2 episodes or items of a step can be trained on"
    ) as caught:
        await Run(steps=2, batchSize=2, fails=(0, 1)).metrics()
    assert caught.value.path == "spec.pipeline.warmup"


async def test_stores_are_emptied_chunk_by_chunk() -> None:
    run = Run(steps=2 * CHUNK_STEPS + 1, batchSize=2)
    await run.metrics()
    assert len(run.trained) == 2 * CHUNK_STEPS + 1
    assert run.kept == set()
    assert run.most_kept == 2 * CHUNK_STEPS


async def test_the_optimizer_starts_again_after_the_last_step() -> None:
    run = Run(steps=CHUNK_STEPS + 2, batchSize=2)
    await run.metrics()
    assert run.trained_at_end == CHUNK_STEPS + 2


async def test_without_warmup_nothing_happens() -> None:
    run = Run()
    assert await run.metrics() == []
    assert run.backend.tasks == []
