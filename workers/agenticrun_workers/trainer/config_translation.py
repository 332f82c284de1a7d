"""Translation of `spec.pipeline` into the specs of losses, advantages and optimizers."""

from __future__ import annotations

from dataclasses import fields

from agenticrun_api import Pipeline
from agenticrun_api.algorithm import Algorithm, loss_of
from agenticrun_api.training import Training
from agenticrun_workers.algorithms.correction import CorrectionSpec, FilterSpec, WeightSpec
from agenticrun_workers.algorithms.losses import VARIANTS, Variant
from agenticrun_workers.algorithms.token_advantages import TokenSpec
from agenticrun_workers.trainer.actor_loss import LossSpec
from agenticrun_workers.trainer.batch import optimizer_steps_per_batch
from agenticrun_workers.trainer.critic import ValueLossSpec
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.own_functions import own_loss


def needs_old_logprobs(pipeline: Pipeline) -> bool:
    """Return True if old log-probs must be computed at the start of a batch.

    Otherwise those of the rollout are the old ones, or the detached current ones.
    """
    algorithm = pipeline.algorithm
    return pipeline.old_log_probs == "Recompute" and (
        optimizer_steps_per_batch(pipeline) > 1
        or algorithm.reward_kl is not None
        or loss_of(algorithm.pg_variant).weighs_engine
        or pipeline.train_infer_correction is not None
    )


def loss_temperature(pipeline: Pipeline) -> float:
    """Return the temperature of the trainer's log-probs.

    It is that of sampling, or 1 where truncated sampling is allowed.
    """
    generating = pipeline.actor_infer.generating
    return 1.0 if generating.allow_truncated_sampling else generating.temperature


def loss_spec(pipeline: Pipeline) -> LossSpec:
    """Translate the policy loss.

    Raises:
        InvalidConfig: a function of the user's cannot be used.
    """
    algorithm = pipeline.algorithm
    return LossSpec(
        variant=_variant(algorithm),
        ratio=algorithm.ratio_type,
        aggregation=algorithm.loss_agg_mode,
        aggregation_norm=algorithm.loss_agg_norm or 1.0,
        entropy_coef=algorithm.entropy_loss_coef,
        kl_coef=algorithm.loss_kl.coef if algorithm.loss_kl else 0.0,
        kl_kind=algorithm.loss_kl.kind if algorithm.loss_kl else "k3",
        temperature=loss_temperature(pipeline),
    )


def value_loss_spec(pipeline: Pipeline) -> ValueLossSpec:
    """Translate the critic's loss."""
    algorithm = pipeline.algorithm
    clip = pipeline.critic.value_clip if pipeline.critic else None
    return ValueLossSpec(
        clip=clip,
        aggregation=algorithm.loss_agg_mode,
        aggregation_norm=algorithm.loss_agg_norm or 1.0,
    )


def token_spec(pipeline: Pipeline) -> TokenSpec:
    """Translate how credits of turns become advantages of tokens."""
    algorithm, asked = pipeline.algorithm, pipeline.train_infer_correction
    correction = None
    if asked is not None:
        weight = asked.is_weight
        correction = CorrectionSpec(
            WeightSpec(weight.level, weight.upper_bound) if weight else None,
            tuple(
                FilterSpec(f.level, f.ratio_low, f.ratio_high, f.diff_low, f.diff_high)
                for f in asked.filters
            ),
        )
    return TokenSpec(
        estimator=algorithm.name,
        gamma=algorithm.gamma,
        lambd=algorithm.lambd,
        turn_level=algorithm.turn_level,
        reward_kl=algorithm.reward_kl.kind if algorithm.reward_kl else None,
        whiten_rewards=algorithm.whiten_rewards,
        whiten_advantages=algorithm.whiten_advantages,
        reward_clip=algorithm.reward_clip,
        advantage_clip=algorithm.advantage_clip,
        correction=correction,
    )


def optimizer_spec(pipeline: Pipeline, training: Training) -> OptimizerSpec:
    """Translate the optimizer of policy or critic.

    Args:
        training: `pipeline.actor_train.training` or `pipeline.critic.training`.
    """
    waits = pipeline.critic_warmup if training is pipeline.actor_train.training else 0
    steps = max(1, pipeline.max_steps - waits)  # those in which this optimizer takes steps
    return OptimizerSpec(
        learning_rate=training.learning_rate,
        schedule=training.lr_scheduler_type,
        warmup_steps=training.warmup_steps,
        total_steps=steps * optimizer_steps_per_batch(pipeline),
        supervised_learning_rate=pipeline.warmup.learning_rate if pipeline.warmup else None,
        weight_decay=training.weight_decay,
        beta1=training.adam_beta1,
        beta2=training.adam_beta2,
        max_grad_norm=training.max_grad_norm,
        max_skipped_steps=pipeline.guards.max_skipped_steps,
    )


def _variant(algorithm: Algorithm) -> Variant:
    kind = VARIANTS.get(algorithm.pg_variant)
    if kind is None:
        return own_loss(algorithm)
    own = getattr(algorithm, algorithm.pg_variant, None)  # such as `algorithm.tis`
    given = {
        "clip_low": algorithm.pg_clip_low,
        "clip_high": algorithm.pg_clip_high,
        "dual_clip": algorithm.dual_clip,
        **(dict(own) if own is not None else {}),
    }
    return kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given})
