"""Arguments of the token kernels: named tuples, because compiled code accepts those."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.algorithms.segments import Floats

NOTHING = np.zeros(0, np.float32)
"""Stands for an array that is not given."""

LEVELS = ("token", "segment", "geometric", "sequence")
"""Levels of the train-inference ratio.

The ratio of a token; exp of the mean log ratio over the turn; over the sequence; exp of the SUM
over the sequence.
"""


class TokenRewards(NamedTuple):
    """Inputs of a response token's reward.

    (clip(reward of its turn if it is the turn's last - coef * KL) - shift) * scale
    """

    turns_L: NDArray[np.int32]
    per_turn_K: Floats
    old_logprobs_L: NDArray[Any]
    ref_logprobs_L: NDArray[Any]
    kl_code: int
    """One of `KL_CODES`; with 0 neither log-prob is read."""
    kl_coef: float
    bound: float
    """Bound of the clip; infinite for none."""
    shift: float = 0.0
    scale: float = 1.0


class Discounts(NamedTuple):
    """gamma and lambda between a token and the next response token."""

    gamma: float
    lambd: float
    turn_level: bool
    """Apply gamma and lambda only where a turn ends; both are 1 inside a turn."""


class Values(NamedTuple):
    """Values of the critic.

    V before each token, and V at the final observation of each trajectory (0 after a terminal
    token).
    """

    values_L: NDArray[Any]
    bootstrap_N: Floats


class Bounds(NamedTuple):
    """Bounds of the train-inference correction; rows are LEVELS."""

    ratio_low: Floats
    ratio_high: Floats
    diff_low: Floats
    diff_high: Floats
    weight_level: int
    """Index into LEVELS; -1 for no weights."""
    weight_high: float


# Columns of the tallies that the correction keeps per trajectory, over its response tokens.
TOKENS = 0
GAP = 1
"""Sum of |log ratio|."""
CLIPPED = 2
"""Tokens whose weight was limited."""
KEPT = 3
"""Tokens that no filter removed."""
RATIO = 4
"""Sum of the ratio; the first of one column per level."""
DIFF = 8
"""Sum of the difference of probabilities; the first of one column per level."""
RATIO_KEPT = 12
"""Tokens with a ratio within its bounds; the first of one column per level."""
DIFF_KEPT = 16
COLUMNS = 20

LOG_LIMIT = 20.0
"""Log ratios are clipped to [-20, 20] before exp (exp(20) is 5e8).

Without the limit the sum over a long sequence would overflow.
"""
