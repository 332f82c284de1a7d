"""Builds trainers, engines and models from the API's words.

Imports torch, so only trainer and inference pods import it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from agenticrun_api import Pipeline
from agenticrun_api import algorithm as api
from agenticrun_api.algorithm import Algorithm
from agenticrun_api.spec import InitializeModel
from agenticrun_api.training import ActorTrain, Critic, Training
from agenticrun_workers.algorithms.correction import CorrectionSpec, FilterSpec, WeightSpec
from agenticrun_workers.algorithms.losses import Cispo, Decoupled, Kimi15, Ppo, Tis, Topr, Vanilla, Variant
from agenticrun_workers.algorithms.token_advantages import TokenSpec
from agenticrun_workers.inference import InferenceEngine, TransformersEngine
from agenticrun_workers.models import InitializeSpec, ModelLoadError, initialize_model, load_model, words_of
from agenticrun_workers.models.heads import UnsupportedModel
from agenticrun_workers.pipeline.batch_plan import optimizer_steps_per_batch
from agenticrun_workers.pipeline.model_source import ModelSource
from agenticrun_workers.rollout.env_worker import Texts
from agenticrun_workers.rollout.errors import InvalidConfig
from agenticrun_workers.training import (
    CriticStrategy,
    LossSpec,
    OptimizerSpec,
    ReferenceStrategy,
    TorchCritic,
    TorchPolicy,
    TorchReference,
    TrainStrategy,
    ValueLossSpec,
)


def build_strategy(pipeline: Pipeline, source: ModelSource) -> TrainStrategy:
    """The policy's trainer of this rank. Raises `InvalidConfig`."""
    options = {"temperature": loss_temperature(pipeline), **_batches(pipeline.actor_train)}
    with _refusing("spec.model.path"):
        return TorchPolicy(partial(_load, source), optimizer_spec(pipeline), **options)


def build_reference(pipeline: Pipeline, source: ModelSource) -> ReferenceStrategy:
    """The frozen policy of this rank. Raises `InvalidConfig`."""
    options = {"temperature": loss_temperature(pipeline), **_batches(pipeline.actor_train)}
    with _refusing("spec.pipeline.reference.path"):
        return TorchReference(partial(_load, source), **options)


def build_critic(pipeline: Pipeline, source: ModelSource) -> CriticStrategy:
    """The value model of this rank. Raises `InvalidConfig`."""
    assert pipeline.critic is not None, "gae has a critic"
    with _refusing("spec.pipeline.critic.path"):
        return TorchCritic(partial(_load, source), _optimizer(pipeline, pipeline.critic.training), **_batches(pipeline.critic))


def build_engine(pipeline: Pipeline, source: ModelSource) -> InferenceEngine:
    """The engine of this inference actor, not started. Needs a running event loop."""
    return TransformersEngine(
        partial(_load, source),
        max_length=pipeline.sequence_length,
        alone=pipeline.deterministic,
        restart_on_update=not pipeline.staleness.partial_rollout,
    )


def _load(source: ModelSource) -> PreTrainedModel:
    with source.folder() as folder:
        return load_model(folder, getattr(torch, source.dtype), trust_remote_code=source.trust_remote_code)


@contextmanager
def _refusing(field: str) -> Iterator[None]:
    """A model that cannot be used is a mistake in this field."""
    try:
        yield
    except (ModelLoadError, UnsupportedModel) as error:
        raise InvalidConfig(field, str(error)) from error


def make_model_files(model: InitializeModel, texts: Texts, max_length: int) -> dict[str, bytes]:
    """The files of a model with random weights, by name. Raises `InvalidConfig` for a shape that cannot be built."""
    words = [*texts.vocabulary, *(word for text in texts.texts for word in words_of(text)), *model.words]
    with tempfile.TemporaryDirectory() as folder:
        try:
            initialize_model(Path(folder), initialize_spec(model, tuple(dict.fromkeys(words)), max_length))
        except ValueError as error:
            raise InvalidConfig("spec.model.initialize", str(error)) from error
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def needs_old_logprobs(pipeline: Pipeline) -> bool:
    """Whether log-probs must be computed at the batch's start; else the detached current ones are the old ones (rl-semantics)."""
    algorithm = pipeline.algorithm
    return (
        optimizer_steps_per_batch(pipeline) > 1
        or algorithm.reward_kl is not None
        or algorithm.pg_variant == "decoupled"
        or pipeline.train_infer_correction is not None
    )


def loss_temperature(pipeline: Pipeline) -> float:
    """Of the log-probs that are trained: the sampling's, or 1 where truncated sampling is allowed (rl-semantics, "Samples")."""
    generating = pipeline.actor_infer.generating
    return 1.0 if generating.allow_truncated_sampling else generating.temperature


def loss_spec(pipeline: Pipeline) -> LossSpec:
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
    algorithm = pipeline.algorithm
    clip = pipeline.critic.value_clip if pipeline.critic else None
    return ValueLossSpec(clip=clip, aggregation=algorithm.loss_agg_mode, aggregation_norm=algorithm.loss_agg_norm or 1.0)


def token_spec(pipeline: Pipeline) -> TokenSpec:
    algorithm = pipeline.algorithm
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
        correction=_correction(pipeline),
    )


def optimizer_spec(pipeline: Pipeline) -> OptimizerSpec:
    """Of the policy."""
    return _optimizer(pipeline, pipeline.actor_train.training)


def _optimizer(pipeline: Pipeline, training: Training) -> OptimizerSpec:
    return OptimizerSpec(
        learning_rate=training.learning_rate,
        schedule=training.lr_scheduler_type,
        warmup_steps=training.warmup_steps,
        total_steps=pipeline.max_steps * optimizer_steps_per_batch(pipeline),
        supervised_learning_rate=pipeline.warmup.learning_rate if pipeline.warmup else None,
        weight_decay=training.weight_decay,
        beta1=training.adam_beta1,
        beta2=training.adam_beta2,
        max_grad_norm=training.max_grad_norm,
        max_skipped_steps=pipeline.guards.max_skipped_steps,
    )


def _batches(trained: ActorTrain | Critic) -> dict[str, Any]:
    return {"max_tokens": trained.training.max_tokens_per_micro_batch, "packing": trained.training.sequence_packing}


def _variant(algorithm: Algorithm) -> Variant:
    match algorithm.pg_variant:
        case "vanilla":
            return Vanilla()
        case "ppo":
            return Ppo(algorithm.pg_clip_low, algorithm.pg_clip_high, algorithm.dual_clip)
        case "decoupled":
            cap = (algorithm.decoupled or api.Decoupled()).cap
            return Decoupled(algorithm.pg_clip_low, algorithm.pg_clip_high, algorithm.dual_clip, cap)
        case "tis":
            tis = algorithm.tis or api.Tis()
            return Tis(tis.lower_bound, tis.upper_bound)
        case "topr":
            topr = algorithm.topr or api.Topr()
            return Topr(topr.positive_weight, topr.negative_weight)
        case "cispo":
            cispo = algorithm.cispo or api.Cispo()
            return Cispo(cispo.epsilon_low, cispo.epsilon_high, cispo.unified_mask)
        case "kimi15":
            return Kimi15((algorithm.kimi15 or api.Kimi15()).tau)


def _correction(pipeline: Pipeline) -> CorrectionSpec | None:
    correction = pipeline.train_infer_correction
    if correction is None:
        return None
    weight = correction.is_weight
    filters = tuple(FilterSpec(f.level, f.ratio_low, f.ratio_high, f.diff_low, f.diff_high) for f in correction.filters)
    return CorrectionSpec(WeightSpec(weight.level, weight.upper_bound) if weight else None, filters)


def initialize_spec(model: InitializeModel, words: tuple[str, ...], max_length: int) -> InitializeSpec:
    return InitializeSpec(
        words=words,
        architecture=model.architecture,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        layers=model.layers,
        heads=model.heads,
        max_position_embeddings=max_length,
        seed=model.seed,
    )
