"""Differentiable losses per token: the actor's variants, the KL to the reference, the critic's.

Notation: lp = log-prob under the current policy, old = under
the policy at the batch's start, A = advantage, sg = detached, rho = exp(lp - old) at the configured
ratio level. Callers pass only tokens of weight above 0, so a mean over a turn or a sequence also
excludes filtered tokens.

Every mean is written as `sum(coefficient_t * loss_t)`, with denominators counted over the whole
optimizer step (`token_coefficients`). Splitting the tokens into micro-batches, packs or ranks
therefore never changes the gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

KlKind = Literal["k2", "k3"]
RatioLevel = Literal["token", "segment", "sequence"]
Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


@dataclass(frozen=True, slots=True)
class LossTokens:
    """Inputs of the loss for N tokens, ordered by sequence and position.

    Sequences are whole, except for tokens of weight 0.
    """

    logprobs_N: Tensor
    """The only array with a gradient."""
    old_logprobs_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor
    """int64, number of the sequence; tokens of one sequence are adjacent."""
    turn_N: Tensor
    """int64, number of the turn inside the sequence."""
    score_N: Tensor
    """Score of the token's trajectory; only its sign is read (TOPR)."""
    engine_logprobs_N: Tensor | None = None
    """Log-probs under the policies that sampled; `Decoupled` needs them."""
    is_weights_N: Tensor | None = None
    """Factor of each token's loss (train-inference correction)."""


@dataclass(frozen=True, slots=True)
class Variant(ABC):
    """A loss of the actor: its numbers, and its formula per token."""

    reads_ratio: ClassVar[bool] = True
    """False: the loss has no ratio that could be of another level than token."""

    @abstractmethod
    def losses(self, tokens: LossTokens, ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each token, and True where a clip or a clamp has an effect, each [N].

        Args:
            tokens: of a micro-batch.
            ratio_N: `importance_ratio` at the configured level, with gradient.
        """


@dataclass(frozen=True, slots=True)
class Vanilla(Variant):
    """REINFORCE: -A lp (Williams 1992). Ratios are not read."""

    reads_ratio: ClassVar[bool] = False

    @override
    def losses(self, tokens: LossTokens, ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        return -tokens.advantages_N * tokens.logprobs_N, _nowhere(ratio_N)


@dataclass(frozen=True, slots=True)
class Ppo(Variant):
    """-min(rho A, clip(rho, 1 - low, 1 + high) A) (Schulman et al. 2017, arXiv 1707.06347).

    At ratio level sequence it is GSPO (arXiv 2507.18071).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """c > 1: the loss of a negative advantage is at most -c A.

    Source: Ye et al. 2020, arXiv 1912.09729.
    """

    @override
    def losses(self, tokens: LossTokens, ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        a_N = tokens.advantages_N
        plain_N = -ratio_N * a_N
        bounded_N = -ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high) * a_N
        # The larger loss is the pessimistic bound of PPO.
        loss_N, clipped_N = torch.maximum(plain_N, bounded_N), bounded_N > plain_N
        if self.dual_clip is None:
            return loss_N, clipped_N
        ceiling_N = -self.dual_clip * a_N
        # Only for A < 0: there, PPO's own bound lets the loss grow with the ratio without limit.
        beyond_N = (a_N < 0) & (loss_N > ceiling_N)
        return torch.where(beyond_N, ceiling_N, loss_N), clipped_N | beyond_N


@dataclass(frozen=True, slots=True)
class Decoupled(Ppo):
    """sg(w) * PPO's loss, w = min(exp(old - engine), cap).

    Source: AReaL, Fu et al. 2025, arXiv 2505.24298. The clip is around the policy at the batch's
    start; the weight corrects for the mixture of policies that sampled.
    """

    cap: float = 2.0

    @override
    def losses(self, tokens: LossTokens, ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        loss_N, clipped_N = Ppo.losses(self, tokens, ratio_N)
        if tokens.engine_logprobs_N is None or tokens.is_weights_N is not None:
            raise ValueError(
                "decoupled PPO needs the engine's log-probs, "
                "and excludes importance weights, which are the same ratio"
            )
        weight_N = (tokens.old_logprobs_N - tokens.engine_logprobs_N).exp().clamp(max=self.cap)
        return weight_N.detach() * loss_N, clipped_N


@dataclass(frozen=True, slots=True)
class Tis(Variant):
    """-sg(clamp(rho, low, high)) A lp: truncated importance sampling (Ionides 2008)."""

    lower_bound: float = 0.0
    upper_bound: float = 1.0

    @override
    def losses(self, tokens: LossTokens, ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        # The weight is a constant: its gradient would be that of another objective.
        fixed_N = ratio_N.detach()
        weight_N = fixed_N.clamp(self.lower_bound, self.upper_bound)
        return -weight_N * tokens.advantages_N * tokens.logprobs_N, weight_N != fixed_N


@dataclass(frozen=True, slots=True)
class Topr(Variant):
    """Tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv 2503.14286).

    The formula depends on the sign of the trajectory's score. Positive: -w_pos A lp. Zero or
    negative: -w_neg sg(clamp(rho, 0, 1)) A lp.
    """

    positive_weight: float = 1.0
    negative_weight: float = 1.0

    @override
    def losses(self, tokens: LossTokens, ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        fixed_N = ratio_N.detach()
        tapered_N, good_N = fixed_N.clamp(0, 1), tokens.score_N > 0
        weight_N = torch.where(good_N, self.positive_weight, self.negative_weight * tapered_N)
        loss_N = -weight_N * tokens.advantages_N * tokens.logprobs_N
        return loss_N, ~good_N & (tapered_N != fixed_N)


@dataclass(frozen=True, slots=True)
class Cispo(Variant):
    """-sg(clamp(rho, 1 - low, 1 + high)) A lp (MiniMax-M1, arXiv 2506.13585).

    Every token keeps its gradient.
    """

    epsilon_low: float = 0.1
    epsilon_high: float = 0.1
    unified_mask: bool = False
    """Zero the loss of tokens that PPO's clip would hold.

    These have A > 0 and rho > 1 + high, or A < 0 and rho < 1 - low.
    """

    @override
    def losses(self, tokens: LossTokens, ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        fixed_N, a_N = ratio_N.detach(), tokens.advantages_N
        weight_N = fixed_N.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        clipped_N = weight_N != fixed_N
        if self.unified_mask:
            # Where PPO's clip would have zero gradient.
            held_N = torch.where(fixed_N > weight_N, a_N > 0, a_N < 0) & clipped_N
            weight_N = weight_N * ~held_N
        return -weight_N * a_N * tokens.logprobs_N, clipped_N


@dataclass(frozen=True, slots=True)
class Kimi15(Variant):
    """-A lp + tau/2 (lp - old)^2 (Kimi k1.5, arXiv 2501.12599), per token: no ratio level."""

    reads_ratio: ClassVar[bool] = False

    tau: float = 0.1

    @override
    def losses(self, tokens: LossTokens, ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        lp_N = tokens.logprobs_N
        distance_N = (lp_N - tokens.old_logprobs_N).square()
        return -tokens.advantages_N * lp_N + self.tau / 2 * distance_N, _nowhere(ratio_N)


@dataclass(frozen=True, slots=True)
class OwnLoss(Variant):
    """A function of the user's: `function(tokens, ratio_N)` returns the loss of each token, [N].

    It may also return `(loss_N, clipped_N)`, so that `actor/clipfrac` counts what it clips.
    """

    name: str
    function: Callable[[LossTokens, Tensor], Tensor | tuple[Tensor, Tensor]]

    @override
    def losses(self, tokens: LossTokens, ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        found = self.function(tokens, ratio_N)
        loss_N, clipped_N = found if isinstance(found, tuple) else (found, _nowhere(ratio_N))
        for value, what in ((loss_N, "loss"), (clipped_N, "clip")):
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if shape != tuple(ratio_N.shape):
                raise ValueError(
                    f"{self.name} returned a {what} of shape {shape} for {len(ratio_N)} tokens: "
                    f"return a tensor with one value per token, {list(ratio_N.shape)}; "
                    "lossAggMode takes the mean"
                )
        return loss_N, clipped_N


VARIANTS: Mapping[str, type[Variant]] = {
    "vanilla": Vanilla,
    "ppo": Ppo,
    "decoupled": Decoupled,
    "tis": Tis,
    "topr": Topr,
    "cispo": Cispo,
    "kimi15": Kimi15,
}
"""By the name in `algorithm.pgVariant`. Fields have the names and defaults of the API's."""


def _nowhere(ratio_N: Tensor) -> Tensor:
    return torch.zeros_like(ratio_N, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Per-token values, each [N]."""

    loss_N: Tensor
    ratio_N: Tensor
    """Ratio at the configured level, detached."""
    clipped_N: Tensor
    """True where a clip, the dual clip or a clamp of the weight has an effect."""


def policy_loss(variant: Variant, level: RatioLevel, tokens: LossTokens) -> PolicyLoss:
    """Return the actor's loss of each token; the variants' docstrings have the formulas.

    Raises:
        ValueError: `Decoupled` without the engine's log-probs, or with importance weights, which
            are the same ratio; a function of the user's returns another shape.
    """
    ratio_N = importance_ratio(tokens, level)
    loss_N, clipped_N = variant.losses(tokens, ratio_N)
    if tokens.is_weights_N is not None:
        # After the variant, so that its clip sees the loss of the policy alone.
        loss_N = tokens.is_weights_N * loss_N
    return PolicyLoss(loss_N, ratio_N.detach(), clipped_N.detach())


def importance_ratio(tokens: LossTokens, level: RatioLevel) -> Tensor:
    """Return rho per token, [N], at a ratio level.

    It is exp(lp - old) of the token, or exp of the mean of lp - old over its turn (segment) or over
    its sequence. Means are over the tokens given; gradients flow through them.
    """
    difference_N = tokens.logprobs_N - tokens.old_logprobs_N
    match level:
        case "token":
            return difference_N.exp()
        case "segment":
            return _run_means(difference_N, tokens.sequence_N, tokens.turn_N).exp()
        case "sequence":
            return _run_means(difference_N, tokens.sequence_N).exp()


def kl_loss(
    logprobs_N: Tensor, ref_logprobs_N: Tensor, kind: KlKind, limit: float | None = 10.0
) -> Tensor:
    """Return an estimate of KL(policy || reference) per token, [N], never negative.

    With d = ref - lp (Schulman 2020, "Approximating KL divergence"):

        k2  d^2 / 2
        k3  exp(d) - d - 1

    Gradients flow through `logprobs_N` only. A k3 above `limit` counts as `limit`, without
    gradient: it grows exponentially, and one token would outweigh the batch.
    """
    difference_N = ref_logprobs_N.detach() - logprobs_N
    if kind == "k2":
        return difference_N.square() / 2
    # Before exp, and not after it: infinity times the zero gradient of a clamp is NaN.
    exponent_N = difference_N if limit is None else difference_N.clamp(max=_LARGEST_EXPONENT)
    estimate_N = exponent_N.expm1() - exponent_N
    return estimate_N if limit is None else estimate_N.clamp(max=limit)


_LARGEST_EXPONENT = 80.0
"""Largest argument of exp; the result is finite in float32.

`limit` applies far below it, but without this bound infinity times the clamp's zero gradient would
be NaN.
"""


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Per-token values, each [N]."""

    loss_N: Tensor
    clipped_N: Tensor
    """True where the clip sets the gradient to zero."""


def value_loss(
    values_N: Tensor,
    returns_N: Tensor,
    old_values_N: Tensor | None = None,
    clip: float | None = None,
) -> ValueLoss:
    """Return the critic's loss of each token (Schulman et al. 2017, PPO's code).

        1/2 max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2)
        1/2 (V - G)^2  without `clip`

    Raises:
        ValueError: `clip` without `old_values_N`.
    """
    plain_N = (values_N - returns_N).square() / 2
    if clip is None:
        return ValueLoss(plain_N, torch.zeros_like(plain_N, dtype=torch.bool))
    if old_values_N is None:
        raise ValueError("the value clip needs the values at the batch's start")
    near_N = values_N.clamp(old_values_N - clip, old_values_N + clip)
    bounded_N = (near_N - returns_N).square() / 2
    return ValueLoss(torch.maximum(plain_N, bounded_N), (bounded_N > plain_N).detach())


def _run_means(values_N: Tensor, *keys_N: Tensor) -> Tensor:
    """Replace each value by the mean of its run of equal keys, [N]."""
    starts_N = torch.zeros(len(values_N), dtype=torch.bool, device=values_N.device)
    for key_N in keys_N:
        # A run ends where any of the keys changes.
        starts_N[1:] |= key_N[1:] != key_N[:-1]
    run_N = starts_N.cumsum(0)
    sums_R = values_N.new_zeros(len(values_N)).index_add(0, run_N, values_N)
    # Runs that do not exist have a count of 0; nothing reads their mean.
    counts_R = values_N.new_zeros(len(values_N)).index_add(0, run_N, torch.ones_like(values_N))
    return (sums_R / counts_R.clamp(min=1))[run_N]


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
