"""The learning half of a training step: how the rewards of a batch become a gradient.

    score        old and reference log-probs, values       forward passes on the ranks
    credit       rewards, KL, baselines -> one number      driver/credit.py, from scalars:
                 per turn                                  algorithms.credit.assign_credit
    advantages   credits -> one number per token           algorithms.token_advantages, on the ranks
    critic       value loss -> optimizer steps             CriticTrainer.train_step
    actor        policy loss -> optimizer steps            PolicyTrainer.train_step

`TrainerGroup` calls the ranks. Each rank runs the method of the same name in trainer/policy_rank.py
on its `RankBatch` (trainer/batch.py), which holds the tokens of its share of the batch from the
first stage to the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from agenticrun_api import Pipeline
from agenticrun_workers.driver.credit import CreditAssigner
from agenticrun_workers.driver.metrics import Metrics, Stopwatch, gap_metrics
from agenticrun_workers.driver.trainer_group import Advantages
from agenticrun_workers.rollout.controller import Group
from agenticrun_workers.trainer.batch import ScoredBatch, TurnCredits


class Trainers(Protocol):
    """The stages of a step that run on the ranks; `TrainerGroup` explains each."""

    async def score(self, groups: tuple[Group, ...], version: int) -> ScoredBatch: ...

    async def compute_advantages(self, credits: TurnCredits, kl_coef: float) -> Advantages: ...

    async def train_critic(self, targets: Sequence[Any]) -> Metrics: ...

    async def train_actor(self, version: int, *, update: bool) -> Metrics: ...


class TrainingStep:
    """Trains the policy on one batch after the other.

    Args:
        credit: assigns the credit of each turn.
        stopwatch: measures the stages.
    """

    def __init__(
        self, pipeline: Pipeline, trainers: Trainers, credit: CreditAssigner, stopwatch: Stopwatch
    ) -> None:
        self._pipeline = pipeline
        self._trainers = trainers
        self.credit = credit
        self._stopwatch = stopwatch

    async def train(self, groups: tuple[Group, ...], version: int) -> Metrics:
        """Train on these groups.

        Args:
            version: the policy version that this step makes.
        """
        results = [result for group in groups for result in group.results]
        with self._stopwatch.phase("old_log_probs_values"):
            scored = await self._trainers.score(groups, version)
        with self._stopwatch.phase("credit"):
            credits, metrics = self.credit.assign(results, scored.kl)
        with self._stopwatch.phase("train"):
            advantages = await self._trainers.compute_advantages(credits, self.credit.kl_coef)
            # On pods of its own, the critic trains while the policy does.
            critic_metrics, actor_metrics = await asyncio.gather(
                self._trainers.train_critic(advantages.value_targets),
                self._trainers.train_actor(version, update=version > self._pipeline.critic_warmup),
            )
        return {
            **metrics,
            **advantages.metrics,
            **critic_metrics,
            **actor_metrics,
            **gap_metrics(scored.gaps),
            **self.credit.adapt_kl(results, scored.kl),
        }


def select_groups(pipeline: Pipeline, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Return the groups to train on, in their order.

    They are all, or with a variance filter those with the largest spread of scores: StarPO-S (Wang
    et al. 2025, arXiv 2504.20073).
    """
    variance_filter = pipeline.algorithm.variance_filter
    if variance_filter is None:
        return groups
    spread = [float(np.std([result.score for result in group.results])) for group in groups]
    # By index where spreads are equal, so that the choice is the same in every run.
    by_spread = sorted(range(len(groups)), key=lambda index: (-spread[index], index))
    return tuple(groups[index] for index in sorted(by_spread[: variance_filter.kept(len(groups))]))
