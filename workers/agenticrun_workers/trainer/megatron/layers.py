"""The modules that Megatron's transformer layer is built of, beside Megatron's own parallel linear layers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (arXiv 1910.07467), rounded where transformers rounds."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron then sums its gradient
        self._epsilon = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.float32)
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        return self.weight * normal.to(hidden.dtype)


class CoreAttention(nn.Module):
    """Causal attention by torch's own kernels. Under context parallelism each rank has its part of the queries and gathers all keys.

    `attention_scaling` of the model (YaRN's factor on both queries and keys) is in the scale of the scores.
    """

    def __init__(
        self,
        config: TransformerConfig,
        attention_scaling: float,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__()
        self._context = pg_collection.cp
        self._scale = attention_scaling**2 * config.kv_channels**-0.5

    def forward(
        self,
        query_TBHD: Tensor,
        key_TBGD: Tensor,
        value_TBGD: Tensor,
        attention_mask: Tensor | None,
        **_: Any,
    ) -> Tensor:
        """[T, B, H * D]. `attention_mask`: True where a query may look, [B, 1, T, all T]; None: causal."""
        if self._context.size() > 1:
            key_TBGD, value_TBGD = (
                gather_from_sequence_parallel_region(
                    tensor.contiguous(), tensor_parallel_output_grad=True, group=self._context
                )
                for tensor in (key_TBGD, value_TBGD)
            )
        out_BHTD = functional.scaled_dot_product_attention(
            query_TBHD.permute(1, 2, 0, 3),
            key_TBGD.permute(1, 2, 0, 3),
            value_TBGD.permute(1, 2, 0, 3),
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            scale=self._scale,
            enable_gqa=query_TBHD.shape[2] != key_TBGD.shape[2],
        )
        return out_BHTD.permute(2, 0, 1, 3).reshape(*query_TBHD.shape[:2], -1)


def block_spec(config: TransformerConfig, attention_scaling: float) -> TransformerBlockSubmodules:
    """The decoder of this pipeline stage."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = ModuleSpec(
        CoreAttention, params={"attention_scaling": attention_scaling}
    )
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    parts.self_attn_bda = parts.mlp_bda = get_bias_dropout_add
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config), RMSNorm)
