"""Correction of the mismatch between log-probs of the trainer and of the inference engine.

Both are of the same weights and tokens. With q = log pi_old - log pi_engine of a response token,
each token has four ratios, and four differences of probabilities:

    token      exp(q)                                  p_old - p_engine
    segment    exp(mean of q over its turn)            mean over its turn
    geometric  exp(mean of q over its sequence)        mean over its sequence
    sequence   exp(SUM of q over its sequence)         sum over its sequence

The weight is min(ratio, upper bound) at one level (truncated importance sampling; Yao et al. 2025,
"Your efficient RL framework secretly brings you off-policy RL training"). Filters remove tokens
with a ratio or difference out of bounds from the mask, and with it from loss, denominators and
whitening. Means run over all response tokens, including those that another filter removes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.algorithms import backend
from agenticrun_workers.algorithms.layout import (
    CLIPPED,
    COLUMNS,
    DIFF,
    DIFF_KEPT,
    GAP,
    KEPT,
    LEVELS,
    NOTHING,
    RATIO,
    RATIO_KEPT,
    TOKENS,
    Bounds,
)
from agenticrun_workers.algorithms.segments import Booleans, Floats, Integers

Level = Literal["token", "segment", "geometric", "sequence"]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Multiplication of each token's loss by its ratio, at most `upper_bound`; None: no bound."""

    level: Level = "token"
    upper_bound: float | None = 1.2


@dataclass(frozen=True, slots=True)
class FilterSpec:
    """Bounds outside which a token is removed from the loss; None: no bound."""

    level: Level = "token"
    ratio_low: float | None = None
    ratio_high: float | None = None
    diff_low: float | None = None
    diff_high: float | None = None


@dataclass(frozen=True, slots=True)
class CorrectionSpec:
    weight: WeightSpec | None = None
    filters: tuple[FilterSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Correction:
    """Result of the correction for the tokens of a rank."""

    mask_L: Booleans
    """Response tokens of trained trajectories that no filter removed."""
    weights_L: NDArray[np.float32] | None
    """Weight of each token, 0 outside responses; None if the correction has no weight."""
    tally_NM: Floats
    """Sums per trajectory; `correction_metrics` reads them."""

    @property
    def finite(self) -> bool:
        """True if all log-probs were finite."""
        return bool(np.isfinite(self.tally_NM[:, GAP]).all())


def correct(
    spec: CorrectionSpec,
    cu_trajectories_N1: Integers,
    cu_seqlens_S1: Integers,
    turns_L: NDArray[np.int32],
    trains_N: Booleans,
    old_logprobs_L: NDArray[Any],
    engine_logprobs_L: NDArray[Any],
) -> Correction:
    """Return mask and weights of packed tokens; for the arrays see `Tokens`."""
    bounds = _bounds(spec)
    mask_L = np.empty(len(turns_L), np.bool_)
    weights_L = np.empty(len(turns_L), np.float32) if spec.weight else None
    tally_NM = np.zeros((len(trains_N), COLUMNS))
    arrays = (
        old_logprobs_L,
        engine_logprobs_L,
        bounds,
        mask_L,
        NOTHING.copy() if weights_L is None else weights_L,
        tally_NM,
    )
    backend.run("correct", cu_trajectories_N1, cu_seqlens_S1, turns_L, trains_N, *arrays)
    return Correction(mask_L, weights_L, tally_NM)


def correction_metrics(spec: CorrectionSpec, tally_M: Floats) -> dict[str, float]:
    """Return metrics under ROLL's names: means over response tokens.

    Args:
        spec: of the correction.
        tally_M: tallies summed over trajectories and ranks.
    """
    tokens = max(tally_M[TOKENS], 1.0)
    metrics = {
        "actor/train_infer_logprob_gap": tally_M[GAP] / tokens,
        "actor/train_infer_final_mask_mean": tally_M[KEPT] / tokens,
    }
    if spec.weight:
        metrics["actor/is_weight_clipfrac"] = tally_M[CLIPPED] / tokens
    filtered = {f.level for f in spec.filters}
    for number, level in enumerate(LEVELS):
        metrics[f"actor/train_infer_ratio_{level}_mean"] = tally_M[RATIO + number] / tokens
        metrics[f"actor/train_infer_diff_{level}_mean"] = tally_M[DIFF + number] / tokens
        if level in filtered:
            metrics[f"actor/train_infer_{level}_ratio_mask_mean"] = (
                tally_M[RATIO_KEPT + number] / tokens
            )
            metrics[f"actor/train_infer_{level}_diff_mask_mean"] = (
                tally_M[DIFF_KEPT + number] / tokens
            )
    return {name: float(value) for name, value in metrics.items()}


def _bounds(spec: CorrectionSpec) -> Bounds:
    """Return the filters as one row of bounds per level.

    A token must pass all filters of a level.
    """
    low, high = (np.full((2, len(LEVELS)), end) for end in (-np.inf, np.inf))
    for chosen in spec.filters:
        row = LEVELS.index(chosen.level)
        for kind, (least, most) in enumerate(
            ((chosen.ratio_low, chosen.ratio_high), (chosen.diff_low, chosen.diff_high))
        ):
            low[kind, row] = max(low[kind, row], -np.inf if least is None else least)
            high[kind, row] = min(high[kind, row], np.inf if most is None else most)
    upper = (
        np.inf
        if spec.weight is None or spec.weight.upper_bound is None
        else spec.weight.upper_bound
    )
    return Bounds(
        low[0],
        high[0],
        low[1],
        high[1],
        LEVELS.index(spec.weight.level) if spec.weight else -1,
        upper,
    )
