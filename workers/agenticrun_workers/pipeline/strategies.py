"""Builds trainers, engines and models from the API's words.

Imports torch, so only trainer and inference pods import it.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agenticrun_api import Pipeline
from agenticrun_api.spec import InitializeModel
from agenticrun_workers.inference import InferenceEngine, TransformersEngine
from agenticrun_workers.models import InitializeSpec, initialize_model, load_model, words_of
from agenticrun_workers.pipeline.batch_plan import optimizer_steps_per_batch
from agenticrun_workers.pipeline.model_source import ModelSource
from agenticrun_workers.rollout.env_worker import Texts
from agenticrun_workers.rollout.errors import InvalidConfig
from agenticrun_workers.training import LossSpec, OptimizerSpec, TorchStrategy, TrainStrategy


def build_strategy(pipeline: Pipeline, source: ModelSource) -> TrainStrategy:
    """The trainer of this rank. Raises `ModelLoadError`."""
    training = pipeline.actor_train.training
    return TorchStrategy(
        partial(_load, source),
        optimizer_spec(pipeline),
        max_tokens=training.max_tokens_per_micro_batch,
        temperature=pipeline.actor_infer.generating.temperature,
    )


def build_engine(pipeline: Pipeline, source: ModelSource) -> InferenceEngine:
    """The engine of this inference actor, not started. Needs a running event loop."""
    return TransformersEngine(partial(_load, source), max_length=pipeline.sequence_length)


def _load(source: ModelSource) -> PreTrainedModel:
    with source.folder() as folder:
        return load_model(folder, getattr(torch, source.dtype), trust_remote_code=source.trust_remote_code)


def make_model_files(model: InitializeModel, texts: Texts, max_length: int) -> dict[str, bytes]:
    """The files of a model with random weights, by name. Raises `InvalidConfig` for a shape that cannot be built."""
    words = [*texts.vocabulary, *(word for text in texts.texts for word in words_of(text)), *model.words]
    with tempfile.TemporaryDirectory() as folder:
        try:
            initialize_model(Path(folder), initialize_spec(model, tuple(dict.fromkeys(words)), max_length))
        except ValueError as error:
            raise InvalidConfig("spec.model.initialize", str(error)) from error
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def loss_spec(pipeline: Pipeline) -> LossSpec:
    algorithm = pipeline.algorithm
    return LossSpec(
        clip_low=algorithm.pg_clip_low,
        clip_high=algorithm.pg_clip_high,
        dual_clip=algorithm.dual_clip,
        aggregation=algorithm.loss_agg_mode,
        aggregation_norm=algorithm.loss_agg_norm or 1.0,
        entropy_coef=algorithm.entropy_loss_coef,
        temperature=pipeline.actor_infer.generating.temperature,
    )


def optimizer_spec(pipeline: Pipeline) -> OptimizerSpec:
    training = pipeline.actor_train.training
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
    )


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
