"""From one number per turn to advantages per token, on every rank.

This is the second half of a step's order of operations; the first half, on the driver, is `credit`:

    placement on tokens -> token KL -> reward clip -> train-inference filter -> whitened rewards ->
    returns / advantages -> whitening -> advantage clip

The recurrence runs over the RESPONSE tokens of a trajectory alone (prompts and observations are
left out):

    delta_t = r_t + g_t V_next - V_t        A_t = delta_t + g_t l_t A_next

    gae                 g = gamma, l = lambda (Schulman et al. 2016, arXiv 1506.02438);
                        turn_level: g = l = 1 inside a turn
    reinforce           V = 0, l = 1: A_t = r_t + gamma A_next, the discounted reward-to-go
                        (also reinforce_plus_plus and its baseline)
    agentic_reinforce   the same with g = 1 inside a turn and gamma at its end
    advantages          every token has its turn's number
                        (step_reinforce, grpo, rloo, dr_grpo, gigpo)

After the last token of a truncated trajectory the next value is the critic's at the final
observation if configured; otherwise it is 0. A filtered token is removed from the loss, not from
the recurrence, so that no reward is lost. The critic's target is the unwhitened A + V.
reinforce_plus_plus (and its baseline, Hu et al. 2025, arXiv 2501.03262) always whitens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.algorithms import kernels
from agenticrun_workers.algorithms.compiled import run
from agenticrun_workers.algorithms.correction import CorrectionSpec, correct, correction_metrics
from agenticrun_workers.algorithms.credit import Estimator, estimator_of
from agenticrun_workers.algorithms.kernels import NOTHING, Discounts, TokenRewards, Values
from agenticrun_workers.algorithms.kl import KL_CODES, KlKind
from agenticrun_workers.algorithms.normalization import Reduce, moments, rescale, token_moments
from agenticrun_workers.algorithms.segments import Booleans, Floats, Integers, column_sums


@dataclass(frozen=True, slots=True)
class Tokens:
    """The L tokens of a rank's N trajectories, prompts included, as concatenated whole sequences.

    A step-wise trajectory has several sequences, adjacent and in turn order.
    """

    cu_seqlens_S1: Integers
    cu_trajectories_N1: Integers
    turns_L: NDArray[np.int32]
    """Index into per_turn_K of each response token, not falling; -1 elsewhere."""
    trains_N: Booleans
    engine_logprobs_L: NDArray[Any] | None = None
    old_logprobs_L: NDArray[Any] | None = None
    ref_logprobs_L: NDArray[Any] | None = None
    values_L: NDArray[Any] | None = None
    """V read at the position before each token. Only gae reads it and bootstrap_N."""
    bootstrap_N: Floats | None = None
    """V at the final observation of truncated trajectories, 0 for the others; None: 0 for all."""


@dataclass(frozen=True, slots=True)
class TokenSpec:
    estimator: str = "grpo"
    """A row of `credit.ESTIMATORS`, or a function of the user's."""
    gamma: float = 1.0
    lambd: float = 0.95
    turn_level: bool = False
    reward_kl: KlKind | None = None
    """KL in the reward for estimators of kind `reward`; for the others the driver applies it."""
    whiten_rewards: bool = False
    whiten_advantages: bool = False
    reward_clip: float | None = None
    """Bound of a token's reward after its KL (as ROLL clips a second time)."""
    advantage_clip: float | None = None
    correction: CorrectionSpec | None = None

    @property
    def row(self) -> Estimator:
        """Return the facts about the estimator."""
        return estimator_of(self.estimator)

    @property
    def discounts(self) -> Discounts:
        """Return the discounts of the recurrence above."""
        critic = self.row.critic
        return Discounts(
            self.gamma,
            self.lambd if critic else 1.0,
            self.row.discounts_turns or (critic and self.turn_level),
        )


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    advantages_L: NDArray[np.float32]
    """0 where the mask is False."""
    returns_L: NDArray[np.float32] | None
    """The critic's target at every response token of trajectories that train; only with gae."""
    mask_L: Booleans
    """Response tokens that are in the loss."""
    weights_L: NDArray[np.float32] | None
    """Weights of the train-inference correction: a constant factor of each token's loss."""
    metrics: dict[str, float]
    """Metrics over all ranks."""


def token_advantages(
    spec: TokenSpec, tokens: Tokens, per_turn_K: Floats, kl_coef: float, reduce: Reduce
) -> TokenAdvantages:
    """Return the advantages of a rank's tokens.

    Args:
        spec: recurrence, KL, correction, whitening and clips.
        tokens: of this rank.
        per_turn_K: `Credit.per_turn_K` of this rank's turns, in the order of its trajectories;
            read only if they train.
        kl_coef: current coefficient of `reward_kl`.
        reduce: sums over ranks; identity on one rank. Every rank calls it equally often.

    Raises:
        ValueError: an array that the spec needs is missing, or holds a number that is not finite at
            a response token.
    """
    cu_N1 = tokens.cu_trajectories_N1
    mask_L, weights_L, metrics = _mask_and_weights(spec, tokens, reduce)
    finite_K = np.isfinite(per_turn_K)
    if not finite_K.all():
        raise ValueError(
            f"per_turn_K of turn {int(np.argmin(finite_K))} of this rank is not finite"
        )
    advantages_L = np.empty(len(tokens.turns_L), np.float32)
    returns_L = None
    totals_N4 = np.zeros((len(tokens.trains_N), 4))
    if spec.row.kind == "advantage":
        run(kernels.spread, cu_N1, tokens.turns_L, mask_L, per_turn_K, advantages_L, totals_N4)
    else:
        rewards, reward_metrics = _token_rewards(spec, tokens, per_turn_K, kl_coef, mask_L, reduce)
        returns_L = _discount(spec, tokens, rewards, mask_L, advantages_L, totals_N4)
        metrics |= reward_metrics
    metrics |= _whiten_and_clip(
        spec, advantages_L, mask_L, cu_N1, column_sums(totals_N4), kl_coef, reduce
    )
    return TokenAdvantages(advantages_L, returns_L, mask_L, weights_L, metrics)


def turn_kl(tokens: Tokens, kind: KlKind, num_turns: int) -> Floats:
    """Return the summed KL of the response tokens of each turn, float64 [K]; for `Episodes.kl_K`.

    Raises:
        ValueError: log-probs are missing, or not finite at a response token.
    """
    return _kl_sums(kind, tokens, num_turns)[0]


def _mask_and_weights(
    spec: TokenSpec, tokens: Tokens, reduce: Reduce
) -> tuple[Booleans, NDArray[np.float32] | None, dict[str, float]]:
    """Return the loss mask, the weights of the correction, and metrics.

    The mask holds the response tokens of trajectories that train, without filtered tokens.
    """
    cu_N1 = tokens.cu_trajectories_N1
    # The mask alone needs no log-probs.
    if spec.correction is None:
        mask_L = np.empty(len(tokens.turns_L), np.bool_)
        run(kernels.response_mask, cu_N1, tokens.turns_L, tokens.trains_N, mask_L)
        return mask_L, None, {}
    old_L = _given(tokens.old_logprobs_L, "old_logprobs_L", "correction")
    engine_L = _given(tokens.engine_logprobs_L, "engine_logprobs_L", "correction")
    corrected = correct(
        spec.correction,
        cu_N1,
        tokens.cu_seqlens_S1,
        tokens.turns_L,
        tokens.trains_N,
        old_L,
        engine_L,
    )
    # The kernel only reports that a number is not finite; these name the array and the trajectory.
    if not corrected.finite:
        _finite(tokens, "old_logprobs_L", "correction")
        _finite(tokens, "engine_logprobs_L", "correction")
    metrics = correction_metrics(
        spec.correction, reduce(column_sums(corrected.tally_NM[tokens.trains_N]))
    )
    return corrected.mask_L, corrected.weights_L, metrics


def _token_rewards(
    spec: TokenSpec,
    tokens: Tokens,
    per_turn_K: Floats,
    kl_coef: float,
    mask_L: Booleans,
    reduce: Reduce,
) -> tuple[TokenRewards, dict[str, float]]:
    """Return the inputs of each token's reward, and metrics."""
    cu_N1 = tokens.cu_trajectories_N1
    metrics: dict[str, float] = {}
    old_L = ref_L = NOTHING
    if spec.reward_kl:
        old_L = _given(tokens.old_logprobs_L, "old_logprobs_L", "reward_kl")
        ref_L = _given(tokens.ref_logprobs_L, "ref_logprobs_L", "reward_kl")
        metrics = {
            "critic/kl": _mean_kl(spec.reward_kl, tokens, len(per_turn_K), reduce),
            "critic/kl_coef": kl_coef,
        }
    bound = np.inf if spec.reward_clip is None else spec.reward_clip
    rewards = TokenRewards(
        tokens.turns_L, per_turn_K, old_L, ref_L, KL_CODES[spec.reward_kl], kl_coef, bound
    )

    def sums_about(center: float) -> Floats:
        sums_N4 = np.zeros((len(cu_N1) - 1, 4))
        run(kernels.reward_sums, cu_N1, mask_L, rewards, center, sums_N4)
        return column_sums(sums_N4)

    if spec.reward_clip is not None or spec.whiten_rewards:
        count, total, _, clipped = sums_about(0.0)
        if spec.whiten_rewards:
            # Moments over all ranks: with its own, each rank would train on another scale.
            over_ranks = moments(count, total, lambda center: sums_about(center)[1:3], reduce)
            rewards = rewards._replace(shift=over_ranks.mean, scale=over_ranks.scale(kl_coef))
        count, clipped = reduce(np.array([count, clipped]))
        metrics["critic/token_reward_clip_frac"] = float(clipped / max(count, 1.0))
    return rewards, metrics


def _mean_kl(kind: KlKind, tokens: Tokens, num_turns: int, reduce: Reduce) -> float:
    """Return `kl.mean_kl` over the ranks."""
    _, kl_N2 = _kl_sums(kind, tokens, num_turns)
    spoke_N = kl_N2[:, 1] > 0
    total, count = reduce(
        np.array([(kl_N2[spoke_N, 0] / kl_N2[spoke_N, 1]).sum(), spoke_N.sum()], np.float64)
    )
    return float(total / max(count, 1.0))


def _kl_sums(kind: KlKind, tokens: Tokens, num_turns: int) -> tuple[Floats, Floats]:
    """Return the KL of each turn, and of each trajectory with its number of response tokens."""
    old_L, ref_L = (
        _finite(tokens, "old_logprobs_L", "reward_kl"),
        _finite(tokens, "ref_logprobs_L", "reward_kl"),
    )
    kl_K, kl_N2 = np.zeros(num_turns), np.zeros((len(tokens.trains_N), 2))
    run(
        kernels.turn_kl,
        tokens.cu_trajectories_N1,
        tokens.turns_L,
        old_L,
        ref_L,
        KL_CODES[kind],
        kl_K,
        kl_N2,
    )
    return kl_K, kl_N2


def _discount(
    spec: TokenSpec,
    tokens: Tokens,
    rewards: TokenRewards,
    mask_L: Booleans,
    advantages_L: NDArray[np.float32],
    totals_N4: Floats,
) -> NDArray[np.float32] | None:
    """Fill the advantages and their totals; return the critic's target, None without a critic."""
    gae = spec.row.critic
    values_L = _given(tokens.values_L, "values_L", "gae") if gae else NOTHING
    returns_L = np.empty(len(values_L), np.float32)
    bootstrap_N = (
        tokens.bootstrap_N
        if gae and tokens.bootstrap_N is not None
        else np.zeros(len(tokens.trains_N))
    )
    arrays = (advantages_L, returns_L, totals_N4)
    run(
        kernels.discount,
        tokens.cu_trajectories_N1,
        mask_L,
        rewards,
        Values(values_L, bootstrap_N),
        spec.discounts,
        *arrays,
    )
    finite_N = np.isfinite(totals_N4[:, 3])
    if not finite_N.all():
        raise ValueError(
            f"values_L or bootstrap_N of trajectory {int(np.argmin(finite_N))} "
            "of this rank is not finite"
        )
    return returns_L if gae else None


def _whiten_and_clip(
    spec: TokenSpec,
    advantages_L: NDArray[np.float32],
    mask_L: Booleans,
    cu_N1: Integers,
    totals: Floats,
    kl_coef: float,
    reduce: Reduce,
) -> dict[str, float]:
    """Whiten and clip in place.

    The reported mean and std are those BEFORE whitening: afterwards they carry no information.
    """
    # Every rank reduces in the same order, whatever its own tokens are.
    count, advantages, values, _ = reduce(totals)
    tokens = max(count, 1.0)
    metrics = {"critic/advantages/mean": float(advantages / tokens)}
    if spec.row.critic:
        metrics |= {
            "critic/returns/mean": float((advantages + values) / tokens),
            "critic/values/mean": float(values / tokens),
        }
    clipped = 0
    if spec.whiten_advantages or spec.row.whitens:
        over_ranks = token_moments(totals[0], totals[1], advantages_L, mask_L, cu_N1, reduce)
        metrics["critic/advantages/std"] = over_ranks.std
        # An advantage is what is left of a return without the critic's value, and of log-probs.
        scale = over_ranks.scale(max(kl_coef, abs(float(values / tokens))))
        clipped = rescale(advantages_L, mask_L, cu_N1, over_ranks.mean, scale, spec.advantage_clip)
    elif spec.advantage_clip is not None:
        clipped = rescale(advantages_L, mask_L, cu_N1, bound=spec.advantage_clip)
    if spec.advantage_clip is not None:
        metrics["critic/advantage_clip_frac"] = float(
            reduce(np.array([clipped], np.float64))[0] / tokens
        )
    return metrics


def _given(array: NDArray[Any] | None, name: str, user: str) -> NDArray[Any]:
    if array is None:
        raise ValueError(f"{user} needs {name}")
    return array


def _finite(tokens: Tokens, name: str, user: str) -> NDArray[Any]:
    """Return the array of this name, after a check that it is finite at every response token."""
    array_L = _given(getattr(tokens, name), name, user)
    finite_N = np.ones(len(tokens.trains_N), np.bool_)
    run(kernels.all_finite, tokens.cu_trajectories_N1, tokens.turns_L, array_L, finite_N)
    if not finite_N.all():
        raise ValueError(
            f"{name} of trajectory {int(np.argmin(finite_N))} of this rank is not finite; "
            "report the trajectory with stop reason env_error instead"
        )
    return array_L
