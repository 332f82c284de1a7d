"""Coefficients that turn a sum over tokens into the configured mean.

Every mean is written as `sum(coefficient_t * loss_t)`, with denominators counted over the whole
optimizer step. Splitting the tokens into micro-batches, packs or ranks therefore never changes the
gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Denominators of one optimizer step, over all ranks and micro-batches.

    Both are 0 if there is nothing to learn from.
    """

    weight: float
    """Sum of the token weights."""
    sequences: float
    """Number of sequences with at least one token of weight above 0."""


def token_coefficients(
    weight_N: Tensor,
    sequence_N: Tensor,
    totals: StepTotals,
    aggregation: Aggregation,
    norm: float = 1.0,
) -> Tensor:
    """Return the coefficient of each token's loss, [N]; 0 where its weight is 0.

    With w the weights, W their sum and S the number of sequences of the step:

        token-mean               w / W
        seq-mean-token-sum       w / S
        seq-mean-token-mean      w / (sum of w in the sequence * S)
        seq-mean-token-sum-norm  w / (S * norm)    (Dr. GRPO, arXiv 2503.20783)

    Args:
        weight_N: loss mask (or weights) of the tokens given.
        sequence_N: number of each token's sequence, int64. All tokens of a sequence must be given.
        totals: counted over ALL tokens of the optimizer step.
        aggregation: one of the means above.
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
            sums_S = weight_N.new_zeros(
                int(sequence_N.max()) + 1 if len(sequence_N) else 0
            ).index_add(0, sequence_N, weight_N)
            return weight_N / (
                sums_S[sequence_N].clamp(min=torch.finfo(weight_N.dtype).tiny) * totals.sequences
            )
