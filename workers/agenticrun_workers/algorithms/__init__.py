"""Pure maths of the algorithms: NumPy and numba for rewards and advantages, torch for losses.

A step's order of operations has two halves: `assign_credit` on the driver, from the scalars of a batch to a number per turn;
`token_advantages` on every rank, from those to advantages per token.
"""

from agenticrun_workers.algorithms.correction import CorrectionSpec, FilterSpec, WeightSpec
from agenticrun_workers.algorithms.credit import Credit, CreditSpec, Estimator, Kind, assign_credit
from agenticrun_workers.algorithms.episodes import Episodes
from agenticrun_workers.algorithms.kl import KlController, KlKind, mean_kl
from agenticrun_workers.algorithms.token_advantages import (
    TokenAdvantages,
    Tokens,
    TokenSpec,
    token_advantages,
    turn_kl,
)
from agenticrun_workers.algorithms.whitening import Reduce

__all__ = [
    "CorrectionSpec",
    "Credit",
    "CreditSpec",
    "Episodes",
    "Estimator",
    "FilterSpec",
    "Kind",
    "KlController",
    "KlKind",
    "Reduce",
    "TokenAdvantages",
    "TokenSpec",
    "Tokens",
    "WeightSpec",
    "assign_credit",
    "mean_kl",
    "token_advantages",
    "turn_kl",
]
