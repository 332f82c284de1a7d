"""What the token kernels are called with. Named tuples, because compiled code takes those."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.algorithms.segments import Floats

NOTHING = np.zeros(0, np.float32)
"""In the place of an array that is not there."""

LEVELS = ("token", "segment", "geometric", "sequence")
"""Of the train-inference ratio: of a token; exp of its mean over the turn, over the sequence; exp of its SUM over the sequence."""


class TokenRewards(NamedTuple):
    """The reward of a response token: (clip(reward of its turn if it is the turn's last - coef * KL) - shift) * scale."""

    turns_L: NDArray[np.int32]
    per_turn_K: Floats
    old_logprobs_L: NDArray[Any]
    ref_logprobs_L: NDArray[Any]
    kl_code: int
    """Of `KL_CODES`; 0 reads neither log-prob."""
    kl_coef: float
    bound: float
    """Of the clip; infinite for none."""
    shift: float = 0.0
    scale: float = 1.0


class Discounts(NamedTuple):
    """gamma and lambda between a token and the next response token."""

    gamma: float
    lambd: float
    turn_level: bool
    """Only where a turn ends; 1 inside a turn."""


class Values(NamedTuple):
    """The critic's side: V before each token, and V at the final observation of each trajectory (0 after a terminal token)."""

    values_L: NDArray[Any]
    bootstrap_N: Floats


class Bounds(NamedTuple):
    """What the train-inference correction keeps and weighs; rows are LEVELS."""

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
"""From here one column per level: sum of the ratio."""
DIFF = 8
"""Sum of the difference of probabilities."""
RATIO_KEPT = 12
"""Tokens whose ratio is within its bounds."""
DIFF_KEPT = 16
COLUMNS = 20

LOG_LIMIT = 20.0
"""Log ratios are held in [-20, 20] before exp, so that the sum over a long sequence stays a number (exp(20) is 5e8)."""
