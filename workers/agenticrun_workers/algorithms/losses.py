"""Actor losses per token, and the coefficients that turn a sum over tokens into the configured mean.

Every mean is written as `sum(coefficient_t * loss_t)`, with denominators counted over the whole optimizer step. Splitting the
tokens into micro-batches, packs or ranks therefore never changes the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlKind = Literal["k2", "k3"]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Per-token values, each [N]."""

    loss_N: Tensor
    ratio_N: Tensor
    clipped_N: Tensor
    """True where the clip (or the dual clip) holds the gradient at zero."""


def ppo_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprob - old) (Schulman et al. 2017, arXiv 1707.06347).

    With `dual_clip` = c > 1 the loss of negative advantages is at most -c A (Ye et al. 2020, arXiv 1912.09729).
    """
    ratio_N = (logprobs_N - old_logprobs_N).exp()
    plain_N = -ratio_N * advantages_N
    bounded_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    loss_N = torch.maximum(plain_N, bounded_N)
    clipped_N = bounded_N > plain_N
    if dual_clip is not None:
        ceiling_N = -dual_clip * advantages_N
        beyond_N = (advantages_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(beyond_N, ceiling_N, loss_N)
        clipped_N = clipped_N | beyond_N
    return PolicyLoss(loss_N, ratio_N.detach(), clipped_N.detach())


def kl_loss(logprobs_N: Tensor, ref_logprobs_N: Tensor, kind: KlKind) -> Tensor:
    """Estimate of KL(policy || reference) per token, [N] (Schulman 2020, "Approximating KL divergence").

    d = ref - logprob. k2: d^2 / 2. k3: exp(d) - d - 1. Gradients flow through `logprobs_N` only.
    """
    difference_N = ref_logprobs_N.detach() - logprobs_N
    match kind:
        case "k2":
            return difference_N.square() / 2
        case "k3":
            return difference_N.exp() - difference_N - 1


def token_coefficients(weight_N: Tensor, sequence_N: Tensor, totals: StepTotals, aggregation: Aggregation, norm: float = 1.0) -> Tensor:
    """Coefficient of each token's loss, [N]; 0 where its weight is 0.

    Args:
        weight_N: loss mask (or weights) of the tokens at hand.
        sequence_N: number of the sequence that each token belongs to, int64. A sequence's tokens must all be at hand.
        totals: counted over ALL tokens of the optimizer step.
        norm: the constant C of seq-mean-token-sum-norm.
    """
    match aggregation:
        case "token-mean":
            return weight_N / totals.weight
        case "seq-mean-token-sum":
            return weight_N / totals.sequences
        case "seq-mean-token-sum-norm":
            return weight_N / (totals.sequences * norm)
        case "seq-mean-token-mean":
            sums_S = weight_N.new_zeros(int(sequence_N.max()) + 1 if len(sequence_N) else 0).index_add(0, sequence_N, weight_N)
            return weight_N / (sums_S[sequence_N].clamp(min=torch.finfo(weight_N.dtype).tiny) * totals.sequences)


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Denominators of one optimizer step, over all ranks and micro-batches; never 0."""

    weight: float
    """Sum of the token weights."""
    sequences: float
    """Sequences with at least one token of weight above 0."""
