"""The credit of each turn of a batch, from the scalars of its trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from agenticrun_api import Pipeline
from agenticrun_workers.algorithms.credit import (
    ESTIMATORS,
    CreditSpec,
    Episodes,
    assign_credit,
)
from agenticrun_workers.algorithms.kl import KlController, mean_kl
from agenticrun_workers.algorithms.normalization import Moments
from agenticrun_workers.algorithms.segments import Floats, joined, offsets
from agenticrun_workers.driver.metrics import Metrics
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.trainer.batch import TurnCredits
from agenticrun_workers.trainer.own_functions import own_estimator
from agenticrun_workers.types import STATE_BYTES, EpisodeKey


class CreditAssigner:
    """Assigns credit to one batch after the other, and adapts the KL penalty of the reward.

    Args:
        kl_coef: coefficient of that penalty from a checkpoint; None at the start of a run.
        moments: `moments` from a checkpoint; empty at the start of a run.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        kl_coef: float | None = None,
        moments: Mapping[str, Sequence[float]] = MappingProxyType({}),
    ) -> None:
        self._tags = {env.tag: code for code, env in enumerate(pipeline.envs)}
        self._running = {
            self._tags.get(tag, 0): Moments(*values) for tag, values in moments.items()
        }
        self._pipeline = pipeline
        reward_kl = pipeline.algorithm.reward_kl
        self._kl = (
            KlController(0.0)
            if reward_kl is None
            else KlController(
                reward_kl.coef if kl_coef is None else kl_coef,
                reward_kl.target_kl,
                reward_kl.horizon,
            )
        )

    @property
    def kl_coef(self) -> float:
        """The current coefficient of the KL penalty in the reward."""
        return self._kl.coef

    @property
    def moments(self) -> dict[str, list[float]]:
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

    def assign(
        self, results: list[EpisodeResult], kl: Mapping[EpisodeKey, Floats] | None
    ) -> tuple[TurnCredits, Metrics]:
        """Return the credit of each turn, and metrics; keep the moments of the scores.

        Args:
            kl: summed token KL of each turn; None where the reward has no KL penalty.
        """
        episodes = episodes_of(self._pipeline, results, kl)
        credit = assign_credit(credit_spec(self._pipeline), episodes, self._kl.coef, self._running)
        # A copy, because it goes into checkpoints.
        self._running = dict(credit.running)
        parts = np.split(credit.per_turn_K, episodes.cu_turns_N1[1:-1]) if results else []
        credits = {
            result.key: credit_K if trains else None
            for result, credit_K, trains in zip(
                results, parts, credit.trains_N.tolist(), strict=True
            )
        }
        metrics = dict(credit.metrics)
        for tag, moments in self.moments.items():
            found = Moments(*moments)
            metrics |= (
                {f"critic/running_mean/{tag}": found.mean, f"critic/running_std/{tag}": found.std}
                if tag
                else {"critic/running_mean": found.mean, "critic/running_std": found.std}
            )
        return credits, metrics

    def adapt_kl(
        self, results: list[EpisodeResult], kl: Mapping[EpisodeKey, Floats] | None
    ) -> Metrics:
        """Set the KL coefficient of the next step; return the metrics of this one."""
        if kl is None:
            return {}
        lengths_K = np.concatenate([result.response_tokens_K for result in results])
        kl_K = np.concatenate([kl[result.key] for result in results])
        seen = mean_kl(
            kl_K, lengths_K.astype(np.int64), offsets([result.turns for result in results])
        )
        used, self._kl = self._kl.coef, self._kl.updated(seen, len(results))
        return {"critic/kl_coef": used, "critic/kl": seen}


def episodes_of(
    pipeline: Pipeline, results: list[EpisodeResult], kl: Mapping[EpisodeKey, Floats] | None
) -> Episodes:
    """Return these trajectories as arrays."""
    tags = {env.tag: code for code, env in enumerate(pipeline.envs)}
    penalties = {env.tag: env.format_penalty for env in pipeline.envs}
    return Episodes(
        cu_turns_N1=offsets([result.turns for result in results]),
        rewards_K=joined([result.rewards_K for result in results], np.float64),
        invalid_K=~joined([result.valid_K for result in results], np.bool_),
        response_tokens_K=joined([result.response_tokens_K for result in results], np.int64),
        groups_N=np.array([result.key.group for result in results], np.int64),
        tags_N=np.array([tags[result.tag] for result in results], np.int64),
        format_penalty_N=np.array([penalties[result.tag] for result in results], np.float64),
        truncated_N=np.array([result.stop_reason.truncated for result in results], np.bool_),
        trainable_N=np.array([result.trainable for result in results], np.bool_),
        states_K=np.frombuffer(b"".join(result.states_K for result in results), np.uint8).reshape(
            -1, STATE_BYTES
        ),
        kl_K=None if kl is None else joined([kl[result.key] for result in results], np.float64),
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
