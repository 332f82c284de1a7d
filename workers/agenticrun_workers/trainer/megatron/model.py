"""The trained network on one rank: its pipeline stage.

The stages together turn a micro-batch into one log-prob per selected token. The vocabulary is
divided over tensor-parallel ranks, and the whole logits never exist in memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from agenticrun_workers.trainer.megatron.architecture import (
    Architecture,
    padded_vocabulary,
    vocabulary_rows,
)
from agenticrun_workers.trainer.megatron.options import MegatronOptions
from agenticrun_workers.trainer.megatron.parallel import Place
from agenticrun_workers.trainer.micro_batch import MicroBatch


def transformer_config(
    model: Architecture, options: MegatronOptions, dtype: torch.dtype
) -> TransformerConfig:
    """Return Megatron's configuration of the network.

    Raises:
        ValueError: Megatron rejects the combination of options.
    """
    try:
        return TransformerConfig(
            tensor_model_parallel_size=options.tensor,
            pipeline_model_parallel_size=options.pipeline,
            context_parallel_size=options.context,
            num_layers=model.layers,
            hidden_size=model.hidden,
            ffn_hidden_size=model.feed_forward,
            num_attention_heads=model.heads,
            num_query_groups=model.groups,
            kv_channels=model.head_size,
            layernorm_epsilon=model.norm_epsilon,
            normalization="RMSNorm",
            add_bias_linear=False,
            add_qkv_bias=model.qkv_bias,
            qk_layernorm=model.qk_norm,
            gated_linear_unit=True,
            activation_func=functional.silu,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            perform_initialization=False,
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",  # no experts, but Megatron checks it
            calculate_per_token_loss=True,
            batch_p2p_sync=False,
            **options.transformer,
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"strategy.config: {error}") from error


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
    """Causal attention with torch's own kernels.

    Under context parallelism each rank has its part of the queries and gathers all keys. The scale
    of the scores includes the model's `attention_scaling` (YaRN's factor on both queries and keys).
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
        """Return the attention's output, [T, B, H * D].

        Args:
            query_TBHD: of this context-parallel rank's tokens.
            key_TBGD: of the same tokens.
            value_TBGD: of the same tokens.
            attention_mask: True where a query may attend, [B, 1, T, all T]; None: causal.
        """
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
    """Return the specification of this pipeline stage's decoder."""
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


class MegatronModel(GPTModel):  # type: ignore[misc]  # Megatron has no types
    """One stage of the pipeline.

    The decoder is Megatron's; positions, attention and scores are implemented here.
    """

    def __init__(self, config: TransformerConfig, model: Architecture, place: Place) -> None:
        super().__init__(
            config,
            block_spec(config, model.attention_scaling),
            vocab_size=padded_vocabulary(model, place.tensor_size),
            max_sequence_length=model.max_positions,
            position_embedding_type="none",
            pre_process=place.first_stage,
            post_process=place.last_stage,
            share_embeddings_and_output_weights=model.tied,
            pg_collection=place.groups,
        )
        self._place = place
        self._first_token, self._tokens = vocabulary_rows(
            model, place.tensor_rank, place.tensor_size
        )
        self._padding_token = model.padding_token
        self._frequencies = model.inverse_frequencies.to(torch.cuda.current_device())

    def forward(self, batch: MicroBatch, temperature: float) -> Tensor:
        """Run the stage on a micro-batch.

        Args:
            batch: rows with a length that is a multiple of `row_multiple` of the options
                (`even_rows`).
            temperature: log-probs and entropies are those of logits / temperature.

        Returns:
            on the last stage log-probs and entropies of the selected tokens, [2, N]; on another
            stage hidden states, [T, B, H].
        """
        here = self._columns(batch.ids_BT.shape[1])
        positions_BT = batch.position_ids_BT
        if positions_BT is None:
            positions_BT = torch.arange(batch.ids_BT.shape[1], device=batch.ids_BT.device)[None]
        angles_BTD = positions_BT[:, here, None].float() * self._frequencies
        rotary_TB1D = torch.cat((angles_BTD, angles_BTD), -1).transpose(0, 1)[:, :, None]
        hidden_TBH: Tensor = self.decoder(
            hidden_states=self._embed(batch.ids_BT[:, here]) if self.pre_process else None,
            attention_mask=self._mask(batch, here),
            rotary_pos_emb=rotary_TB1D,
        )
        return (
            self._score(hidden_TBH, batch, here, temperature) if self.post_process else hidden_TBH
        )

    def _embed(self, ids_BT: Tensor) -> Tensor:
        """Return embeddings [T, B, H]; under sequence parallelism this rank's part of T."""
        embedded_TBH: Tensor = self.embedding(input_ids=ids_BT, position_ids=None)
        if self._padding_token is None:
            return embedded_TBH
        padding_TB = torch.eq(ids_BT.T, self._padding_token)
        if self.config.sequence_parallel:
            padding_TB = padding_TB.chunk(self._place.tensor_size)[self._place.tensor_rank]
        return torch.where(
            padding_TB[..., None], embedded_TBH.detach(), embedded_TBH
        ).contiguous()  # stages send it so

    def _columns(self, length: int) -> slice:
        """Return the tokens of each row that this context-parallel rank computes."""
        part = length // self._place.context_size
        return slice(self._place.context_rank * part, (self._place.context_rank + 1) * part)

    def _mask(self, batch: MicroBatch, here: slice) -> Tensor | None:
        """Return the mask of attention, [B, 1, T here, T]; None: causal."""
        if batch.position_ids_BT is None and self._place.context_size == 1:
            return None
        columns_T = torch.arange(batch.ids_BT.shape[1], device=batch.ids_BT.device)
        mask_BTT = (columns_T[here, None] >= columns_T)[None]
        if batch.position_ids_BT is not None:
            sequences_BT = (batch.position_ids_BT == 0).cumsum(-1)
            mask_BTT = mask_BTT & (sequences_BT[:, here, None] == sequences_BT[:, None])
        return mask_BTT[:, None]

    def _score(
        self, hidden_TBH: Tensor, batch: MicroBatch, here: slice, temperature: float
    ) -> Tensor:
        groups = self._place.groups
        if self.config.sequence_parallel:
            hidden_TBH = gather_from_sequence_parallel_region(
                hidden_TBH, tensor_parallel_output_grad=True, group=groups.tp
            )
        else:
            hidden_TBH = copy_to_tensor_model_parallel_region(hidden_TBH, group=groups.tp)
        mine_N = (batch.columns_N >= here.start) & (batch.columns_N < here.stop)
        hidden_NH = hidden_TBH[batch.columns_N[mine_N] - here.start, batch.rows_N[mine_N]]
        weight_VH = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )[: self._tokens]
        scores_2N = torch.stack(
            score(
                hidden_NH,
                weight_VH,
                batch.targets_N[mine_N],
                self._first_token,
                temperature,
                groups.tp,
            )
        )
        if self._place.context_size == 1:
            return scores_2N
        whole_2N = scores_2N.new_zeros(2, len(mine_N)).index_copy(
            1, mine_N.nonzero()[:, 0], scores_2N
        )
        # Each context-parallel rank computes the whole loss from all scores; its backward pass
        # takes the gradient of its own scores.
        combined: Tensor = reduce_from_tensor_model_parallel_region(whole_2N, group=groups.cp)
        return combined


def even_rows(batch: MicroBatch, multiple: int) -> MicroBatch:
    """Pad rows to a multiple of a length, so that parallel ranks get equal parts of each."""
    length = batch.ids_BT.shape[1]
    extra = -length % multiple
    if not extra:
        return batch
    changes: dict[str, Any] = {"ids_BT": functional.pad(batch.ids_BT, (0, extra))}
    if batch.position_ids_BT is not None:  # each padding token is a sequence of its own
        changes["position_ids_BT"] = functional.pad(batch.position_ids_BT, (0, extra))
    return replace(batch, **changes)


CHUNK_ELEMENTS = 2**26
"""Logits of a chunk on one rank: 256 MiB in float32."""


def score(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    first: int,
    temperature: float,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of the targets and entropies of their distributions.

    Computed chunk by chunk over the tokens; the backward pass computes the logits again.

    Args:
        hidden_NH: the same on every rank. Its gradient is this rank's part of a sum over the group.
        weight_VH: this rank's rows of the output layer, without padding.
        targets_N: token ids of the whole vocabulary.
        first: token id of this rank's first row.
        temperature: both results are those of logits / temperature.
        group: the tensor-parallel ranks.

    Returns:
        log-probs [N] and entropies [N], in float32 or the model's wider dtype.
    """
    tokens = max(1, CHUNK_ELEMENTS // max(1, len(weight_VH)))
    parts = []
    for chunk_CH, chunk_C in zip(
        torch.split(hidden_NH, tokens), torch.split(targets_N, tokens), strict=True
    ):
        arguments = (chunk_CH, weight_VH, chunk_C, first, temperature, group)
        if torch.is_grad_enabled() and len(hidden_NH) > tokens:
            parts.append(
                checkpoint(_score_chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
            )
        else:
            parts.append(_score_chunk(*arguments))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _score_chunk(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    targets_C: Tensor,
    first: int,
    temperature: float,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    logits_CV = functional.linear(hidden_CH, weight_VH)
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    result: tuple[Tensor, Tensor] = _ScoreLogits.apply(
        logits_CV.to(wide) / temperature, targets_C, first, group
    )
    return result


class _ScoreLogits(torch.autograd.Function):
    """Log-prob and entropy of a target.

    With l the logits and p their softmax over all ranks: log p[target] and H = -sum(p log p).

    d log p[t] / d l_v = [v = t] - p_v; d H / d l_v = -p_v (log p_v + H).
    """

    @staticmethod
    def forward(
        ctx: Any, logits_CV: Tensor, targets_C: Tensor, first: int, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        rows, width = logits_CV.shape
        peak_C = logits_CV.amax(-1) if width else logits_CV.new_full((rows,), -torch.inf)
        dist.all_reduce(peak_C, dist.ReduceOp.MAX, group)
        shifted_CV = logits_CV - peak_C[:, None]
        local_C = targets_C - first
        mine_C = (local_C >= 0) & (local_C < width)
        local_C = torch.where(mine_C, local_C, 0)
        target_C = (
            shifted_CV.gather(-1, local_C[:, None])[:, 0] if width else torch.zeros_like(peak_C)
        )
        weights_CV = shifted_CV.exp()
        sums_3C = torch.stack(
            [
                weights_CV.sum(-1),
                (weights_CV * shifted_CV).sum(-1),
                torch.where(mine_C, target_C, 0),
            ]
        )
        dist.all_reduce(sums_3C, group=group)
        log_sum_C = sums_3C[0].log()
        entropies_C = log_sum_C - sums_3C[1] / sums_3C[0]
        ctx.save_for_backward(shifted_CV.sub_(log_sum_C[:, None]), entropies_C, local_C, mine_C)
        return sums_3C[2] - log_sum_C, entropies_C

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logprob_gradient_C, entropy_gradient_C = gradients
        logprobs_CV, entropies_C, local_C, mine_C = ctx.saved_tensors
        gradient_CV = -logprobs_CV.exp() * (
            logprob_gradient_C[:, None]
            + entropy_gradient_C[:, None] * (logprobs_CV + entropies_C[:, None])
        )
        if gradient_CV.shape[1]:
            gradient_CV.scatter_add_(
                -1, local_C[:, None], torch.where(mine_C, logprob_gradient_C, 0)[:, None]
            )
        return gradient_CV, None, None, None
