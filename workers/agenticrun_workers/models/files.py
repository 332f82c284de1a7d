"""Models from their source: loaded, or made with random weights. Imports torch."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agenticrun_api.spec import InitializeModel
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.models import InitializeSpec, initialize_model, load_model, words_of
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.rollout.env_worker import Texts


def load(source: ModelSource, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model in this dtype (default: the source's). Raises `ModelLoadError`."""
    with source.folder() as folder:
        return load_model(
            folder,
            dtype or getattr(torch, source.dtype),
            attn_implementation=source.attn_implementation,
            trust_remote_code=source.trust_remote_code,
        )


def make_model_files(model: InitializeModel, texts: Texts, max_length: int) -> dict[str, bytes]:
    """The files of a model with random weights, by name. Raises `InvalidConfig` for a shape that cannot be built."""
    words = [
        *texts.vocabulary,
        *(word for text in texts.texts for word in words_of(text)),
        *model.words,
    ]
    with tempfile.TemporaryDirectory() as folder:
        try:
            initialize_model(
                Path(folder), initialize_spec(model, tuple(dict.fromkeys(words)), max_length)
            )
        except ValueError as error:
            raise InvalidConfig("spec.model.initialize", str(error)) from error
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def initialize_spec(
    model: InitializeModel, words: tuple[str, ...], max_length: int
) -> InitializeSpec:
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
