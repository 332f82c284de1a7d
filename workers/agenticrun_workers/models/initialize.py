"""Make tiny causal language models: random weights and a task tokenizer."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from agenticrun_api.spec import InitializeModel
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.models.pretrained import MAKING, write_model
from agenticrun_workers.models.source import TokenizerCorpus
from agenticrun_workers.models.stored_names import stored_weights
from agenticrun_workers.models.tokenizer import build_task_tokenizer, words_of

_CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}
"""Not qwen2: transformers' AutoTokenizer replaces any tokenizer in a qwen2 folder by its own."""


@dataclass(frozen=True, slots=True)
class InitializeSpec:
    """The shape of a model. Sizes are counted in elements; `heads` must divide `hidden_size`."""

    words: tuple[str, ...]
    """The words that the tokenizer knows (`HasVocabulary.vocabulary`, `words_of`)."""
    architecture: str = "llama"
    hidden_size: int = 128
    intermediate_size: int = 256
    experts: int = 0
    """Experts of each layer of qwen3_moe, which share nothing and have the intermediate size."""
    experts_per_token: int = 0
    layers: int = 2
    heads: int = 4
    key_value_heads: int | None = None
    """None: as many as `heads`."""
    attention_bias: bool = False
    max_position_embeddings: int = 1024
    tie_word_embeddings: bool = True
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    seed: int = 0


def initialize_model(folder: Path, spec: InitializeSpec) -> None:
    """Write config, weights (float32 safetensors), tokenizer and chat template into `folder`.

    The same spec gives the same weights.

    Raises:
        ValueError: no model can have this shape.
    """
    if spec.architecture not in _CONFIGS:
        raise ValueError(
            f"architecture must be one of {', '.join(_CONFIGS)}, not {spec.architecture!r}"
        )
    key_value_heads = spec.key_value_heads or spec.heads
    if spec.hidden_size % (2 * spec.heads) or spec.heads % key_value_heads:
        raise ValueError(
            f"heads ({spec.heads}) must divide hiddenSize ({spec.hidden_size}) into an even size "
            f"and be a multiple of keyValueHeads ({key_value_heads})"
        )
    mixture = (
        {
            "moe_intermediate_size": spec.intermediate_size,
            "num_experts": spec.experts,
            "num_experts_per_tok": spec.experts_per_token,
            "norm_topk_prob": True,
        }
        if spec.experts
        else {}
    )
    tokenizer = build_task_tokenizer(spec.words, spec.max_position_embeddings)
    config = _CONFIGS[spec.architecture](
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=key_value_heads,
        head_dim=spec.hidden_size // spec.heads,
        attention_bias=spec.attention_bias,
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=spec.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        initializer_range=spec.initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **mixture,
    )
    with MAKING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = stored_weights(model, model.named_parameters())
    write_model(folder, model, {name: weight.clone() for name, weight in weights})
    tokenizer.save_pretrained(folder)


def make_model_files(
    model: InitializeModel, corpus: TokenizerCorpus, max_length: int
) -> dict[str, bytes]:
    """Make the model that `spec.model.initialize` describes.

    Returns:
        Its files by name.

    Raises:
        InvalidConfig: no model can have this shape.
    """
    words = [
        *corpus.vocabulary,
        *(word for text in corpus.texts for word in words_of(text)),
        *model.words,
    ]
    spec = InitializeSpec(
        words=tuple(dict.fromkeys(words)),
        architecture=model.architecture,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        experts=model.experts or 0,
        experts_per_token=model.experts_per_token or 0,
        layers=model.layers,
        heads=model.heads,
        max_position_embeddings=max_length,
        seed=model.seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            initialize_model(Path(folder), spec)
        except ValueError as error:
            raise InvalidConfig("spec.model.initialize", str(error)) from error
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}
