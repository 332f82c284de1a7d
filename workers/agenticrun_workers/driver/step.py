"""The driver's half of a step's order of operations: from the scalars of a batch to what each turn is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from agenticrun_api import Pipeline
from agenticrun_workers.algorithms.credit import Credit, CreditSpec, Kind, assign_credit
from agenticrun_workers.algorithms.episodes import Episodes
from agenticrun_workers.algorithms.kl import KlController, mean_kl
from agenticrun_workers.algorithms.segments import Floats
from agenticrun_workers.rollout.groups import EpisodeResult, Group
from agenticrun_workers.types import STATE_BYTES, EpisodeKey


@dataclass(frozen=True)
class TurnCredits:
    """What the ranks need to know of each trajectory of a batch."""

    kind: Kind
    per_turn: Mapping[EpisodeKey, Floats]
    """float64 [turns of the trajectory]"""
    trains: Mapping[EpisodeKey, bool]
    kl_coef: float
    metrics: Mapping[str, float]


def assign(
    pipeline: Pipeline,
    results: list[EpisodeResult],
    kl: Mapping[EpisodeKey, Floats] | None,
    kl_coef: float,
) -> TurnCredits:
    """Credit of each turn of these trajectories.

    Args:
        kl: summed token KL of each turn, where the reward has a KL penalty.
        kl_coef: its coefficient now.
    """
    episodes = episodes_of(pipeline, results, kl)
    credit: Credit = assign_credit(credit_spec(pipeline), episodes, kl_coef)
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
    )


def kl_controller(pipeline: Pipeline, kept: float | None) -> KlController:
    """Of the KL in the reward, with the coefficient that a checkpoint kept."""
    reward_kl = pipeline.algorithm.reward_kl
    if reward_kl is None:
        return KlController(0.0)
    return KlController(
        reward_kl.coef if kept is None else kept, reward_kl.target_kl, reward_kl.horizon
    )


def updated(
    controller: KlController, results: list[EpisodeResult], kl: Mapping[EpisodeKey, Floats]
) -> tuple[KlController, float]:
    """The controller after this batch, and the mean KL per response token that it saw."""
    lengths_K = np.concatenate([result.response_tokens_K for result in results]).astype(np.int64)
    seen = mean_kl(
        np.concatenate([kl[result.key] for result in results]), lengths_K, _offsets(results)
    )
    return controller.updated(seen, len(results)), seen


def most_uncertain(groups: tuple[Group, ...], keep: float) -> tuple[Group, ...]:
    """StarPO-S (Wang et al. 2025, arXiv 2504.20073): the share of groups whose scores differ most, at least one, in their order."""
    count = max(1, round(keep * len(groups)))
    spread = [float(np.std([result.score for result in group.results])) for group in groups]
    chosen = sorted(range(len(groups)), key=lambda index: (-spread[index], index))[:count]
    return tuple(groups[index] for index in sorted(chosen))


def episodes_of(
    pipeline: Pipeline, results: list[EpisodeResult], kl: Mapping[EpisodeKey, Floats] | None
) -> Episodes:
    """These trajectories as arrays."""
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
    )


def _offsets(results: list[EpisodeResult]) -> np.ndarray:
    return np.concatenate(
        [[0], np.cumsum([result.turns for result in results], dtype=np.int64)]
    ).astype(np.int64)


def _joined(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
