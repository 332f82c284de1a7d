"""Shapes of published models, for plans without a network and for docs/sizing.md.

Each entry is what the model's config.json says about sizes; it holds no weights and no text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    }


PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": _qwen3(4096, 12_288, 36, 32, 8),
    "Qwen/Qwen3-32B": _qwen3(5120, 25_600, 64, 64, 8),
    "Qwen/Qwen3-30B-A3B": {
        **_qwen3(2048, 6144, 48, 32, 4),
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
    },
}


def published_config(name: str, **more: Any) -> PretrainedConfig:
    """Return the config of a published model, with more fields."""
    from transformers import AutoConfig  # not at the top: the driver imports this package

    fields = {**PUBLISHED[name], **more}
    config: PretrainedConfig = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return config
