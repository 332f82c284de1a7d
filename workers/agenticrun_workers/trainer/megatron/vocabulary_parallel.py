"""Log-probs and entropies with a vocabulary that is divided over tensor-parallel ranks.

The whole logits never exist in memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

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
