"""Log-probs and entropies of chosen tokens, without the logits of all tokens in memory.

The output layer and the softmax run on one chunk of tokens at a time (`chunk_elements` logits), and
run again in the backward pass. Between the two passes only the log of the softmax's denominator and
the entropy of each token are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**27
"""Logits of a chunk: 512 MiB in float32.

About two such tensors exist at a time, three in the backward pass.
"""


def score(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of the targets and entropies of their distributions.

    Both are those of softmax(logits / temperature). Logits are computed in the dtype of hidden
    states and weights, everything after them in at least float32.

    Returns:
        log-probs [N] and entropies [N], in float32 or the wider dtype of the logits.
    """
    logprobs_N, entropies_N = _Score.apply(
        hidden_NH, weight_VH, bias_V, targets_N, temperature, chunk_elements
    )
    return logprobs_N, entropies_N


class _Score(torch.autograd.Function):
    """Log-prob and entropy of a target, with a backward pass that computes the logits again.

    With z = logits / temperature, p = softmax(z), lp = log p of the target and H the entropy:

    d lp / d z_v = [v is the target] - p_v,   d H / d z_v = -p_v (log p_v + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
        chunk_elements: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.chunk = max(1, chunk_elements // len(weight_VH))
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        logprobs_N, entropies_N, normalizers_N = (
            hidden_NH.new_empty(len(hidden_NH), dtype=wide) for _ in range(3)
        )
        for start in range(0, len(hidden_NH), ctx.chunk):
            chunk = slice(start, start + ctx.chunk)
            logits_CV = _scaled_logits(hidden_NH[chunk], weight_VH, bias_V, temperature)
            normalizers_N[chunk] = logits_CV.logsumexp(-1)
            logprobs_CV = logits_CV.sub_(normalizers_N[chunk, None])
            logprobs_N[chunk] = logprobs_CV.gather(-1, targets_N[chunk, None])[:, 0]
            entropies_N[chunk] = -logprobs_CV.exp().mul_(logprobs_CV).sum(-1)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, normalizers_N, entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_logprobs_N: Tensor | None, d_entropies_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, normalizers_N, entropies_N = ctx.saved_tensors
        d_hidden_NH = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        # The sum over chunks is in float32: bfloat16 would lose the small terms.
        d_weight_VH = (
            torch.zeros_like(weight_VH, dtype=normalizers_N.dtype)
            if ctx.needs_input_grad[1]
            else None
        )
        d_bias_V = (
            torch.zeros_like(bias_V, dtype=normalizers_N.dtype)
            if bias_V is not None and ctx.needs_input_grad[2]
            else None
        )
        for start in range(0, len(hidden_NH), ctx.chunk):
            chunk = slice(start, start + ctx.chunk)
            logits_CV = _scaled_logits(hidden_NH[chunk], weight_VH, bias_V, ctx.temperature)
            logprobs_CV = logits_CV.sub_(normalizers_N[chunk, None])
            p_CV = logprobs_CV.exp()
            if d_entropies_N is None:
                d_logits_CV = logprobs_CV.zero_()
            else:
                d_logits_CV = (
                    logprobs_CV.add_(entropies_N[chunk, None])
                    .mul_(p_CV)
                    .mul_(-d_entropies_N[chunk, None])
                )
            if d_logprobs_N is not None:
                d_logits_CV.sub_(p_CV.mul_(d_logprobs_N[chunk, None]))
                d_logits_CV.scatter_add_(-1, targets_N[chunk, None], d_logprobs_N[chunk, None])
            del p_CV
            d_logits_CV = d_logits_CV.div_(ctx.temperature).to(hidden_NH.dtype)
            if d_hidden_NH is not None:
                d_hidden_NH[chunk] = d_logits_CV @ weight_VH
            if d_weight_VH is not None:
                d_weight_VH += d_logits_CV.T @ hidden_NH[chunk]
            if d_bias_V is not None:
                d_bias_V += d_logits_CV.sum(0, dtype=d_bias_V.dtype)
        narrow = [None if d is None else d.to(weight_VH.dtype) for d in (d_weight_VH, d_bias_V)]
        return d_hidden_NH, *narrow, None, None, None


def _scaled_logits(
    hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float
) -> Tensor:
    """Return logits / temperature of a chunk, a new tensor [C, V] in at least float32."""
    logits_CV = torch.nn.functional.linear(hidden_CH, weight_VH, bias_V)
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)).div_(temperature)
