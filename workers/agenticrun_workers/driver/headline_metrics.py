"""Which metrics people see first: a snapshot holds few, `.status` fewer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import numpy as np

from agenticrun_api.status import MAX_METRIC_NAME, MAX_METRICS

TELLING = tuple(
    re.compile(pattern)
    for pattern in (
        "val/[^/]+/success", "val/[^/]+/random_success", "val/[^/]+/warmup_success", "rollout/score/mean", "rollout/success/mean",
        "actor/total_loss", "actor/entropy", "actor/approxkl", "actor/grad_norm", "critic/kl", "critic/loss", "engine/logprob_gap",
        "group/zero_variance_share", "staleness/mean", "system/tps", "time/step", "weight_sync/seconds", "tokens/response_length/mean",
        "val/success/best", "val/.+", "guard/.+", "actor/.+", "critic/.+", "env/[^/]+/success", "engine/.+", "group/.+", "stop/.+",
        "time/.+", "rollout/.+", "env/.+", "tokens/.+",
    )
)  # fmt: skip
"""The first pattern that a name matches is its rank."""
PER_PATTERN = 3
"""Names of one pattern that may come before the next pattern's, so that many environments do not hide the losses."""

NAME = re.compile(rf"[A-Za-z0-9_./@<>-]{{1,{MAX_METRIC_NAME}}}")
"""Names that a snapshot may hold; an environment may have others, which stay in metrics.jsonl."""


def telling(metrics: Mapping[str, float]) -> dict[str, float]:
    """At most as many finite metrics as a snapshot may hold, the most telling first."""
    fits = sorted(
        (_rank(name), name)
        for name, value in metrics.items()
        if np.isfinite(value) and NAME.fullmatch(name)
    )
    seen: Counter[int] = Counter()
    order: list[tuple[bool, int, str]] = []
    for rank, name in fits:
        seen[rank] += 1
        order.append((seen[rank] > PER_PATTERN, rank, name))
    return {name: metrics[name] for _, _, name in sorted(order)[:MAX_METRICS]}


def _rank(name: str) -> int:
    return next(
        (place for place, pattern in enumerate(TELLING) if pattern.fullmatch(name)), len(TELLING)
    )
