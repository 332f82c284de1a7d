"""Validation: the same levels at every launch, after every resume and for every policy."""

from __future__ import annotations

import asyncio

from agenticrun_api import Pipeline
from agenticrun_workers.driver.metrics import Metrics, validation_metrics
from agenticrun_workers.rollout.env_pool import Players
from agenticrun_workers.rollout.groups import EpisodeResult, GroupTask, every_trajectory, tag_cycle
from agenticrun_workers.types import Stream


class Validator:
    """Plays the fixed validation set: `valBatchSize` trajectories, groups 0, 1, 2 ... of the validation stream.

    Args:
        transcripts: groups whose first episode is told as text; with `frames` also as pictures.
    """

    def __init__(
        self, players: Players, pipeline: Pipeline, *, transcripts: int = 0, frames: bool = False
    ) -> None:
        self._players = players
        self._pipeline = pipeline
        self._transcripts = transcripts
        self._frames = frames

    @property
    def enabled(self) -> bool:
        return self._pipeline.val_envs is not None and self._pipeline.eval_steps > 0

    def due(self, step: int) -> bool:
        """Every `evalSteps` steps, at step 0 and at the end."""
        return self.enabled and (
            step % self._pipeline.eval_steps == 0 or step == self._pipeline.max_steps
        )

    async def run(self) -> list[EpisodeResult]:
        """The policy's trajectories, by group and member."""
        return await self._play(random_policy=False)

    async def random_baseline(self) -> Metrics:
        """val/<tag>/random_success of a uniformly random valid policy on the same levels."""
        return _renamed(validation_metrics(await self._play(random_policy=True)), "random_success")

    async def _play(self, random_policy: bool) -> list[EpisodeResult]:
        envs = self._pipeline.val_envs
        assert envs is not None
        tags = tag_cycle(envs.shares())
        members = tuple(range(envs.group_size))
        running = asyncio.Semaphore(envs.groups)

        async def play(group: int) -> list[EpisodeResult]:
            shown = group < self._transcripts and not random_policy
            task = GroupTask(
                Stream.VALIDATION,
                group,
                tags[group % len(tags)],
                members,
                random_policy=random_policy,
                transcript=shown,
                frames=shown and self._frames,
            )
            async with running:
                return await self._players.play(task)

        groups = range(self._pipeline.val_batch_size // envs.group_size)
        return [
            result
            for played in await asyncio.gather(*map(play, groups))
            for result in every_trajectory(played)
        ]


def warmup_success(validated: Metrics) -> Metrics:
    """val/<tag>/warmup_success: what the policy could do before its first RL step."""
    return _renamed(validated, "warmup_success")


def _renamed(metrics: Metrics, name: str) -> Metrics:
    return {
        key.removesuffix("success") + name: value
        for key, value in metrics.items()
        if key.endswith("/success")
    }
