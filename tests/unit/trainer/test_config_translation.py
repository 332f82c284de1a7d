"""From the API's words to the numbers of losses, advantages and optimizers: every field arrives."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from agenticrun_api import Pipeline
from agenticrun_api.algorithm import LOSSES, Algorithm
from agenticrun_workers.algorithms.correction import CorrectionSpec, FilterSpec, WeightSpec
from agenticrun_workers.algorithms.losses import (
    VARIANTS,
    Cispo,
    Decoupled,
    Kimi15,
    Ppo,
    Tis,
    Topr,
    Vanilla,
    Variant,
)
from agenticrun_workers.driver.credit import credit_spec
from agenticrun_workers.trainer.config_translation import (
    loss_spec,
    loss_temperature,
    needs_old_logprobs,
    optimizer_spec,
    token_spec,
    value_loss_spec,
)


def pipeline(algorithm: dict[str, Any] | None = None, **changes: Any) -> Pipeline:
    base: dict[str, Any] = {
        "maxSteps": 10,
        "rolloutBatchSize": 8,
        "evalSteps": 0,
        "envs": [{"tag": "A", "type": "frozen_lake"}],
        "trainEnvs": {"groups": 4, "groupSize": 2, "tags": ["A"]},
    }
    return Pipeline.model_validate(base | ({"algorithm": algorithm} if algorithm else {}) | changes)


@pytest.mark.parametrize(
    ("algorithm", "variant"),
    [
        ({"pgVariant": "vanilla"}, Vanilla()),
        ({"pgClipLow": 0.1, "pgClipHigh": 0.3, "dualClip": 3.0}, Ppo(0.1, 0.3, 3.0)),
        (
            {"pgVariant": "decoupled", "decoupled": {"cap": 5}, "pgClipLow": 0.1},
            Decoupled(0.1, 0.2, None, cap=5.0),
        ),
        ({"pgVariant": "decoupled"}, Decoupled(0.2, 0.2, None, cap=2.0)),
        ({"pgVariant": "tis", "tis": {"lowerBound": 0.2, "upperBound": 2}}, Tis(0.2, 2.0)),
        (
            {"pgVariant": "topr", "topr": {"positiveWeight": 2, "negativeWeight": 0.5}},
            Topr(2.0, 0.5),
        ),
        (
            {
                "pgVariant": "cispo",
                "cispo": {"epsilonLow": 0.3, "epsilonHigh": 0.4, "unifiedMask": True},
            },
            Cispo(0.3, 0.4, True),
        ),
        ({"pgVariant": "kimi15", "kimi15": {"tau": 0.7}}, Kimi15(0.7)),
        ({"pgVariant": "tis"}, Tis()),
    ],
    ids=lambda value: str(value)[:40],
)
def test_every_loss_variant_has_its_parameters_from_the_yaml(
    algorithm: dict[str, Any], variant: Variant
) -> None:
    """ROLL drops those of tis, cispo and kimi15 (C14)."""
    assert loss_spec(pipeline(algorithm)).variant == variant


@pytest.mark.parametrize("name", sorted({*LOSSES, *VARIANTS}))
def test_a_loss_has_one_name_and_the_same_fields_and_defaults_on_both_sides(name: str) -> None:
    kind = VARIANTS[name]
    assert type(loss_spec(pipeline({"pgVariant": name})).variant) is kind
    assert kind.reads_ratio == ("ratio_type" in LOSSES[name].reads)
    model = name in Algorithm.model_fields and Algorithm.model_validate(
        {"pgVariant": name, name: {}}
    )
    own = dict(getattr(model, name)) if model else {}
    numbers = {field.name: field.default for field in fields(kind)}
    assert own.items() <= numbers.items()
    assert numbers.items() <= (own | {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}).items()


def test_the_rest_of_the_actors_loss() -> None:
    algorithm = {
        "ratioType": "sequence",
        "lossAggMode": "seq-mean-token-sum-norm",
        "lossAggNorm": 64,
        "entropyLossCoef": 0.02,
        "lossKl": {"kind": "k2", "coef": 0.3},
    }
    spec = loss_spec(pipeline(algorithm, actorInfer={"generating": {"temperature": 0.7}}))
    assert (spec.ratio, spec.aggregation, spec.aggregation_norm) == (
        "sequence",
        "seq-mean-token-sum-norm",
        64.0,
    )
    assert (spec.entropy_coef, spec.kl_kind, spec.kl_coef, spec.temperature) == (
        0.02,
        "k2",
        0.3,
        0.7,
    )
    assert loss_spec(pipeline()).kl_coef == 0.0


def test_the_critic_has_the_actors_aggregation() -> None:
    algorithm = {"name": "gae", "lossAggMode": "token-mean"}
    spec = value_loss_spec(pipeline(algorithm, critic={"valueClip": 0.5}))
    assert (spec.clip, spec.aggregation) == (0.5, "token-mean")


def test_the_advantages_of_tokens() -> None:
    algorithm = {
        "name": "gae",
        "gamma": 0.9,
        "lambd": 0.8,
        "turnLevel": True,
        "rewardKl": {"kind": "k3"},
        "whitenRewards": True,
        "whitenAdvantages": True,
        "rewardClip": 2,
        "advantageClip": 3,
    }
    correction = {
        "isWeight": {"level": "sequence", "upperBound": 4},
        "filters": [{"level": "segment", "ratioLow": 0.5, "diffHigh": 0.1}],
    }
    spec = token_spec(pipeline(algorithm, critic={}, trainInferCorrection=correction))
    assert (spec.estimator, spec.gamma, spec.lambd, spec.turn_level, spec.reward_kl) == (
        "gae",
        0.9,
        0.8,
        True,
        "k3",
    )
    assert (spec.whiten_rewards, spec.whiten_advantages, spec.reward_clip, spec.advantage_clip) == (
        True,
        True,
        2.0,
        3.0,
    )
    assert spec.correction == CorrectionSpec(
        WeightSpec("sequence", 4.0), (FilterSpec("segment", 0.5, None, None, 0.1),)
    )


def test_the_credit_of_turns() -> None:
    gigpo = {
        "name": "gigpo",
        "normMeanType": "batch",
        "normStdType": "none",
        "stepRewardGamma": 0.5,
    }
    spec = credit_spec(
        pipeline({**gigpo, "episodeRewardWeight": 0.3, "stepRewardWeight": 0.7, "rewardClip": 5})
    )
    assert (spec.group_mean, spec.group_std, spec.step_reward_gamma) == ("batch", "none", 0.5)
    assert (spec.episode_reward_weight, spec.step_reward_weight, spec.reward_clip) == (
        0.3,
        0.7,
        5.0,
    )
    truncated = {"mode": "soft_penalty", "limit": 64, "buffer": 16, "penalty": 0.5}
    normalization = {"grouping": "tag", "normMeanType": "group", "normStdType": "batch"}
    spec = credit_spec(
        pipeline(
            {"name": "reinforce", "rewardPlacement": "turn", "truncated": truncated},
            rewardNormalization=normalization,
        )
    )
    assert (spec.truncated, spec.overlong_limit, spec.overlong_buffer, spec.overlong_penalty) == (
        "soft_penalty",
        64.0,
        16.0,
        0.5,
    )
    assert (spec.reward_placement, spec.norm_grouping, spec.norm_mean, spec.norm_std) == (
        "turn",
        "tag",
        "group",
        "batch",
    )


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, False),
        ({"algorithm": {"ppoEpochs": 2}}, True),
        ({"actorTrain": {"training": {"miniBatchSize": 4}}}, True),
        ({"algorithm": {"rewardKl": {}}}, True),
        ({"algorithm": {"lossKl": {}}}, False),
        ({"algorithm": {"pgVariant": "decoupled"}}, True),
        ({"trainInferCorrection": {"filters": [{"ratioHigh": 2}]}}, True),
        ({"oldLogProbs": "Rollout", "algorithm": {"ppoEpochs": 2, "rewardKl": {}}}, False),
    ],
    ids=str,
)
def test_old_log_probs_are_computed_where_something_reads_them(
    changes: dict[str, Any], needed: bool
) -> None:
    assert needs_old_logprobs(pipeline(**changes)) is needed


def test_truncated_sampling_trains_log_probs_of_temperature_one() -> None:
    generating = {"temperature": 0.7, "topP": 0.9, "allowTruncatedSampling": True}
    assert loss_temperature(pipeline(actorInfer={"generating": generating})) == 1.0
    assert loss_temperature(pipeline(actorInfer={"generating": {"temperature": 0.7}})) == 0.7


def test_the_optimizer_counts_its_own_steps_and_skips() -> None:
    training = {
        "learningRate": 0.1,
        "lrSchedulerType": "cosine",
        "miniBatchSize": 4,
        "weightDecay": 0.2,
        "adamBeta1": 0.8,
    }
    run = pipeline(
        {"ppoEpochs": 3}, actorTrain={"training": training}, guards={"maxSkippedSteps": 7}
    )
    spec = optimizer_spec(run, run.actor_train.training)
    assert (spec.total_steps, spec.max_skipped_steps) == (10 * 2 * 3, 7)
    assert (spec.learning_rate, spec.schedule, spec.weight_decay, spec.beta1) == (
        0.1,
        "cosine",
        0.2,
        0.8,
    )


def test_the_actors_schedule_ends_with_the_run_although_it_begins_after_the_critics_warm_up() -> (
    None
):
    training = {"lrSchedulerType": "cosine"}
    run = pipeline(
        {"name": "gae"}, criticWarmup=4, actorTrain={"training": training}, critic={"training": {}}
    )
    actor, critic = (
        optimizer_spec(run, part.training) for part in (run.actor_train, run.critic) if part
    )
    assert (actor.total_steps, critic.total_steps) == (6, 10)
    assert (actor.rate(0), actor.rate(6)) == (actor.learning_rate, 0.0)
