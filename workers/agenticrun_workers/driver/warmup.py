"""Supervised warm-up before the first RL step (`pipeline.warmup`).

It trains on random valid play of the environments, or on the answers of a data set. Random play
teaches the format of an answer, not which answer is right.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

from agenticrun_api import Pipeline
from agenticrun_workers.driver.batch_plan import balance
from agenticrun_workers.driver.trainer_group import TrainerGroup
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.log_once import LogOnce
from agenticrun_workers.rollout.controller import Discard
from agenticrun_workers.rollout.groups import (
    EpisodeResult,
    EpisodeTask,
    RolloutBackend,
    every_trajectory,
    failures,
    tag_cycle,
)
from agenticrun_workers.trainer.rank import Metrics
from agenticrun_workers.types import EpisodeKey, Stream

log = logging.getLogger(__name__)

CHUNK_STEPS = 25
"""Steps whose episodes are played together: no policy is needed, and large calls are cheaper."""


class Warmup:
    """Runs the warm-up step by step."""

    def __init__(
        self, backend: RolloutBackend, trainers: TrainerGroup, pipeline: Pipeline, discard: Discard
    ) -> None:
        self._backend = backend
        self._trainers = trainers
        self._pipeline = pipeline
        self._discard = discard
        self._tags = tag_cycle(pipeline.train_envs.shares())
        self._warn = LogOnce(log.warning)

    async def steps(self) -> AsyncGenerator[Metrics, None]:
        """Take the supervised steps and yield the metrics of each; nothing without a warm-up.

        The optimizer forgets its state after the last one.

        Raises:
            InvalidConfig: no episode of a step can be trained on.
        """
        warmup = self._pipeline.warmup
        if warmup is None:
            return
        size = warmup.batch_size
        for first in range(0, warmup.steps, CHUNK_STEPS):
            last = min(first + CHUNK_STEPS, warmup.steps)
            played = await self._play(range(first * size, last * size))
            for message in failures("warm-up", every_trajectory(played)):
                self._warn(message)
            for start in range(0, len(played), size):
                yield await self._step(played[start : start + size])
            # Trainers have read them; the stores would keep them for good.
            await self._discard([result for result in every_trajectory(played) if result.trainable])
        # The optimizer's moments from imitation would mislead the first steps of RL.
        await self._trainers.end_warm_up()

    async def _step(self, played: list[EpisodeResult]) -> Metrics:
        # An environment may fail in some episodes; the step trains on the others.
        good = [result for result in every_trajectory(played) if result.trainable]
        if not good:
            error = played[0].error or played[0].stop_reason
            raise InvalidConfig(
                "spec.pipeline.warmup",
                f"none of the {len(played)} episodes or items of a step can be trained on: {error}",
            )
        shares = balance(good, self._trainers.parts)
        metrics = await self._trainers.warm_up(
            [[(r.key, r.store) for r in share] for share in shares]
        )
        return {
            **metrics,
            "warmup/discarded": float(
                sum(not result.trainable for result in every_trajectory(played))
            ),
        }

    async def _play(self, groups: range) -> list[EpisodeResult]:
        """Return one result per group, in order."""
        return await asyncio.gather(*(self._backend.run(self._task(group)) for group in groups))

    def _task(self, group: int) -> EpisodeTask:
        shown = self._pipeline.warmup is not None and self._pipeline.warmup.source == "Dataset"
        tag = self._tags[group % len(self._tags)]
        return EpisodeTask(
            EpisodeKey(Stream.WARMUP, group, 0), tag, random_policy=not shown, demonstration=shown
        )
