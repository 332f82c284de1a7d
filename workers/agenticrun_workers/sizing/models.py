"""The shapes of a run's models: from their folders, the Hub, a config, or what is published."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agenticrun_api import AgenticRunSpec, Role
from agenticrun_api.spec import InitializeModel
from agenticrun_workers.models.folder import ModelLoadError
from agenticrun_workers.models.shape import ModelShape, read_shape, source_shape
from agenticrun_workers.models.source import ModelSource, ModelSources
from agenticrun_workers.sizing.published import PUBLISHED

WORDS = 2048
"""Vocabulary of a model that the run makes: more than its environments usually declare."""


def run_shapes(spec: AgenticRunSpec, config: Path | None = None) -> dict[Role, ModelShape]:
    """Return the shapes of policy, reference and critic of a run. No weights are read.

    Args:
        spec: the run's.
        config: a config.json to take instead of the policy's own.

    Raises:
        ModelLoadError: a model has no config that can be read here, or no shape.
    """
    sources = ModelSources.of(ModelSource.of(spec.model), spec.pipeline)
    if config is not None:
        policy = _shape(_read(config), str(config), trust=spec.model.trust_remote_code)
    elif spec.model.initialize is not None:
        policy = _shape(
            _initialized(spec.model.initialize), f"model.initialize, with {WORDS:,} words"
        )
    else:
        policy = _shape_of(sources.policy)
    shapes = {Role.TRAINER: policy}
    if spec.pipeline.uses_reference:
        same = sources.reference == sources.policy
        shapes[Role.REFERENCE] = policy if same else _shape_of(sources.reference)
    if spec.pipeline.uses_critic:
        same = sources.critic == sources.policy
        shapes[Role.CRITIC] = policy if same else _shape_of(sources.critic)
    return shapes


def refusal(spec: AgenticRunSpec, config: Path | None = None) -> str:
    """Return why no trainer takes the policy although its shape is known, or an empty text."""
    from agenticrun_workers.models.pretrained import load_config

    name = str(config or spec.model.path)
    described = PUBLISHED.get(name) if config is None else _read(config)
    if described is None:  # `run_shapes` has loaded its config
        return ""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(described))
        try:
            load_config(folder)
        except ModelLoadError as error:
            return str(error).replace(folder, name)
    return ""


def _shape_of(source: ModelSource) -> ModelShape:
    """Return the shape of a folder or a model on the Hub. Published shapes need no network."""
    published = PUBLISHED.get(source.path or "")
    return source_shape(source) if published is None else _shape(published, str(source.path))


def _read(file: Path) -> Mapping[str, Any]:
    try:
        described = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if not isinstance(described, dict) or "model_type" not in described:
        raise ModelLoadError(f"{file} has no model_type: take the config.json of a model")
    return described


def _shape(described: Mapping[str, Any], name: str, *, trust: bool = False) -> ModelShape:
    """Return the shape of the model that a config.json describes."""
    from transformers import AutoConfig

    fields = dict(described)
    kind = str(fields.pop("model_type"))
    try:
        config = AutoConfig.for_model(kind, **fields)
    except Exception as error:  # it may be wrong in any way
        raise ModelLoadError(f"{name} is no config that transformers knows: {error}") from error
    return read_shape(config, name, trust_remote_code=trust)


def _initialized(model: InitializeModel) -> dict[str, Any]:
    """Return the config of a model that the run makes."""
    mixture = (
        {
            "moe_intermediate_size": model.intermediate_size,
            "num_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
        }
        if model.experts
        else {}
    )
    return {
        "model_type": model.architecture,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "head_dim": model.hidden_size // model.heads,
        "vocab_size": WORDS,
        "tie_word_embeddings": True,
        **mixture,
    }
