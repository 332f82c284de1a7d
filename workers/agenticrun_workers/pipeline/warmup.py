"""Supervised warm-up before the first RL step: episodes of uniformly random valid answers.

It teaches how an answer looks and never which one is right.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from agenticrun_api import Pipeline
from agenticrun_workers.pipeline.batch_plan import balance
from agenticrun_workers.pipeline.trainers import Metrics, TrainerGroup
from agenticrun_workers.rollout.controller import Discard
from agenticrun_workers.rollout.env_pool import Players
from agenticrun_workers.rollout.groups import EpisodeResult, GroupTask, tag_cycle
from agenticrun_workers.types import Stream

CHUNK_STEPS = 25
"""Steps whose episodes are played at once: they need no policy, so they cost fewer calls in bulk."""


class Warmup:
    """`pipeline.warmup`, step by step."""

    def __init__(self, players: Players, trainers: TrainerGroup, pipeline: Pipeline, discard: Discard) -> None:
        self._players = players
        self._trainers = trainers
        self._pipeline = pipeline
        self._discard = discard
        self._tags = tag_cycle(pipeline.train_envs.shares())

    async def steps(self) -> AsyncIterator[Metrics]:
        """Metrics of each supervised step. Yields nothing where the run asks for no warm-up."""
        warmup = self._pipeline.warmup
        if warmup is None:
            return
        for first in range(0, warmup.steps, CHUNK_STEPS):
            last = min(first + CHUNK_STEPS, warmup.steps)
            results = await self._play(range(first * warmup.batch_size, last * warmup.batch_size))
            for start in range(0, len(results), warmup.batch_size):
                shares = balance(results[start : start + warmup.batch_size], self._trainers.ranks)
                yield await self._trainers.warm_up([[(r.key, r.store) for r in share] for share in shares])
            await self._discard(results)

    async def _play(self, groups: range) -> list[EpisodeResult]:
        tasks = [GroupTask(Stream.WARMUP, g, self._tags[g % len(self._tags)], (0,), random_policy=True) for g in groups]
        played = await asyncio.gather(*(self._players.play(task) for task in tasks))
        return [result for results in played for result in results if result.trainable]
