"""Properties of a Hugging Face model that Megatron needs: Llama, Qwen2 and Qwen3, dense."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from agenticrun_workers.models.heads import UnsupportedModel
from agenticrun_workers.trainer.megatron.options import UNEVEN, MegatronOptions

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rope types with frequencies that do not depend on the text's length."""


@dataclass(frozen=True, eq=False)
class Architecture:
    """Shape of a dense decoder; sizes are counted in elements."""

    model_type: str
    vocabulary: int
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    groups: int
    """Number of key-value heads."""
    head_size: int
    norm_epsilon: float
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    """True if the output layer is the embedding."""
    max_positions: int
    padding_token: int | None
    """Token with a row of the embedding that gets no gradient from the input."""
    inverse_frequencies: Tensor
    """Inverse frequencies of the rotary embedding, [head_size / 2], float32."""
    attention_scaling: float
    """Factor of the rotary embedding's cosine and sine (YaRN)."""

    @staticmethod
    def of(config: PretrainedConfig) -> Architecture:
        """Read the config of a Hugging Face model.

        Raises:
            UnsupportedModel: Megatron would compute something else.
        """
        kind = config.model_type
        if kind not in ("llama", "qwen2", "qwen3"):
            raise UnsupportedModel(
                f"the strategy megatron trains dense llama, qwen2 and qwen3 models, not {kind} "
                "(mixture-of-experts and vision-language models are not offered yet): choose "
                "the strategy fsdp2"
            )
        # qwen2 always has biases for queries, keys and values; the flag of the others adds one to
        # the output projection too.
        if kind != "qwen2" and config.attention_bias:
            raise UnsupportedModel(
                "attention_bias is not offered by the strategy megatron: choose the strategy fsdp2"
            )
        if getattr(config, "mlp_bias", False):
            raise UnsupportedModel(
                "mlp_bias is not offered by the strategy megatron: choose the strategy fsdp2"
            )
        if config.hidden_act != "silu":
            raise UnsupportedModel(
                f"hidden_act {config.hidden_act} is not offered by the strategy megatron: "
                "choose the strategy fsdp2"
            )
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise UnsupportedModel(
                "sliding-window attention is not offered by the strategy megatron: choose the "
                "strategy fsdp2"
            )
        rope = config.rope_parameters["rope_type"]
        if (
            rope not in ROPE_TYPES
            or config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0
        ):
            raise UnsupportedModel(
                f"the strategy megatron offers the rope types {', '.join(ROPE_TYPES)} over "
                f"whole heads, not {rope}"
            )
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(
                config
            )  # transformers' own frequencies, so that trainer and engine agree
        return Architecture(
            model_type=kind,
            vocabulary=config.vocab_size,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            feed_forward=config.intermediate_size,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            norm_epsilon=config.rms_norm_eps,
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
            tied=bool(config.tie_word_embeddings),
            max_positions=config.max_position_embeddings,
            padding_token=None
            if config.pad_token_id is None
            else config.pad_token_id % config.vocab_size,
            inverse_frequencies=rotary.inv_freq.float().cpu(),
            attention_scaling=float(rotary.attention_scaling),
        )

    def check_divisible(self, options: MegatronOptions) -> None:
        """Check that the model can be divided into these parallel sizes.

        Raises:
            ValueError: a size does not divide the model.
        """
        for what, number in (
            ("attention heads", self.heads),
            ("key-value heads", self.groups),
            ("feed-forward units", self.feed_forward),
        ):
            if number % options.tensor:
                raise ValueError(
                    f"strategy.config.tensor_model_parallel_size {options.tensor} must divide "
                    f"the model's {number} {what}"
                )
        ends = [options.transformer[name] for name in UNEVEN if name in options.transformer]
        layers, stages = self.layers - sum(ends), options.pipeline - len(ends)
        if layers < stages or stages < 0 or (layers % stages if stages else layers):
            raise ValueError(
                f"strategy.config.pipeline_model_parallel_size {options.pipeline} must divide "
                f"the model's {self.layers} layers; "
                f"{' and '.join(UNEVEN)} say how many the ends have else"
            )


def padded_vocabulary(model: Architecture, tensor_size: int) -> int:
    """Return the rows of Megatron's embedding over all ranks: the same number on each."""
    return -(-model.vocabulary // tensor_size) * tensor_size


def vocabulary_rows(model: Architecture, tensor_rank: int, tensor_size: int) -> tuple[int, int]:
    """Return a rank's first token id and its number of tokens; its other rows are padding."""
    rows = padded_vocabulary(model, tensor_size) // tensor_size
    first = min(tensor_rank * rows, model.vocabulary)
    return first, min(rows, model.vocabulary - first)
