"""Pure maths of the algorithms: NumPy and numba for rewards and advantages, torch for losses.

A step's order of operations has two halves. `assign_credit` runs on the driver and turns the
scalars of a batch into one number per turn. `token_advantages` runs on every rank and turns those
into advantages per token.
"""

from agenticrun_workers.algorithms.correction import CorrectionSpec, FilterSpec, WeightSpec
from agenticrun_workers.algorithms.credit import (
    Credit,
    CreditSpec,
    Episodes,
    Estimator,
    Kind,
    assign_credit,
)
from agenticrun_workers.algorithms.kl import KlController, KlKind, mean_kl
from agenticrun_workers.algorithms.normalization import Reduce
from agenticrun_workers.algorithms.token_advantages import (
    TokenAdvantages,
    Tokens,
    TokenSpec,
    token_advantages,
    turn_kl,
)

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
