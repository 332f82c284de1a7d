"""The learning half of a training step: how the rewards of a batch become a gradient.

    score        old and reference log-probs, values       forward passes on the ranks
    credit       rewards, KL, baselines -> one number      here, from scalars:
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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from agenticrun_api import Pipeline
from agenticrun_workers.algorithms.credit import (
    ESTIMATORS,
    Credit,
    CreditSpec,
    Episodes,
    assign_credit,
)
from agenticrun_workers.algorithms.kl import KlController, mean_kl
from agenticrun_workers.algorithms.normalization import Moments
from agenticrun_workers.algorithms.segments import Floats
from agenticrun_workers.driver.metrics import Metrics, Stopwatch, gap_metrics
from agenticrun_workers.driver.trainer_group import Advantages
from agenticrun_workers.rollout.controller import Group
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.trainer.batch import ScoredBatch, TurnCredits
from agenticrun_workers.trainer.own_functions import own_estimator
from agenticrun_workers.types import STATE_BYTES, EpisodeKey


class Trainers(Protocol):
    """The stages of a step that run on the ranks; `TrainerGroup` explains each."""

    async def score(self, groups: tuple[Group, ...], version: int) -> ScoredBatch: ...

    async def compute_advantages(self, credits: TurnCredits) -> Advantages: ...

    async def train_critic(self, targets: Sequence[Any]) -> Metrics: ...

    async def train_actor(self, version: int, *, update: bool) -> Metrics: ...


class TrainingStep:
    """Trains the policy on one batch after the other.

    Args:
        kl_coef: coefficient of the KL penalty from a checkpoint; None at the start of a run.
        stopwatch: measures the stages.
        reward_moments: `TrainingStep.reward_moments` from a checkpoint; empty at the start of a
            run.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        trainers: Trainers,
        kl_coef: float | None,
        stopwatch: Stopwatch,
        reward_moments: Mapping[str, Sequence[float]],
    ) -> None:
        self._tags = {env.tag: code for code, env in enumerate(pipeline.envs)}
        self._running = {
            self._tags.get(tag, 0): Moments(*moments) for tag, moments in reward_moments.items()
        }
        self._pipeline = pipeline
        self._trainers = trainers
        self._kl = kl_controller(pipeline, kl_coef)
        self._stopwatch = stopwatch

    @property
    def kl_coef(self) -> float:
        """The current coefficient of the KL penalty in the reward."""
        return self._kl.coef

    @property
    def reward_moments(self) -> dict[str, list[float]]:
        """Number, mean and sum of squared deviations of the scores so far, by tag.

        The tag is empty if `rewardNormalization` compares all trajectories.
        """
        normalization = self._pipeline.reward_normalization
        by_tag = normalization is not None and normalization.grouping == "tag"
        names = {code: tag if by_tag else "" for tag, code in self._tags.items()}
        return {
            names[code]: [moments.count, moments.mean, moments.m2]
            for code, moments in self._running.items()
        }

    async def train(self, groups: tuple[Group, ...], version: int) -> Metrics:
        """Train on these groups.

        Args:
            version: the policy version that this step makes.
        """
        results = [result for group in groups for result in group.results]
        with self._stopwatch.phase("old_log_probs_values"):
            scored = await self._trainers.score(groups, version)
        with self._stopwatch.phase("credit"):
            credits = self.credit(results, scored.kl)
        with self._stopwatch.phase("train"):
            advantages = await self._trainers.compute_advantages(credits)
            # On pods of its own, the critic trains while the policy does.
            critic_metrics, actor_metrics = await asyncio.gather(
                self._trainers.train_critic(advantages.value_targets),
                self._trainers.train_actor(version, update=version > self._pipeline.critic_warmup),
            )
        return {
            **credits.metrics,
            **advantages.metrics,
            **critic_metrics,
            **actor_metrics,
            **gap_metrics(scored.gaps),
            **self._adapt_kl(results, scored.kl),
        }

    def credit(
        self, results: list[EpisodeResult], kl: Mapping[EpisodeKey, Floats] | None
    ) -> TurnCredits:
        """Return the credit of each turn, and keep the moments of the scores."""
        credits = credit_turns(self._pipeline, results, kl, self._kl.coef, self._running)
        # A copy, because it goes into checkpoints.
        self._running = dict(credits.running)
        metrics: Metrics = {}
        for tag, moments in self.reward_moments.items():
            found = Moments(*moments)
            metrics |= (
                {f"critic/running_mean/{tag}": found.mean, f"critic/running_std/{tag}": found.std}
                if tag
                else {"critic/running_mean": found.mean, "critic/running_std": found.std}
            )
        return replace(credits, metrics={**credits.metrics, **metrics})

    def _adapt_kl(
        self, results: list[EpisodeResult], kl: Mapping[EpisodeKey, Floats] | None
    ) -> Metrics:
        """Set the KL coefficient of the next step."""
        if kl is None:
            return {}
        used = self._kl.coef
        self._kl, seen = update_kl(self._kl, results, kl)
        return {"critic/kl_coef": used, "critic/kl": seen}


def select_groups(pipeline: Pipeline, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Return the groups to train on: all, or with a variance filter the most uncertain ones."""
    variance_filter = pipeline.algorithm.variance_filter
    if variance_filter is None:
        return groups
    return most_uncertain(groups, variance_filter.kept(len(groups)))


def most_uncertain(groups: tuple[Group, ...], count: int) -> tuple[Group, ...]:
    """Return the `count` groups with the largest spread of scores, in their order.

    StarPO-S (Wang et al. 2025, arXiv 2504.20073).
    """
    spread = [float(np.std([result.score for result in group.results])) for group in groups]
    # By index where spreads are equal, so that the choice is the same in every run.
    chosen = sorted(range(len(groups)), key=lambda index: (-spread[index], index))[:count]
    return tuple(groups[index] for index in sorted(chosen))


def credit_turns(
    pipeline: Pipeline,
    results: list[EpisodeResult],
    kl: Mapping[EpisodeKey, Floats] | None,
    kl_coef: float,
    running: Mapping[int, Moments] | None = None,
) -> TurnCredits:
    """Return the credit of each turn of these trajectories.

    Args:
        kl: summed token KL of each turn; None where the reward has no KL penalty.
        kl_coef: coefficient of that penalty.
        running: `Credit.running` of the batch before.
    """
    episodes = episodes_of(pipeline, results, kl)
    credit: Credit = assign_credit(credit_spec(pipeline), episodes, kl_coef, running)
    parts = np.split(credit.per_turn_K, episodes.cu_turns_N1[1:-1]) if results else []
    return TurnCredits(
        kind=credit.kind,
        per_turn={result.key: part for result, part in zip(results, parts, strict=True)},
        trains={
            result.key: bool(trains)
            for result, trains in zip(results, credit.trains_N, strict=True)
        },
        kl_coef=kl_coef,
        metrics=credit.metrics,
        running=credit.running,
    )


def kl_controller(pipeline: Pipeline, coef: float | None) -> KlController:
    """Return the controller of the KL penalty in the reward.

    Args:
        coef: the coefficient from a checkpoint; None starts with the one of the spec.
    """
    reward_kl = pipeline.algorithm.reward_kl
    if reward_kl is None:
        return KlController(0.0)
    return KlController(
        reward_kl.coef if coef is None else coef, reward_kl.target_kl, reward_kl.horizon
    )


def update_kl(
    controller: KlController, results: list[EpisodeResult], kl: Mapping[EpisodeKey, Floats]
) -> tuple[KlController, float]:
    """Return the controller after this batch, and the batch's mean KL per response token."""
    lengths_K = np.concatenate([result.response_tokens_K for result in results]).astype(np.int64)
    seen = mean_kl(
        np.concatenate([kl[result.key] for result in results]), lengths_K, _offsets(results)
    )
    return controller.updated(seen, len(results)), seen


def episodes_of(
    pipeline: Pipeline, results: list[EpisodeResult], kl: Mapping[EpisodeKey, Floats] | None
) -> Episodes:
    """Return these trajectories as arrays."""
    tags = {env.tag: code for code, env in enumerate(pipeline.envs)}
    penalties = {env.tag: env.format_penalty for env in pipeline.envs}
    return Episodes(
        cu_turns_N1=_offsets(results),
        rewards_K=_joined([result.rewards_K for result in results], np.float64),
        invalid_K=~_joined([result.valid_K for result in results], np.bool_),
        response_tokens_K=_joined([result.response_tokens_K for result in results], np.int64),
        groups_N=np.array([result.key.group for result in results], np.int64),
        tags_N=np.array([tags[result.tag] for result in results], np.int64),
        format_penalty_N=np.array([penalties[result.tag] for result in results], np.float64),
        truncated_N=np.array([result.stop_reason.truncated for result in results], np.bool_),
        trainable_N=np.array([result.trainable for result in results], np.bool_),
        states_K=np.frombuffer(b"".join(result.states_K for result in results), np.uint8).reshape(
            -1, STATE_BYTES
        ),
        kl_K=None if kl is None else _joined([kl[result.key] for result in results], np.float64),
    )


def credit_spec(pipeline: Pipeline) -> CreditSpec:
    """Translate the fields of `spec.pipeline` that decide about credit.

    Raises:
        InvalidConfig: a function of the user's cannot be used.
    """
    algorithm, normalization = pipeline.algorithm, pipeline.reward_normalization
    truncated = algorithm.truncated
    return CreditSpec(
        estimator=algorithm.name,
        reward_placement=algorithm.reward_placement,
        reward_clip=algorithm.reward_clip,
        truncated=truncated.mode,
        overlong_limit=float(truncated.limit or 1),
        overlong_buffer=float(truncated.buffer or 1),
        overlong_penalty=truncated.penalty,
        norm_grouping=normalization.grouping if normalization else "batch",
        norm_mean=normalization.norm_mean_type if normalization else "none",
        norm_std=normalization.norm_std_type if normalization else "none",
        group_mean=algorithm.norm_mean_type,
        group_std=algorithm.norm_std_type,
        step_reward_gamma=algorithm.step_reward_gamma,
        episode_reward_weight=algorithm.episode_reward_weight,
        step_reward_weight=algorithm.step_reward_weight,
        function=None if algorithm.name in ESTIMATORS else own_estimator(algorithm),
    )


def _offsets(results: list[EpisodeResult]) -> np.ndarray:
    return np.concatenate(
        [[0], np.cumsum([result.turns for result in results], dtype=np.int64)]
    ).astype(np.int64)


def _joined(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
