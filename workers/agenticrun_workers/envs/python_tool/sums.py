"""Problems of the environment's own, for where there is no data set: small arithmetic, without end."""

from __future__ import annotations

import operator

import numpy as np

from agenticrun_workers.envs.grid import in_holdout
from agenticrun_workers.types import Stream

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
HOLDOUT_SHARE = 0.2


def problem(seed: int, split: Stream, highest: int) -> tuple[str, str]:
    """Question and answer about two numbers from 0 to `highest`. A hash of the question decides for which split it is."""
    rng = np.random.default_rng(seed)
    while True:
        sign = str(rng.choice(list(OPERATIONS)))
        left, right = (int(number) for number in rng.integers(0, highest + 1, 2))
        question = f"{left} {sign} {right}"
        if is_holdout(question) == (split is Stream.VALIDATION):
            return question, str(OPERATIONS[sign](left, right))


def is_holdout(question: str) -> bool:
    """Whether a question belongs to validation: the same answer on every machine."""
    return in_holdout(f"sums:{question}".encode(), HOLDOUT_SHARE)
